"""Both clients behind one set of blocking calls, so that each test runs against either."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from embedq_broker.settings import BrokerSettings

from embedq import AsyncClient, Client

T = TypeVar("T")


class AsyncFace:
    """An AsyncClient on an event loop of its own thread. Coroutines become blocking calls, iterators stay lazy."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncClient(settings=settings)

    def __getattr__(self, name: str) -> Any:
        return _blocking(self, getattr(self._client, name))

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self.wait_for(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Handle:
    def __init__(self, face: AsyncFace, handle: Any) -> None:
        self._face = face
        self._handle = handle
        self.run = handle.run

    def __getattr__(self, name: str) -> Any:
        return _blocking(self._face, getattr(self._handle, name))


def _blocking(face: AsyncFace, method: Any) -> Any:
    def call(*args: Any, **more: Any) -> Any:
        outcome = method(*args, **more)
        if isinstance(outcome, AsyncIterator):
            return _iterate(face, outcome)
        if asyncio.iscoroutine(outcome):
            outcome = face.wait_for(outcome)
        return _Handle(face, outcome) if hasattr(outcome, "ordered") else outcome

    return call


def _iterate(face: AsyncFace, pages: AsyncIterator[T]) -> Iterator[T]:
    while True:
        try:
            yield face.wait_for(anext(pages))  # type: ignore[arg-type]
        except StopAsyncIteration:
            return


FACES = {"sync": lambda settings: Client(settings=settings), "async": AsyncFace}
