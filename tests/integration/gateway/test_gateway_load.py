"""Many connections, slow clients, overload, clients that leave, and an end in good order."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from stack import Gateway, Stack, error_of, wait_until

HANG_S = 100.0
_CONNECTIONS = 2000


@pytest.fixture(scope="module", autouse=True)
def _files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * _CONNECTIONS:
        pytest.skip(f"this machine lets a process open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * _CONNECTIONS), hard))


@pytest.fixture(scope="module")
def small(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with tight limits and short patience."""
    options = ("--max-in-flight", 4, "--body-timeout-s", 1.5, "--head-timeout-s", 1, "--max-connections", 100)
    patience = ("--request-timeout-s", 2, "--max-buffered-bytes", 4 << 20, "--max-body-bytes", 2 << 20)
    with stack.another(*options, *patience, data=tmp_path_factory.mktemp("small")) as gateway:
        yield gateway


def address(caller: Gateway | Stack) -> tuple[str, int]:
    host, port = caller.url.removeprefix("http://").split(":")
    return host, int(port)


def request_bytes(model: str, text: str) -> bytes:
    body = json.dumps({"model": model, "input": text}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def test_2000_connections_and_slow_ones_among_them_lose_nothing(stack: Stack) -> None:
    process = psutil.Process(stack.gateway.program.process.pid)
    before = process.memory_info().rss
    statuses: Counter[int] = Counter()
    host, port = address(stack)

    async def ask(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        # Every third client dribbles its request; the others send it whole.
        data = request_bytes(stack.model.name, f"text {number}")
        if number % 3 == 0:
            for piece in (data[:20], data[20:90], data[90:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.5)
        else:
            writer.write(data)
        status = int((await reader.readline()).split()[1])
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        body = json.loads(await reader.readexactly(int(length[1])))
        statuses[status] += 1
        if status == 429:
            assert b"retry-after:" in head
            await asyncio.sleep(0.2)
            writer.close()
            await ask(number)
            return
        assert len(body["data"][0]["embedding"]) == 32, body
        writer.close()

    async def run() -> None:
        async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as group:
            for number in range(_CONNECTIONS):
                group.create_task(ask(number))
            async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S) as client:
                for _ in range(5):
                    assert (await client.get("/health")).status_code == 200
                    await asyncio.sleep(0.2)

    asyncio.run(run())
    assert statuses[200] == _CONNECTIONS
    assert set(statuses) <= {200, 429}
    assert process.memory_info().rss - before < 300 << 20


def test_a_client_that_never_finishes_its_head_is_cut_off(small: Gateway) -> None:
    for beginning in (b"", b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nX-Slow: "):
        with socket.create_connection(address(small), timeout=HANG_S) as slow:
            slow.sendall(beginning)
            assert slow.recv(1) == b""


def test_an_endless_head_is_refused(small: Gateway) -> None:
    with socket.create_connection(address(small), timeout=HANG_S) as endless:
        endless.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with pytest.raises(OSError):  # noqa: PT012
            for number in range(10_000):
                endless.sendall(f"X-{number}: {'y' * 1000}\r\n".encode())


def test_a_client_that_never_finishes_its_body_hears_408(small: Gateway) -> None:
    with socket.create_connection(address(small), timeout=HANG_S) as slow:
        slow.sendall(request_bytes(small.model.name, "a text")[:-5])
        assert slow.recv(64).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_never_reads_holds_no_connection_for_good(small: Gateway, tmp_path: Path) -> None:
    content = b"x" * (64 << 20)
    file = small.post("/v1/files", data={"purpose": "batch"}, files={"file": ("big", content)}).json()
    process = psutil.Process(small.program.process.pid)
    with socket.create_connection(address(small), timeout=HANG_S) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(f"GET /v1/files/{file['id']}/content HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        mine = deaf.getsockname()[1]

        def held() -> bool:
            return any(c.raddr and c.raddr.port == mine for c in process.net_connections("tcp"))

        assert deaf.recv(12) == b"HTTP/1.1 200"
        assert held()
        wait_until(lambda: not held(), "the gateway lets go")


def test_connections_above_the_limit_are_told_so_and_health_answers_afterwards(small: Gateway) -> None:
    crowd = [socket.create_connection(address(small), timeout=HANG_S) for _ in range(100)]
    try:
        with socket.create_connection(address(small), timeout=HANG_S) as further:
            answer = further.recv(4096)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"too_many_connections" in answer
    finally:
        for connection in crowd:
            connection.close()
    wait_until(lambda: small.get("/health").status_code == 200, "health answers")


def test_overload_and_lateness_are_answered_and_hang_nobody(stack: Stack, small: Gateway) -> None:
    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=small.url, timeout=HANG_S) as client:
            body = {"model": small.model.name, "input": "a text"}
            return list(await asyncio.gather(*(client.post("/v1/embeddings", json=body) for _ in range(40))))

    others = runs(stack)
    with stack.worker.frozen():
        answers = asyncio.run(flood())
        assert small.get("/health").status_code == 200
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses == {504: 4, 429: 36}
    for answer in answers:
        code = error_of(answer, answer.status_code)["code"]
        assert code == {504: "timeout", 429: "overloaded"}[answer.status_code]
        assert answer.status_code != 429 or int(answer.headers["Retry-After"]) >= 1
    wait_until(lambda: runs(stack) <= others, "the late requests' work is gone")
    wait_until(
        lambda: small.post("/v1/embeddings", json=a_request(small)).status_code == 200, "requests are answered again"
    )


def test_bodies_are_not_held_without_bound(small: Gateway) -> None:
    # Four clients may hold 4 MiB between them: the third body of 1.9 MiB is one too many.
    sockets = [socket.create_connection(address(small), timeout=HANG_S) for _ in range(4)]
    try:
        for connection in sockets:
            connection.sendall(request_bytes(small.model.name, "x" * 1_900_000)[:-10])
        heads = [connection.recv(32).split()[1] for connection in sockets]
    finally:
        for connection in sockets:
            connection.close()
    assert Counter(heads) == {b"408": 2, b"429": 2}


def test_work_of_a_client_that_leaves_is_cancelled(stack: Stack) -> None:
    others = runs(stack)
    with stack.worker.frozen():
        sockets = [socket.create_connection(address(stack), timeout=HANG_S) for _ in range(5)]
        for connection in sockets:
            connection.sendall(request_bytes(stack.model.name, "nobody waits for this"))
        wait_until(lambda: len(runs(stack) - others) == 5, "the requests are on the queue")
        for connection in sockets:
            connection.close()
        wait_until(lambda: runs(stack) <= others, "their work is cancelled")
    assert re.search(
        r'requests_total\{method="POST",route="/v1/embeddings",status="499"\} \d', stack.get("/metrics").text
    )


def test_sigterm_finishes_what_was_asked_and_accepts_nothing_more(stack: Stack, tmp_path: Path) -> None:
    others = runs(stack)
    with stack.another(data=tmp_path) as gateway:
        answers: list[httpx.Response] = []
        with stack.worker.frozen():
            asking = threading.Thread(
                target=lambda: answers.append(gateway.post("/v1/embeddings", json=a_request(gateway)))
            )
            asking.start()
            wait_until(lambda: runs(stack) - others, "the request is on the queue")
            gateway.program.process.terminate()
            wait_until(lambda: refuses(gateway), "the gateway accepts nothing more")
        asking.join(HANG_S)
        assert [answer.status_code for answer in answers] == [200]
        assert gateway.program.process.wait(HANG_S) == 0


def test_a_queue_whose_server_hangs_is_answered_with_503_until_it_is_back(stack: Stack) -> None:
    stack.server.pause()
    try:
        wait_until(lambda: stack.get("/ready").status_code == 503, "the gateway is not ready")
        assert stack.refused(503, json=a_request(stack))["code"] == "broker_unavailable"
        assert error_of(stack.get("/v1/files"), 503)["code"] == "broker_unavailable"
        assert stack.get("/health").status_code == 200
    finally:
        stack.server.resume()
    wait_until(lambda: stack.get("/ready").status_code == 200, "the gateway is ready")
    wait_until(lambda: stack.post("/v1/embeddings", json=a_request(stack)).status_code == 200, "requests are answered")


def test_a_queue_without_a_worker_is_answered_with_503_and_keeps_its_batches(stack: Stack, tmp_path: Path) -> None:
    gateway = Gateway(stack, tmp_path, "--queue", "nobody", "--max-open-batches", 1)
    try:
        assert error_of(gateway.get("/ready"), 503)["message"] == "Not ready: no worker has ever served this queue."
        assert gateway.refused(503, json=a_request(gateway))["code"] == "not_ready"
        error_of(gateway.get("/info"), 503)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": a_request(gateway)}
        files = {"file": ("a.jsonl", json.dumps(line))}
        file_id = gateway.post("/v1/files", data={"purpose": "batch"}, files=files).json()["id"]
        request = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        batch_id = gateway.post("/v1/batches", json=request).json()["id"]
        assert gateway.get(f"/v1/batches/{batch_id}").json()["status"] == "validating"
        assert gateway.refused(429, "/v1/batches", json=request)["code"] == "too_many_batches"
        # Even a batch that ends before anybody knows the model accounts for its requests.
        gateway.post(f"/v1/batches/{batch_id}/cancel")
        batch = wait_until(lambda: cancelled(gateway, batch_id), "the batch is cancelled")
        assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        content = gateway.get(f"/v1/files/{batch['error_file_id']}/content").json()
        assert (content["custom_id"], content["error"]["code"]) == ("a", "batch_cancelled")
    finally:
        gateway.program.kill()


def test_only_listed_origins_may_call_from_a_page(stack: Stack, tmp_path: Path) -> None:
    with stack.another("--cors-origins", "https://ours.example", data=tmp_path) as gateway:
        for origin, allowed in (("https://ours.example", "https://ours.example"), ("https://other.example", None)):
            answer = gateway.get("/health", headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed


def a_request(caller: Gateway | Stack) -> dict[str, Any]:
    return {"model": caller.model.name, "input": "a text"}


def cancelled(gateway: Gateway, batch_id: str) -> dict[str, Any] | None:
    batch: dict[str, Any] = gateway.get(f"/v1/batches/{batch_id}").json()
    return batch if batch["status"] == "cancelled" else None


def runs(stack: Stack) -> set[bytes]:
    """Runs on the queue that are not over; another test's gateway may have been killed before it closed its own."""
    with stack.server.client() as client:
        names = client.zrange("embedq:{default}:runs", 0, -1)
        states = [client.hget(f"embedq:{{default}}:run:{name.decode()}", "status") for name in names]
    return {name for name, state in zip(names, states, strict=True) if state in (b"validating", b"in_progress")}


def refuses(gateway: Gateway) -> bool:
    try:
        socket.create_connection(address(gateway), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False
