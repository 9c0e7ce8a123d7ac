"""The asynchronous client. For one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from embedq_broker.outcome import Cursor
from embedq_broker.settings import BrokerSettings
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import UsageError
from embedq_schemas.names import Lane
from embedq_schemas.run import RunState, RunStatus
from numpy.typing import NDArray

from embedq_producer.client.documents import Texts
from embedq_producer.client.flows import DEFAULT_OPTIONS, Call, Flow, Flows, Sleep, attached, client_settings
from embedq_producer.client.values import Backlog, Embeddings, ModelInfo, ResultPage, RunResults

T = TypeVar("T")

_THREADS = 4
"""Threads, and so connections, beside the one that waits: each call is short, and many wait for a turn."""


class AsyncClient:
    """`Client` for asyncio: the same methods, awaited. Any number of tasks may share one.

    Make it in the process that uses it: a connection and a thread do not survive a fork.
    """

    def __init__(
        self, redis_url: str | None = None, queue: str | None = None, *, settings: BrokerSettings | None = None
    ) -> None:
        """Arguments and errors as for `Client`."""
        self._driver = _Driver(Flows(client_settings(redis_url, queue, settings)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Runs go on; tasks that wait end with UsageError."""
        await self._driver.close()

    async def submit(
        self,
        texts: Texts,
        *,
        ids: Sequence[str] | None = None,
        options: EncodingOptions = DEFAULT_OPTIONS,
        lane: Lane = Lane.INTERACTIVE,
        ttl_s: int = 3600,
        run: str | None = None,
        idempotency_key: str | None = None,
        metadata: Sequence[str] = (),
    ) -> AsyncRunHandle:
        """Arguments and errors as for `Client.submit`. An iterator of texts is read in another thread."""
        return self.attach(
            await self._driver.drive(
                self._driver.flows.submit(
                    texts,
                    ids=ids,
                    options=options,
                    lane=lane,
                    ttl_s=ttl_s,
                    run=run,
                    idempotency_key=idempotency_key,
                    metadata=metadata,
                )
            )
        )

    def attach(self, run: str) -> AsyncRunHandle:
        """A handle of a run that this or another process submitted. Nothing is sent; raises UsageError for no name."""
        return AsyncRunHandle(self._driver, attached(run))

    async def embed(
        self,
        texts: Texts,
        *,
        options: EncodingOptions = DEFAULT_OPTIONS,
        lane: Lane = Lane.INTERACTIVE,
        timeout_s: float | None = None,
    ) -> NDArray[Any]:
        """As `Client.embed`. A cancelled task cancels its work on the queue."""
        return (await self.embed_detailed(texts, options=options, lane=lane, timeout_s=timeout_s)).vectors

    async def embed_detailed(
        self,
        texts: Texts,
        *,
        options: EncodingOptions = DEFAULT_OPTIONS,
        lane: Lane = Lane.INTERACTIVE,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """As `embed`, with each text's number of tokens and whether it was truncated."""
        flow = self._driver.flows.embed(texts, options=options, lane=lane, timeout_s=timeout_s)
        return await self._driver.drive(flow)

    async def model(self) -> ModelInfo | None:
        """What the queue is bound to; None before its first worker."""
        return await self._driver.drive(self._driver.flows.model())

    async def backlog(self) -> Backlog:
        """How full the queue is."""
        return await self._driver.drive(self._driver.flows.backlog())


class AsyncRunHandle:
    """`RunHandle` for asyncio."""

    def __init__(self, driver: _Driver, run: str) -> None:
        self._driver = driver
        self.run = run

    def __repr__(self) -> str:
        return f"<AsyncRunHandle {self.run}>"

    async def status(self) -> RunState:
        """As `RunHandle.status`."""
        return await self._driver.drive(self._driver.flows.status(self.run))

    async def wait(self, timeout_s: float | None = None) -> RunState:
        """As `RunHandle.wait`."""
        return await self._driver.drive(self._driver.flows.wait(self.run, timeout_s))

    async def results(self, after: str = "0") -> AsyncIterator[ResultPage]:
        """As `RunHandle.results`."""
        cursor, over = Cursor.parse(after), False
        while not over:
            pages, cursor, over = await self._driver.drive(self._driver.flows.next_pages(self.run, cursor))
            for page in pages:
                yield page

    async def ordered(self) -> RunResults:
        """As `RunHandle.ordered`."""
        return await self._driver.drive(self._driver.flows.ordered(self.run))

    async def cancel(self) -> RunStatus:
        """As `RunHandle.cancel`."""
        return await self._driver.drive(self._driver.flows.cancel(self.run))

    async def delete(self) -> None:
        """As `RunHandle.delete`."""
        await self._driver.drive(self._driver.flows.delete(self.run))


class _Driver:
    """Performs flows' effects without blocking the event loop."""

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="embedq-client")

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.flows.close)
        await loop.run_in_executor(None, self._threads.shutdown)

    async def drive(self, flow: Flow[T]) -> T:
        resume: Callable[[], Any] = lambda: next(flow)  # noqa: E731
        try:
            while True:
                effect = resume()
                try:
                    outcome = await self._perform(effect)
                except BaseException as error:
                    # A cancelled task, too: the flow ends by cancelling its run.
                    resume = lambda error=error: flow.throw(error)  # type: ignore[misc]  # noqa: E731
                else:
                    resume = lambda outcome=outcome: flow.send(outcome)  # type: ignore[misc]  # noqa: E731
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _perform(self, effect: Any) -> Any:
        if isinstance(effect, Call):
            return await self._call(effect.function)
        if isinstance(effect, Sleep):
            return await asyncio.sleep(effect.seconds)
        return await asyncio.wait_for(asyncio.wrap_future(effect.future), effect.timeout_s)

    async def _call(self, function: Callable[[], Any]) -> Any:
        try:
            call = asyncio.get_running_loop().run_in_executor(self._threads, function)
        except RuntimeError:
            raise UsageError("the client is closed") from None
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # What it was doing must be done before it can be undone. Calls are short.
            await asyncio.wait([call])
            raise
