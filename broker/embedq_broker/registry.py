"""The run registry: creating runs, feeding them, and reading their exact counters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Required, TypedDict, Unpack

import redis
from embedq_schemas.dead_letter import DeadLetter, clip
from embedq_schemas.dead_letter import Stage as FailedStage
from embedq_schemas.errors import CodecError, DocumentErrorCode, RunNotFoundError, UsageError
from embedq_schemas.job import Codec
from embedq_schemas.names import LANES, SCHEMA_VERSION
from embedq_schemas.run import RunCounters, RunSpec, RunState, RunStatus

from embedq_broker import metrics, scripts
from embedq_broker.commit import TOKEN_TTL_MS, CommitRecord, check_durability, unpublished
from embedq_broker.consume import MAX_ENTRY_DOCUMENTS, Stage
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys, check_run_id
from embedq_broker.scripts import Arg, text

#: Times the TTL of its results that a run is remembered after its end: a late reader hears "expired", not "unknown".
KEEP_TTLS = 2
#: Seconds after which a run with a result stream whose producer sends nothing more counts as abandoned, at the least.
ABANDONED_S = 86400
#: Names of runs looked at in one round of forgetting.
_FORGET_SAMPLE = 1000

log = logging.getLogger(__name__)

COUNTERS = ("input", "succeeded", "failed", "skipped", "tokens")
_FIELDS = (
    *("spec", "status", "input_closed", "position", "error", "created_ms", "updated_ms"),
    *("committed_files", "published_files"),
    *COUNTERS,
)
_OPEN = (RunStatus.VALIDATING, RunStatus.IN_PROGRESS)
_OVER = tuple(status for status in RunStatus if status.terminal)


class EnqueueOutcome(StrEnum):
    """What became of one enqueue call."""

    OK = "ok"
    DUP = "dup"  # this very job was sent before; nothing was added
    FULL = "full"  # the backlog is at its limit; nothing was added
    FENCED = "fenced"  # another producer moved this run's position; nothing was added
    STOPPED = "stopped"  # the run is being cancelled, over, or its input closed; nothing was added
    GONE = "gone"  # the registry does not know the run


@dataclass(frozen=True)
class Enqueued:
    """Outcome of one enqueue call, with the reply's detail (backlog in bytes, a position, or a status)."""

    outcome: EnqueueOutcome
    detail: str = ""


class EnqueueArguments(TypedDict, total=False):
    """Keyword arguments of `Registry.enqueue`."""

    #: The producer's position before and after this job.
    expected: Required[str]
    position: Required[str]
    max_backlog_bytes: Required[int]
    #: Documents in `payload`; 0 with an empty payload sends only the outcomes beside it.
    documents: int
    payload: bytes | memoryview
    codec: Codec
    #: Input documents that are not computed on purpose.
    skipped: int
    #: Input documents whose outcome `restore` has counted already.
    settled: int
    #: Input documents that cannot become jobs.
    dead: Sequence[DeadLetter]
    #: No more input follows.
    close: bool


class Registry:
    """Runs of one queue. Holds no state of its own: every call reads or writes Redis."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self.keys = keys

    def create(self, spec: RunSpec) -> RunSpec:
        """Register `spec`, or return the specification the run already has.

        Raises:
            UsageError: the server cannot give the durability that is asked for.
        """
        check_durability(self._client, spec.durability)
        reply = scripts.call(self._client, *self._create_call(spec))
        return spec if reply[0] == 1 else RunSpec.decode(reply[1])

    def _create_call(self, spec: RunSpec) -> scripts.Call:
        keys = [self.keys.run(spec.run), self.keys.runs, self.keys.open_datasets]
        args: list[Arg] = [spec.run, spec.encode(), spec.sink.kind]
        if spec.sink.kind == "stream":
            args.append(spec.sink.ttl_s * 1000 * KEEP_TTLS)
        return "create_run", keys, args

    def submit(self, requests: Sequence[tuple[RunSpec, EnqueueArguments]]) -> list[Enqueued | Exception]:
        """Register runs and send the first job of each, all in one round trip; the outcome of each request.

        For runs of names nobody else uses: one that is registered already keeps its specification.
        """
        calls = [
            call
            for spec, arguments in requests
            for call in (self._create_call(spec), self._enqueue_call(spec, **arguments))
        ]
        replies = scripts.call_many(self._client, calls)
        return [_enqueued(reply) for reply in replies[1::2]]

    def enqueue(self, spec: RunSpec, **job: Unpack[EnqueueArguments]) -> Enqueued:
        """Send one job and move the producer's position from `expected` to `position`, in one step.

        Raises:
            UsageError: more documents than an entry may hold.
        """
        call = self._enqueue_call(spec, **job)
        fault_point("produce.enqueue.before")
        try:
            with metrics.stage_duration.labels("produce").time():
                reply = scripts.call(self._client, *call)
        except redis.exceptions.OutOfMemoryError as error:
            reply = error
        fault_point("produce.enqueue.after")
        sent = _enqueued(reply)
        if isinstance(sent, Exception):
            raise sent
        if sent.outcome is EnqueueOutcome.OK:
            dead = job.get("dead", ())
            for outcome, count in (("failed", len(dead)), ("skipped", job.get("skipped", 0))):
                if count:
                    metrics.documents.labels(outcome).inc(count)
            for letter in dead:
                metrics.dead_letters.labels(letter.code).inc()
        return sent

    def _enqueue_call(
        self,
        spec: RunSpec,
        *,
        expected: str,
        position: str,
        max_backlog_bytes: int,
        documents: int = 0,
        payload: bytes | memoryview = b"",
        codec: Codec = Codec.ARROW,
        skipped: int = 0,
        settled: int = 0,
        dead: Sequence[DeadLetter] = (),
        close: bool = False,
    ) -> scripts.Call:
        if documents > MAX_ENTRY_DOCUMENTS:
            raise UsageError(f"a job of {documents} documents; one may hold {MAX_ENTRY_DOCUMENTS}")
        jobs = self.keys.jobs(spec.lane)
        of_run = (self.keys.run(spec.run), self.keys.dead(spec.run))
        keys = [of_run[0], jobs, self.keys.bytes, of_run[1], self.keys.events, self.keys.held]
        args: list[Arg] = [
            *(expected, position, max_backlog_bytes, self.keys.suffix(jobs), spec.run, documents, skipped),
            *(int(close), SCHEMA_VERSION, codec, payload, settled),
            *(letter.encode() for letter in dead),
        ]
        return "enqueue", keys, args

    def unpublished(self, run: str) -> list[CommitRecord]:
        """Files of the run that are committed and may not have their final name yet."""
        return [record for record in unpublished(self._client, self.keys) if record.file.run == run]

    def restore(
        self,
        spec: RunSpec,
        counters: RunCounters,
        *,
        files: int,
        tokens: Iterable[str] = (),
        drop_streams: bool = True,
    ) -> None:
        """Register `spec` anew with outcomes that its dataset proves, forgetting whatever the queue holds of it.

        `tokens` are those of its files, which are told by them from files of commits that nobody here knows.
        With `drop_streams` the queue's streams are dropped whole: for one that serves this run alone, and no worker
        at the moment.
        """
        streams = [key for lane in LANES for key in (self.keys.jobs(lane), self.keys.batches(lane))]
        dropped = [self.keys.commits, self.keys.bytes, self.keys.held, *streams] if drop_streams else []
        self._client.delete(self.keys.run(spec.run), self.keys.dead(spec.run), *dropped)
        self.create(spec)
        fields: dict[Any, Any] = {"committed_files": files, "published_files": files}
        fields |= {name: getattr(counters, name) for name in ("succeeded", "failed", "skipped", "tokens")}
        pipe = self._client.pipeline(transaction=False)
        pipe.hset(self.keys.run(spec.run), mapping=fields)
        for token in tokens:
            pipe.set(self.keys.token(token), 1, px=TOKEN_TTL_MS)
        pipe.execute()

    def drop_queue(self, run: str) -> None:
        """Delete a queue that served this run alone, except its tokens and locks, which expire by themselves."""
        streams = [key for lane in LANES for key in (self.keys.jobs(lane), self.keys.batches(lane))]
        of_run = (self.keys.run(run), self.keys.dead(run), self.keys.results(run))
        shared = (self.keys.commits, self.keys.bytes, self.keys.held, self.keys.model, self.keys.workers)
        names = (self.keys.runs, self.keys.open_datasets, self.keys.tries, self.keys.events)
        self._client.delete(*streams, *of_run, *shared, *names)

    def state(self, run: str) -> RunState:
        """The run now; raises RunNotFoundError."""
        key = self.keys.run(check_run_id(run))
        # Not a transaction: a full server refuses to queue even reads. Dead letters come with their counters, so
        # those counted first are never missing from the second reply.
        pipe = self._client.pipeline(transaction=False)
        pipe.hmget(key, _FIELDS)
        pipe.xlen(self.keys.dead(run))
        values, dead_letters = pipe.execute()
        fields = dict(zip(_FIELDS, values, strict=True))
        if fields["spec"] is None:
            raise RunNotFoundError(f"queue {self.keys.queue} knows no run {run}")
        position, error = fields["position"], fields["error"]
        return RunState(
            spec=RunSpec.decode(fields["spec"]),
            status=RunStatus(text(fields["status"])),
            counters=RunCounters(**{name: int(fields[name] or 0) for name in COUNTERS}),
            input_closed=fields["input_closed"] == b"1",
            position=None if position is None else text(position),
            committed_files=int(fields["committed_files"] or 0),
            published_files=int(fields["published_files"] or 0),
            dead_letters=int(dead_letters),
            error=None if error is None else text(error),
            created_at=int(fields["created_ms"] or 0) / 1000,
            updated_at=int(fields["updated_ms"] or 0) / 1000,
        )

    def status(self, run: str) -> RunStatus | None:
        """Only the status, None for an unknown run."""
        value = self._client.hget(self.keys.run(run), "status")
        return None if value is None else RunStatus(text(value))

    def requests(self, runs: Sequence[str]) -> list[tuple[bytes | None, RunStatus | None]]:
        """(encoded specification, status) of each run, in one round trip; (None, None) for an unknown one."""
        # Not a transaction: a full server refuses to queue even reads.
        pipe = self._client.pipeline(transaction=False)
        for run in runs:
            pipe.hmget(self.keys.run(run), "spec", "status")
        return [(spec, None if status is None else RunStatus(text(status))) for spec, status in pipe.execute()]

    def all_in_batches(self, run: str) -> bool:
        """Whether every document of the run has left the jobs stage and no more input follows."""
        closed, total, ready = self._client.hmget(self.keys.run(run), "input_closed", "input", "ready")
        return closed == b"1" and total == ready

    def transition(
        self, run: str, to: RunStatus, allowed: Sequence[RunStatus], *, error: str = ""
    ) -> tuple[bool, RunStatus]:
        """Move the run to `to` if its status is one of `allowed`. Returns (moved, status after the call)."""
        reply = scripts.call(self._client, *_transition_call(self.keys, run, to, allowed, error), allow_oom=True)
        if reply[0] == -1:
            raise RunNotFoundError(f"queue {self.keys.queue} knows no run {run}")
        return reply[0] == 1, RunStatus(text(reply[1]))

    def cancel(self, run: str) -> RunStatus:
        """Ask for cancellation: what is not yet computed is skipped. Returns the status after the call."""
        return self.transition(check_run_id(run), RunStatus.CANCELLING, _OPEN)[1]

    def cancel_many(self, runs: Sequence[str]) -> None:
        """Ask for the cancellation of runs, in one round trip; those unknown, or over, stay as they are."""
        calls = [_transition_call(self.keys, run, RunStatus.CANCELLING, _OPEN) for run in runs]
        replies = scripts.call_many(self._client, calls, allow_oom=True)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply

    def forget(self, run: str) -> RunStatus | None:
        """Drop a run that is over, with its results; None when it is gone, else the status of one that is not over."""
        reply = scripts.call(self._client, *forget_call(self.keys, check_run_id(run)), allow_oom=True)
        return None if reply[0] == 1 else RunStatus(text(reply[1]))

    def streams_empty(self) -> bool:
        """Whether no job and no token batch is in the queue."""
        return not any(self._client.xlen(stage.stream(self.keys, lane)) for stage in Stage for lane in LANES)

    def missing(self, run: str) -> int:
        """Documents of the run that have no outcome although the queue is empty and its input closed: they are lost."""
        stages = [(stage, stage.stream(self.keys, lane)) for stage in Stage for lane in LANES]
        keys = [self.keys.run(run), *(stream for _, stream in stages)]
        return int(scripts.call(self._client, "missing", keys, [stage for stage, _ in stages], allow_oom=True))

    def runs(self, limit: int = 100) -> list[RunState]:
        """Newest first, without those a newer version wrote; forgets the names of runs that expired."""
        names = [text(name) for name in self._client.zrevrange(self.keys.runs, 0, limit - 1)]
        states = []
        for name in names:
            try:
                states.append(self.state(name))
            except RunNotFoundError:
                self._forget_run(name)
            except CodecError as error:
                log.warning("run %s is left out: %s", name, error)
        return states

    def _forget_run(self, name: str) -> None:
        self._client.delete(self.keys.dead(name))
        self._client.zrem(self.keys.runs, name)

    def open_datasets(self) -> list[str]:
        """Runs whose dataset is not finished; forgets those that ended or expired."""
        names: Any = self._client.smembers(self.keys.open_datasets)
        open_runs = []
        for name in sorted(map(text, names)):
            status = self.status(name)
            if status is None or status.terminal:
                self._client.srem(self.keys.open_datasets, name)
            else:
                open_runs.append(name)
        return open_runs

    def dead_letters(self, run: str, *, after: str = "-", count: int = 1000) -> list[tuple[str, DeadLetter]]:
        """A page of the dead letters still in Redis, in the order of their arrival, after entry id `after`."""
        start = after if after == "-" else f"({after}"
        entries: Any = self._client.xrange(self.keys.dead(run), start, "+", count=count)
        return parse_letters(entries)

    def backlog_bytes(self) -> int:
        """Payload bytes held in the queue's streams."""
        return sum(int(held) for held in self._client.hvals(self.keys.bytes))

    def forget_expired(self) -> None:
        """Drop what outlives an expired run, take expired results out of the backlog, and give up abandoned runs.

        A run with a dataset is never given up: its producer may be started again with the next command.
        """
        # A sample: runs expire at their own times, and whoever asks often gets round to every name.
        sampled: Any = self._client.zrandmember(self.keys.runs, _FORGET_SAMPLE)
        # Not a transaction: a full server refuses to queue even reads.
        pipe = self._client.pipeline(transaction=False)
        for name in sampled:
            pipe.hmget(self.keys.run(text(name)), "status", "sink", "input_closed", "updated_ms", "keep_ms")
        now_s, _ = self._client.time()
        for name, fields in zip(map(text, sampled), pipe.execute(), strict=True):
            status, sink, closed, updated_ms, keep_ms = fields
            idle_s = now_s - int(updated_ms or 0) // 1000
            if status is None:
                self._forget_run(name)
            elif sink == b"stream" and closed == b"0" and idle_s > max(ABANDONED_S, int(keep_ms or 0) // 1000):
                error = f"its producer has sent nothing for {idle_s // 3600} hours"
                self.transition(name, RunStatus.EXPIRED, _OPEN, error=error)
        holders: Any = self._client.hrandfield(self.keys.held, _FORGET_SAMPLE)
        suffixes = [text(field) for field in holders or ()]
        if suffixes:
            streams = [self.keys.of(suffix) for suffix in suffixes]
            keys = [self.keys.bytes, self.keys.held, *streams]
            scripts.call(self._client, "release_held", keys, suffixes, allow_oom=True)


def _enqueued(reply: Any) -> Enqueued | Exception:
    if isinstance(reply, redis.exceptions.OutOfMemoryError):
        return Enqueued(EnqueueOutcome.FULL, "the server is at maxmemory")
    if isinstance(reply, Exception):
        return reply
    return Enqueued(EnqueueOutcome(text(reply[0])), text(reply[1]) if len(reply) > 1 else "")


def _transition_call(
    keys: Keys, run: str, to: RunStatus, allowed: Sequence[RunStatus], error: str = ""
) -> scripts.Call:
    return "transition", [keys.run(run), keys.events], [to, error, int(to.terminal), *allowed]


def forget_call(keys: Keys, run: str) -> scripts.Call:
    """The script call behind `Registry.forget`, for many runs at once; to be run with `allow_oom`."""
    names = [keys.run(run), keys.results(run), keys.dead(run), keys.runs, keys.bytes, keys.held]
    return "drop_run", names, [run, *_OVER]


def parse_letters(entries: Any) -> list[tuple[str, DeadLetter]]:
    """(entry id, letter) of the raw entries of a dead letter stream."""
    letters = []
    for entry_id, fields in entries or ():
        try:
            letter = DeadLetter.decode(fields.get(b"letter", b""))
        except CodecError as error:
            # It was counted as a failed document, and must not keep its run from ending.
            letter = DeadLetter(
                ordinal=-1, stage=FailedStage.PRODUCE, code=DocumentErrorCode.UNREADABLE_ERROR, message=clip(error)
            )
        letters.append((text(entry_id), letter))
    return letters
