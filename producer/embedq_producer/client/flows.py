"""What a client does, written once for both kinds of client.

A flow is a generator. It yields what would block, as one of three effects, and is sent the outcome: the synchronous
client performs an effect in its own thread, the asynchronous one without blocking its event loop.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from embedq_broker.connect import broker_errors, connect, translate
from embedq_broker.keys import Keys, check_run_id
from embedq_broker.liveness import heartbeats, model_facts
from embedq_broker.outcome import Cursor, Look
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import (
    EmbedqError,
    NoWorkerError,
    RunCancelledError,
    RunExpiredError,
    RunFailedError,
    RunNotFoundError,
    UsageError,
    WaitTimeoutError,
)
from embedq_schemas.names import LANES, Lane
from embedq_schemas.run import RunState, RunStatus
from redis.exceptions import RedisError

from embedq_producer.client.assembly import Assembly, pages, without_failures
from embedq_producer.client.documents import Texts, check_texts
from embedq_producer.client.outbox import Outbox
from embedq_producer.client.submission import Submission, run_name, run_spec
from embedq_producer.client.values import (
    Backlog,
    DocumentsFailedError,
    Embeddings,
    ModelInfo,
    ResultPage,
    RunResults,
)
from embedq_producer.client.watch import Waiter, Watcher

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_OPTIONS = EncodingOptions()
EMBED_TTL_S = 600
"""How long results of `embed` stay if the caller dies before it has read them."""
_ASK_S = 2.0
_LIVE_S = 10.0
"""Age of a heartbeat above which its process does not count as alive, at the least."""


@dataclass(frozen=True)
class Call:
    """Call a function that may speak to the server for a moment."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class Sleep:
    """Do nothing for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Wait:
    """Wait for a future, at most so many seconds; TimeoutError is the outcome where they run out."""

    future: Future[Look]
    timeout_s: float | None


Flow = Generator[Call | Sleep | Wait, Any, T]


def client_settings(redis_url: str | None, queue: str | None, settings: BrokerSettings | None) -> BrokerSettings:
    """Settings from arguments, else from `settings`, else from EMBEDQ_* variables, else the defaults.

    Raises:
        UsageError: a variable or argument has a value that its field refuses.
    """
    given = {name: value for name, value in (("redis_url", redis_url), ("queue", queue)) if value is not None}
    if settings is not None:
        return settings.model_copy(update=given)
    named = {name: os.environ.get(f"EMBEDQ_{name.upper()}") for name in BrokerSettings.model_fields}
    try:
        return BrokerSettings(**{name: value for name, value in named.items() if value is not None} | given)
    except ValueError as error:
        raise UsageError(f"a setting of the client is refused: {' '.join(str(error).split())[:300]}") from None


_living: weakref.WeakSet[Flows] = weakref.WeakSet()


def _open_in_child() -> None:
    """Threads and locks that others held do not survive a fork: a call in the child would wait for ever."""
    for flows in tuple(_living):
        flows._open()


os.register_at_fork(after_in_child=_open_in_child)


class Flows:
    """The connections of one client and everything it can do with them."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings
        self.url = settings.redis_url
        self.keys = Keys(settings.queue)
        self._open()
        _living.add(self)

    def _open(self) -> None:
        self._client = connect(self.url, role="client")
        self._registry = Registry(self._client, self.keys)
        self._watcher = Watcher(
            self._client, lambda: connect(self.url, role="client-watch", blocking=True), self.keys, self.url
        )
        self._outbox = Outbox(self._registry, self._watcher, self.url)

    def close(self) -> None:
        """End the threads and close the connections; runs that only waiting calls know are cancelled."""
        _living.discard(self)
        self._outbox.close()
        self._watcher.close()
        self._client.close()

    def submit(
        self,
        texts: Texts,
        *,
        ids: Sequence[str] | None,
        options: EncodingOptions,
        lane: Lane,
        ttl_s: int,
        run: str | None,
        idempotency_key: str | None,
        metadata: Sequence[str],
    ) -> Flow[str]:
        """Send a run; returns its id."""
        name = run_name(run, idempotency_key)
        submission = self._submission(name, texts, ids, options, lane, ttl_s, metadata)
        try:
            while (wait_s := (yield from self._ask(submission.step))) is not None:
                if wait_s:
                    yield Sleep(wait_s)
        except BaseException:
            if run is None and idempotency_key is None:
                # Nobody knows its name, so nobody can go on with it.
                self._abandon(name)
            raise
        return name

    def embed(self, texts: Texts, *, options: EncodingOptions, lane: Lane, timeout_s: float | None) -> Flow[Embeddings]:
        """Send texts, wait for their vectors, and leave nothing on the server."""
        check_texts(texts)
        documents = texts if isinstance(texts, Sized) else list(texts)
        n, name = len(documents), run_name(None, None)
        submission = self._submission(name, documents, None, options, lane, EMBED_TTL_S, ())
        if n == 0:
            dimension = yield from self._dimension(options)
            return without_failures(Assembly().results(0, dimension, options.vector_type))
        deadline = _deadline(timeout_s)
        assembly, cursor = Assembly(), Cursor()
        waiter = Waiter(name, cursor, owned=True)
        try:
            self._outbox.put(submission, waiter)
            try:
                look: Look = yield Wait(waiter.future, _left(deadline))
            finally:
                self._watcher.drop(waiter)
            while True:
                assembly.add(pages(look, cursor))
                cursor = look.cursor(cursor)
                if assembly.documents >= n:
                    break
                if exhausted(look):
                    raise self._ended(name, look)
                look = yield from self._next(name, cursor, deadline)
        except BaseException as error:
            self._abandon(name)
            if isinstance(error, TimeoutError):
                raise (yield Call(lambda: self._late(f"{n} texts have no vectors after {timeout_s} s"))) from None
            raise
        self._watcher.forget(name)
        results = assembly.results(n, options.dimensions or 0, options.vector_type)
        if results.failures:
            raise _documents_failed(results)
        return without_failures(results)

    def wait(self, run: str, timeout_s: float | None) -> Flow[RunState]:
        """Wait until a run is over."""
        deadline = _deadline(timeout_s)
        try:
            yield from self._next(run, None, deadline)
        except TimeoutError:
            raise (yield Call(lambda: self._late(f"run {run} is not over after {timeout_s} s"))) from None
        return (yield from self.status(run))

    def status(self, run: str) -> Flow[RunState]:
        return (yield from self._ask(lambda: self._registry.state(run)))

    def cancel(self, run: str) -> Flow[RunStatus]:
        return (yield from self._ask(lambda: self._registry.cancel(run)))

    def delete(self, run: str) -> Flow[None]:
        status = yield from self._ask(lambda: self._registry.forget(run))
        if status is not None:
            raise UsageError(f"run {run} is {status}; cancel it, or wait for its end, before it is deleted")

    def next_pages(self, run: str, cursor: Cursor) -> Flow[tuple[list[ResultPage], Cursor, bool]]:
        """Pages behind `cursor`, the cursor behind them, and whether they are the last; waits until there are some.

        Raises:
            RunNotFoundError, RunFailedError, RunCancelledError, RunExpiredError: there will be no more.
        """
        look = yield from self._next(run, cursor, None)
        found = pages(look, cursor)
        over = exhausted(look)
        if over and not found:
            yield from self._check_completed(run, look)
        return found, look.cursor(cursor), over and not found

    def ordered(self, run: str) -> Flow[RunResults]:
        """Wait for a run's end and return all its results in the order of its input."""
        assembly, cursor, over = Assembly(), Cursor(), False
        while not over:
            found, cursor, over = yield from self.next_pages(run, cursor)
            assembly.add(found)
        state = yield from self.status(run)
        counters = state.counters
        if assembly.documents + counters.skipped < counters.input:
            raise RunExpiredError(f"results of run {run} are gone: they stay {_ttl(state)} s")
        encoding = state.spec.encoding
        dimension = 0 if counters.succeeded else (yield from self._dimension(encoding))
        return assembly.results(counters.input, dimension, encoding.vector_type)

    def model(self) -> Flow[ModelInfo | None]:
        facts = yield from self._ask(lambda: model_facts(self._client, self.keys))
        return _model_info(facts) if facts else None

    def backlog(self) -> Flow[Backlog]:
        return (yield from self._ask(self._backlog))

    def _submission(
        self,
        name: str,
        texts: Texts,
        ids: Sequence[str] | None,
        options: EncodingOptions,
        lane: Lane,
        ttl_s: int,
        metadata: Sequence[str],
    ) -> Submission:
        spec = run_spec(self.keys.queue, name, options, lane, ttl_s, metadata)
        return Submission(self._registry, spec, texts, ids, self.settings.max_backlog_bytes)

    def _next(self, run: str, cursor: Cursor | None, deadline: float | None) -> Flow[Look]:
        """The next look with news behind `cursor`; raises TimeoutError at the deadline."""
        waiter = Waiter(run, cursor)
        try:
            yield from self._ask(lambda: self._watcher.look(waiter))
            look: Look = yield Wait(waiter.future, _left(deadline))
        finally:
            self._watcher.drop(waiter)
        if look.status is None:
            raise self._ended(run, look)
        return look

    def _check_completed(self, run: str, look: Look) -> Flow[None]:
        if look.status is not RunStatus.COMPLETED:
            raise self._ended(run, look)
        state = yield from self.status(run)
        if state.spec.sink.kind == "parquet":
            raise UsageError(f"run {run} wrote the dataset {state.spec.sink.path}: read it there")
        if look.counters.succeeded and not (yield from self._ask(lambda: self._client.exists(self.keys.results(run)))):
            raise RunExpiredError(f"the results of run {run} expired")

    def _ended(self, run: str, look: Look) -> EmbedqError:
        match look.status:
            case None:
                return RunNotFoundError(f"queue {self.keys.queue} knows no run {run}, or it is forgotten by now")
            case RunStatus.FAILED:
                return RunFailedError(f"run {run} failed: {look.error or 'no reason was given'}")
            case RunStatus.CANCELLED | RunStatus.CANCELLING:
                return RunCancelledError(f"run {run} was cancelled")
            case RunStatus.EXPIRED:
                return RunExpiredError(f"run {run} expired: {look.error or 'it was not finished in time'}")
        return RunExpiredError(f"the results of run {run} expired")

    def _abandon(self, run: str) -> None:
        """Have a run cancelled that nobody waits for any more, without waiting for that."""
        # A client that is being closed cancels them all.
        with suppress(UsageError):
            self._outbox.cancel(run)

    def _late(self, what: str) -> WaitTimeoutError:
        # The time is over: whether anybody works is asked once, without the patience of other calls.
        try:
            with connect(self.url, role="client-ask", blocking=True, socket_timeout_s=_ASK_S) as client:
                alive = self._live(client, "embedder"), self._live(client, "tokenizer")
        except RedisError as error:
            return WaitTimeoutError(f"{what}: {translate(error, self.url)}")
        if all(alive):
            return WaitTimeoutError(f"{what}; workers are alive, so the queue is busy or the time too short")
        missing = " and no ".join(role for role, live in zip(("embedder", "tokenizer"), alive, strict=True) if not live)
        return NoWorkerError(
            f"{what}: no {missing} is alive on queue {self.keys.queue}; "
            f"start one with `embedq worker --queue {self.keys.queue} --model MODEL`"
        )

    def _live(self, client: redis.Redis, role: str) -> int:
        oldest = time.time() - max(_LIVE_S, self.settings.lease_s)
        return sum(beat.role == role and beat.at > oldest for beat in heartbeats(client, self.keys))

    def _backlog(self) -> Backlog:
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(self.keys.bytes)
        for lane in LANES:
            pipe.xlen(self.keys.jobs(lane))
            pipe.xlen(self.keys.batches(lane))
        held, *lengths = pipe.execute()
        queued = {self.keys.suffix(key(lane)) for lane in LANES for key in (self.keys.jobs, self.keys.batches)}
        sizes = {field.decode(): int(size) for field, size in held.items()}
        return Backlog(
            queued_bytes=sum(size for field, size in sizes.items() if field in queued),
            result_bytes=sum(size for field, size in sizes.items() if field not in queued),
            limit_bytes=self.settings.max_backlog_bytes,
            jobs=sum(lengths[::2]),
            token_batches=sum(lengths[1::2]),
            live_embedders=self._live(self._client, "embedder"),
        )

    def _dimension(self, options: EncodingOptions) -> Flow[int]:
        if options.dimensions is not None:
            return options.dimensions
        model = yield from self.model()
        return model.dimension if model else 0

    def _ask(self, function: Callable[[], T]) -> Flow[T]:
        """Call a function that speaks to the server; raises redis-py's errors as BrokerErrors."""

        def call() -> T:
            with broker_errors(self.url):
                return function()

        outcome: T = yield Call(call)
        return outcome


def exhausted(look: Look) -> bool:
    """Whether the run is over and the look holds all that was left of it."""
    return look.over and not look.full


def attached(run: str) -> str:
    """`run`, if it can name a run; raises UsageError."""
    return check_run_id(run)


def _deadline(timeout_s: float | None) -> float | None:
    """None where it is later than threads can wait for; raises UsageError."""
    if timeout_s is None or timeout_s >= threading.TIMEOUT_MAX:
        return None
    if math.isnan(timeout_s):
        raise UsageError("timeout_s is not a number")
    return time.monotonic() + timeout_s


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _ttl(state: RunState) -> int:
    return state.spec.sink.ttl_s if state.spec.sink.kind == "stream" else 0


def _documents_failed(results: RunResults) -> DocumentsFailedError:
    first, n = results.failures[0], len(results)
    return DocumentsFailedError(
        f"{len(results.failures)} of {n} texts have no vector; text {first.index}: {first.code}: {first.message}",
        without_failures(results),
        results.failures,
    )


def _model_info(facts: Mapping[str, str]) -> ModelInfo:
    return ModelInfo(
        model_id=facts.get("model_id", ""),
        revision=facts.get("revision", ""),
        fingerprint=facts["fingerprint"],
        dimension=int(facts.get("dimension", 0)),
        max_length=int(facts.get("max_length", 0)),
        prompts=json.loads(facts.get("prompts", "{}")),
        default_prompt_name=facts.get("default_prompt_name") or None,
        vocab_size=int(facts["vocab_size"]) if "vocab_size" in facts else None,
    )
