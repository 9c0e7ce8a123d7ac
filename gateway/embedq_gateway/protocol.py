"""HTTP/1.1 as uvicorn speaks it, with bounds on what a client may make it wait for and hold."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_HEAD_BYTES = 64 << 10
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s"
)
_TOO_MANY = (
    b'{"error":{"message":"Too many open connections; try again later.","type":"server_error","param":null,'
    b'"code":"too_many_connections"}}'
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(_REFUSAL % (len(_TOO_MANY), _TOO_MANY))
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
        if self._head_timer is not None and self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_done()
        super().on_headers_complete()

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
