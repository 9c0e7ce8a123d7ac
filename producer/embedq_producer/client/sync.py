"""The synchronous client. Safe to share between threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from embedq_broker.outcome import Cursor
from embedq_broker.settings import BrokerSettings
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.names import Lane
from embedq_schemas.run import RunState, RunStatus
from numpy.typing import NDArray

from embedq_producer.client.documents import Texts
from embedq_producer.client.flows import DEFAULT_OPTIONS, Call, Flow, Flows, Sleep, attached, client_settings
from embedq_producer.client.values import Backlog, Embeddings, ModelInfo, ResultPage, RunResults

T = TypeVar("T")


class Client:
    """Submits texts to a queue and reads their vectors, from any number of threads.

    After a fork the child's is a client of its own; calls under way stay in the parent.
    """

    def __init__(
        self, redis_url: str | None = None, queue: str | None = None, *, settings: BrokerSettings | None = None
    ) -> None:
        """Connects with the first call, not here.

        Args:
            redis_url: `redis://`, `rediss://`, `unix://` or `redis+sentinel://`; default: EMBEDQ_REDIS_URL, else a
                server on this machine.
            queue: default: EMBEDQ_QUEUE, else `default`.
            settings: instead of the EMBEDQ_* variables; the two arguments above go before it.

        Raises:
            UsageError: an argument or variable has a value that cannot be used.
        """
        self._flows = Flows(client_settings(redis_url, queue, settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Runs go on; calls that wait end with UsageError."""
        self._flows.close()

    def submit(
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
    ) -> RunHandle:
        """Send texts as one run and return as soon as the queue has all of them.

        Args:
            texts: strings; or lists of token ids, which the model gets as they are; or mappings with `text` or
                `input_ids`, perhaps `id`, and metadata fields. Any number: they go out in jobs of about a megabyte,
                and wait while the queue is full.
            ids: one per text, for strings and token ids; default: their positions. They come back beside the vectors.
            options: dimensions, prompt, maximum length and the like, for the whole run.
            lane: interactive work goes before bulk work.
            ttl_s: seconds the results stay after the last one was written.
            run: the run's name; default: a new one.
            idempotency_key: the same key gives the same run: a submission repeated after a lost reply, or by a
                process started again, sends only what is missing. For as long as the run is remembered: twice `ttl_s`
                after its end.
            metadata: fields of the mappings to carry to the results.

        Raises:
            UsageError: a value that cannot be sent. Without a name or key, what was sent before it is cancelled.
            RunConflictError: the run or key exists with other texts or options.
            BrokerError: Redis cannot be used; with a name or key, call again to go on.
        """
        return self.attach(
            _drive(
                self._flows.submit(
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

    def attach(self, run: str) -> RunHandle:
        """A handle of a run that this or another process submitted. Nothing is sent; raises UsageError for no name."""
        return RunHandle(self._flows, attached(run))

    def embed(
        self,
        texts: Texts,
        *,
        options: EncodingOptions = DEFAULT_OPTIONS,
        lane: Lane = Lane.INTERACTIVE,
        timeout_s: float | None = None,
    ) -> NDArray[Any]:
        """Vectors of `texts`, float32 [n, dimension] unless `options.vector_type` says otherwise, in their order.

        Raises:
            DocumentsFailedError: some texts have no vector; it holds those of the others.
            WaitTimeoutError: `timeout_s` is over, and the work cancelled; NoWorkerError where no worker is alive.
            RunEndedError: somebody cancelled the run, or it failed.
            UsageError, BrokerError: as for `submit`.
        """
        return self.embed_detailed(texts, options=options, lane=lane, timeout_s=timeout_s).vectors

    def embed_detailed(
        self,
        texts: Texts,
        *,
        options: EncodingOptions = DEFAULT_OPTIONS,
        lane: Lane = Lane.INTERACTIVE,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """As `embed`, with each text's number of tokens and whether it was truncated."""
        return _drive(self._flows.embed(texts, options=options, lane=lane, timeout_s=timeout_s))

    def model(self) -> ModelInfo | None:
        """What the queue is bound to; None before its first worker."""
        return _drive(self._flows.model())

    def backlog(self) -> Backlog:
        """How full the queue is."""
        return _drive(self._flows.backlog())


class RunHandle:
    """One run, by its id. Holds nothing: any number of handles, in any process, may read the same run."""

    def __init__(self, flows: Flows, run: str) -> None:
        self._flows = flows
        self.run = run

    def __repr__(self) -> str:
        return f"<RunHandle {self.run}>"

    def status(self) -> RunState:
        """Status and exact counters; raises RunNotFoundError."""
        return _drive(self._flows.status(self.run))

    def wait(self, timeout_s: float | None = None) -> RunState:
        """Wait until the run is over, however it ends, and return its state.

        Raises:
            WaitTimeoutError: the time is over, the run goes on; NoWorkerError where no worker is alive.
            RunNotFoundError: the queue does not know the run.
        """
        return _drive(self._flows.wait(self.run, timeout_s))

    def results(self, after: str = "0") -> Iterator[ResultPage]:
        """Pages of results as they are committed, until the run is over; each document once.

        Args:
            after: a page's `cursor`, to go on behind that page.

        Raises:
            RunFailedError, RunCancelledError, RunExpiredError: after the pages that there are.
            RunNotFoundError: the queue does not know the run.
        """
        cursor, over = Cursor.parse(after), False
        while not over:
            pages, cursor, over = _drive(self._flows.next_pages(self.run, cursor))
            yield from pages

    def ordered(self) -> RunResults:
        """Wait for the run's end; all vectors in the order of the input, and the failures. Raises as `results`."""
        return _drive(self._flows.ordered(self.run))

    def cancel(self) -> RunStatus:
        """Ask for cancellation: what is not computed yet is skipped. Returns the status after the call."""
        return _drive(self._flows.cancel(self.run))

    def delete(self) -> None:
        """Drop the run and its results now instead of after their TTL; raises UsageError while it is not over."""
        _drive(self._flows.delete(self.run))


def _drive(flow: Flow[T]) -> T:
    """Perform a flow's effects in this thread."""
    resume: Any = lambda: next(flow)  # noqa: E731
    try:
        while True:
            effect = resume()
            try:
                outcome = _perform(effect)
            except BaseException as error:
                resume = lambda error=error: flow.throw(error)  # noqa: E731
            else:
                resume = lambda outcome=outcome: flow.send(outcome)  # noqa: E731
    except StopIteration as stop:
        value: T = stop.value
        return value


def _perform(effect: Any) -> Any:
    if isinstance(effect, Call):
        return effect.function()
    if isinstance(effect, Sleep):
        return time.sleep(effect.seconds)
    return effect.future.result(effect.timeout_s)
