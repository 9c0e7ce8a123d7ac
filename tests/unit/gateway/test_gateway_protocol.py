"""What a connection gives the application, whatever its bytes are."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from embedq_gateway.protocol import bounded_protocol
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HELLO = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    answer = {"method": request.method, "path": request.url.path, "body": (await request.body()).decode()}
    await Response(json.dumps(answer))(scope, receive, send)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        echo,
        http=bounded_protocol(head_timeout_s=20, max_connections=100),
        ws="none",
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[:2]
    server.should_exit = True
    thread.join(20)


def exchange(address: tuple[str, int], *pieces: bytes) -> bytes:
    """What comes back for `pieces`, sent one after the other, until the server closes."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.001)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answers(received: bytes) -> list[dict[str, str]]:
    found = []
    while received:
        _, _, rest = received.partition(b"\r\n\r\n")
        answer, end = json.JSONDecoder().raw_decode(rest.decode())
        found.append(answer)
        received = rest[end:]
    return found


def post(path: str, body: str, *fields: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"".join(fields) + b"\r\n" + body.encode()


LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
REQUESTS = post("/a", '{"n": 1}', HELLO) + post("/b", "GET /no HTTP/1.1\r\n\r\n", HELLO) + LAST


@pytest.mark.parametrize("cut", [len(REQUESTS), 1, 40, 200], ids=["whole", "bytes", "40", "200"])
def test_a_request_that_would_rather_be_http2_keeps_its_body_and_its_connection(
    address: tuple[str, int], cut: int
) -> None:
    pieces = [REQUESTS[start : start + cut] for start in range(0, len(REQUESTS), cut)]
    assert answers(exchange(address, *pieces)) == [
        {"method": "POST", "path": "/a", "body": '{"n": 1}'},
        {"method": "POST", "path": "/b", "body": "GET /no HTTP/1.1\r\n\r\n"},
        {"method": "GET", "path": "/last", "body": ""},
    ]


def test_a_body_in_chunks_survives_the_wish_for_another_protocol(address: tuple[str, int]) -> None:
    head = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + HELLO + b"\r\n"
    received = exchange(address, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n" + LAST)
    assert [answer["body"] for answer in answers(received)] == ["abcde", ""]


def test_thousands_of_such_requests_at_once_are_all_answered(address: tuple[str, int]) -> None:
    received = exchange(address, post("/d", "x", HELLO) * 2000 + LAST)
    assert len(answers(received)) == 2001


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 100_000],
    ids=["tls", "version", "long"],
)
def test_what_is_no_request_is_answered_like_any_other_mistake(address: tuple[str, int], sent: bytes) -> None:
    head, _, body = exchange(address, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
