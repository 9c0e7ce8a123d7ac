"""HTTP/1.1 as uvicorn speaks it, with bounds on what a client may make it wait for and hold."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, ClassVar

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from embedq_gateway.errors import ApiError

_MOST_HEAD_BYTES = 64 << 10


def _refusal(status: str, error: ApiError) -> bytes:
    """The whole answer to what never becomes a request."""
    body = orjson.dumps(error.body)
    headers = {**error.headers, "Content-Type": "application/json", "Connection": "close", "Content-Length": len(body)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


_TOO_MANY = _refusal(
    "503 Service Unavailable",
    ApiError(503, "too_many_connections", "Too many open connections; try again later.", retry_after_s=1),
)


class BoundedProtocol(HttpToolsProtocol):
    """A connection ends if its request's head is late or large, if nobody reads its answer, or if it is one too many.

    uvicorn bounds only the pause between two requests. Without these bounds a client that sends a byte a minute, or an
    endless header, or never reads, costs a connection and memory for good.
    """

    head_timeout_s: ClassVar[float]
    max_connections: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._without_upgrade: bytes | None = None
        self._upgrade_end: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        self._write_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        while self._without_upgrade is not None and self._upgrade_end is not None:
            data = self._without_upgrade + data[self._upgrade_end :]
            self._without_upgrade = self._upgrade_end = None
            super().data_received(data)
        if self._head_timer is not None and self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            # httptools takes what follows for another protocol and drops the body. A server that stays with HTTP/1.1
            # ignores the wish, which Java's client has with every request: the head is read again without it.
            fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
            version = self.parser.get_http_version().encode()
            self._without_upgrade = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, fields)
            return
        self._head_done()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._without_upgrade is None:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        error = sys.exception()
        if self._without_upgrade is not None and isinstance(error, httptools.HttpParserUpgrade):
            self._upgrade_end = int(error.args[0])

    def send_400_response(self, msg: str) -> None:
        self.transport.write(_refusal("400 Bad Request", ApiError(400, "invalid_http", msg)))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._write_done()
        super().resume_writing()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _write_done(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def bounded_protocol(*, head_timeout_s: float, max_connections: int) -> type[BoundedProtocol]:
    """A protocol class with these bounds: uvicorn makes the instances."""
    return type("Protocol", (BoundedProtocol,), {"head_timeout_s": head_timeout_s, "max_connections": max_connections})
