"""Sending one run: jobs of bounded size, at the pace the queue allows, in steps that either kind of client drives."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from embedq_broker.keys import check_run_id
from embedq_broker.registry import EnqueueArguments, Enqueued, EnqueueOutcome, Registry
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import BrokerError, RunConflictError, RunNotFoundError, UsageError
from embedq_schemas.job import encode_job
from embedq_schemas.names import Lane
from embedq_schemas.run import RunSpec, RunStatus, StreamSink
from pydantic import ValidationError

from embedq_producer.client.documents import InputDigest, Texts, jobs

_FIRST_WAIT_S = 0.002
_MOST_WAIT_S = 0.25


def run_name(run: str | None, idempotency_key: str | None) -> str:
    """The run's id: as given, or made from the key, or new.

    Raises:
        UsageError: `run` cannot name a run.
    """
    if run is not None:
        return check_run_id(run)
    if idempotency_key is not None:
        return "key-" + hashlib.sha256(idempotency_key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return uuid.uuid4().hex


def run_spec(
    queue: str, run: str, options: EncodingOptions, lane: Lane, ttl_s: int, metadata: Sequence[str]
) -> RunSpec:
    """The specification of a run whose results stay in Redis; raises UsageError."""
    if options.on_long is OnLong.CHUNK:
        raise UsageError("a client has no tokenizer to cut long texts with; embedq run and embedq produce cut them")
    try:
        return RunSpec(
            run=run,
            queue=queue,
            encoding=options,
            sink=StreamSink(ttl_s=ttl_s),
            lane=lane,
            metadata=tuple(metadata),
            created_at=time.time(),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise UsageError(where + first["msg"].removeprefix("Value error, ")) from None


class Submission:
    """One run on its way into the queue. For one thread at a time.

    The producer's position is the number of documents sent and a digest of them. A call whose reply was lost finds its
    position taken and adds nothing; a submission made again after its process was killed finds how far it had come, and
    goes on there if its documents are the same.
    """

    def __init__(self, registry: Registry, spec: RunSpec, texts: Texts, ids: Sequence[str] | None, limit: int) -> None:
        """
        Args:
            limit: bytes the queue's backlog may hold.
        """
        self._registry = registry
        self._max_backlog_bytes = limit
        self._jobs = jobs(texts, ids=ids, metadata=spec.metadata)
        self._digest = InputDigest()
        self._sent = ""  # the run's position, as far as we know
        self._job: _Job | None = None
        self._recorded: str | None = None  # where an earlier submission of this run stopped
        self._wait_s = _FIRST_WAIT_S
        self._created = False
        self.spec = spec
        #: An earlier call sent some of it: results may be there already.
        self.repeated = False

    def step(self) -> float | None:
        """Send the next job. Returns how many seconds to wait before the next step; None when all is sent.

        A run that was cancelled meanwhile takes nothing more, and is done.

        Raises:
            UsageError: a document that cannot be sent.
            RunConflictError: the run exists with other documents or options.
            RunNotFoundError: the registry lost the run.
            BrokerError: the server lost what it had acknowledged.
        """
        job = self._current()
        if not self._created:
            self._create()
        if self._recorded is not None:
            return self._skip(job, self._recorded)
        _, request = self.request()
        return self.take(self._registry.enqueue(self.spec, **request))

    @property
    def whole(self) -> bool:
        """Whether nothing was sent yet and one job holds everything; raises UsageError."""
        return self._current().last and not self._created and self._recorded is None

    def request(self) -> tuple[RunSpec, EnqueueArguments]:
        """What `Registry.enqueue` or `Registry.submit` is to be called with for the next job; raises UsageError."""
        job = self._current()
        return self.spec, {
            "expected": self._sent,
            "position": job.position,
            "max_backlog_bytes": self._max_backlog_bytes,
            "documents": 0 if job.documents is None else job.documents.num_rows,
            "payload": job.payload,
            "close": job.last,
        }

    def _current(self) -> _Job:
        if self._job is None:
            self._job = self._next_job()
        return self._job

    def _next_job(self) -> _Job:
        documents, last = next(self._jobs, (None, True))
        before = self._digest.copy()
        if documents is not None:
            self._digest.update(documents)
        return _Job(documents, before, self._digest.position, last=last)

    def _create(self) -> None:
        spec = self._registry.create(self.spec)
        if spec.created_at != self.spec.created_at:
            self.repeated = True
            if not spec.same_request(self.spec):
                raise RunConflictError(
                    f"run {spec.run} was made with other options; use another run or idempotency key"
                )
            self.spec = spec
        self._created = True

    def take(self, sent: Enqueued | Exception) -> float | None:
        """Take in the outcome of `request`; returns and raises as `step`."""
        if isinstance(sent, Exception):
            raise sent
        job = self._current()
        match sent.outcome:
            case EnqueueOutcome.FULL:
                wait_s, self._wait_s = self._wait_s, min(self._wait_s * 2, _MOST_WAIT_S)
                return wait_s
            case EnqueueOutcome.FENCED:
                # Nobody else has this run's name by chance: an earlier call of ours sent more than this one.
                self.repeated, self._recorded = True, sent.detail
                return 0.0
            case EnqueueOutcome.GONE:
                raise RunNotFoundError(f"the registry lost run {self.spec.run}; was the server flushed?")
            case EnqueueOutcome.STOPPED:
                if sent.detail in ("closed", RunStatus.COMPLETED):
                    # All of its documents are there, and these are more.
                    raise self._conflict()
                return None
            case EnqueueOutcome.DUP:
                self.repeated = True
        self._wait_s = _FIRST_WAIT_S
        self._sent, self._job = job.position, None
        return None if job.last else 0.0

    def _skip(self, job: _Job, recorded: str) -> float:
        """Leave out `job`, which was sent before; where it was sent in part, cut it there."""
        count, _, _ = recorded.partition(":")
        if not count.isdigit():
            raise self._conflict()
        rest = int(count) - job.before.documents
        if rest < 0:
            raise BrokerError(f"the server lost acknowledged jobs of run {self.spec.run}; submit it again")
        size = 0 if job.documents is None else job.documents.num_rows
        if rest < size:
            assert job.documents is not None
            parts = [_rows(job.documents, 0, rest), _rows(job.documents, rest, size)]
            digest = job.before.copy()
            digest.update(parts[0])
            if digest.position != recorded:
                raise self._conflict()
            self._job = _Job(parts[1], digest, job.position, last=job.last)
        elif rest == size:
            if job.position != recorded:
                raise self._conflict()
            # Its documents are all there; whether the input was closed with them, the next call will tell.
            self._job = _Job(None, job.before, job.position, last=True) if job.last else None
        elif job.last:
            raise self._conflict()
        else:
            self._job = None
            return 0.0
        self._sent, self._recorded = recorded, None
        return 0.0

    def _conflict(self) -> RunConflictError:
        return RunConflictError(
            f"run {self.spec.run} was submitted with other documents; use another run or idempotency key"
        )


@dataclass(frozen=True)
class _Job:
    """A job with its place in the input."""

    documents: pa.RecordBatch | None  # None only closes the input
    before: InputDigest
    position: str  # after it
    last: bool

    @cached_property
    def payload(self) -> bytes | memoryview:
        return b"" if self.documents is None else encode_job(self.documents)


def _rows(documents: pa.RecordBatch, start: int, stop: int) -> pa.RecordBatch:
    """Rows copied, so that their buffers begin at 0."""
    return documents.take(pa.array(np.arange(start, stop)))
