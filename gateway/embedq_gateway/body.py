"""Reading request bodies with a bound on each, on all of them together, and on the time they take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from embedq_gateway.errors import ApiError

T = TypeVar("T")

_INLINE_BYTES = 32 << 10
"""What is smaller costs less to parse than to hand to another thread."""
_DISCARD_S = 2.0


class BodyReader:
    """Reads bodies into memory, all of them together never more than `max_buffered_bytes`."""

    def __init__(self, *, max_body_bytes: int, max_buffered_bytes: int, timeout_s: float) -> None:
        self._most = max_body_bytes
        self._most_held = max_buffered_bytes
        self._timeout_s = timeout_s
        self.held = 0

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncIterator[bytearray]:
        """The JSON body of `request`, counted as held for the length of the block.

        Raises:
            ApiError: 408, 413, 415 or 429.
            ClientDisconnect: the client left.
        """
        require_content_type(request, "application/json")
        chunks = bytearray()
        try:
            async for chunk in bounded(request, self._most, self._timeout_s):
                if self.held + len(chunk) > self._most_held:
                    raise ApiError(
                        429, "overloaded", "The gateway holds too many large requests; try again.", retry_after_s=1
                    )
                self.held += len(chunk)
                chunks += chunk
            yield chunks
        finally:
            self.held -= len(chunks)


async def bounded(request: Request, most: int, timeout_s: float) -> AsyncIterator[bytes]:
    """The chunks of a body of at most `most` bytes, all within `timeout_s` seconds; raises ApiError 408, 413."""
    too_large = ApiError(413, "request_too_large", f"The request's body is larger than {most:,} bytes.")
    if (length := request.headers.get("content-length", "")).isdigit() and int(length) > most:
        await _discard(request)
        raise too_large
    deadline = asyncio.get_running_loop().time() + timeout_s
    received = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(stream, b"")
        except TimeoutError:
            raise ApiError(
                408, "request_timeout", f"The request's body did not arrive within {timeout_s:g} s."
            ) from None
        if not chunk:
            return
        received += len(chunk)
        if received > most:
            await _discard(request, stream)
            raise too_large
        yield chunk


async def _discard(request: Request, stream: AsyncIterator[bytes] | None = None) -> None:
    """Let a client finish sending what is thrown away, for a moment: one that is cut off may not read the answer."""
    try:
        async with asyncio.timeout(_DISCARD_S):
            async for _ in stream or request.stream():
                pass
    except (TimeoutError, ClientDisconnect):
        return


def require_content_type(request: Request, expected: str) -> str:
    """The content type, if it is `expected`; raises ApiError 415. A body without one is taken for what is expected."""
    given = request.headers.get("content-type", expected)
    if given.partition(";")[0].strip().lower() != expected:
        raise ApiError(415, "unsupported_media_type", f"Send the body as {expected}.")
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ApiError(415, "unsupported_encoding", "Send the body without a content encoding.")
    return given


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`work()`, in another thread where `size` bytes of input or output would hold the event loop up."""
    if size <= _INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)
