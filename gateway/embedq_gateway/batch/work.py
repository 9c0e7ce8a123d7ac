"""One batch under way: its documents are sent as runs of the bulk lane, and their results are gathered on disk.

Nothing here is lost with the process: what was sent is recorded as each run's position, what came back lies on disk or
still in Redis. Two processes that work on one batch at once do some of it twice, to the same effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import redis
from embedq_broker.batches import BatchRecord, drop_results
from embedq_broker.keys import Keys
from embedq_broker.outcome import Cursor, look_at
from embedq_broker.registry import EnqueueOutcome, Registry
from embedq_producer.client.documents import jobs
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.encoding import OnLong
from embedq_schemas.errors import CodecError, RunNotFoundError
from embedq_schemas.job import encode_job
from embedq_schemas.names import Lane
from embedq_schemas.run import RunSpec, StreamSink
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray

from embedq_gateway.batch.lines import decode_line
from embedq_gateway.batch.outcomes import Outcomes
from embedq_gateway.batch.plan import Plan
from embedq_gateway.inputs import EmbeddingsRequest, Inputs, Limits, embeddings_request, parse_inputs

log = logging.getLogger(__name__)

_JOB_DOCUMENTS = 1024
_JOB_BYTES = 1 << 20
_RESULTS_AT_ONCE = 16
_MOST_TTL_S = 30 * 86400
_KEEP_RESULTS_S = 86400
"""Results wait this long for a gateway that is down beyond its batch's deadline."""
_CHECK_S = 5.0
"""A server that lost the end of its history may have lost what was sent: each run is asked again this often."""
_PLANNED = Limits(max_inputs=1 << 31, max_request_tokens=1 << 62, on_long=OnLong.ERROR)
"""What the plan accepted stays accepted, whatever the settings are now."""


class BatchWork:
    """Feeding and gathering for one batch. For one thread."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        record: BatchRecord,
        plan: Plan,
        source: Path,
        folder: Path,
        is_open: Callable[[], bool],
    ) -> None:
        """Opens the files of its outcomes; raises StorageError.

        Args:
            source: the input file.
            folder: where the outcomes lie.
            is_open: whether the batch is not over by now; another gateway may have ended it.
        """
        self._client = client
        self._keys = keys
        self._registry = Registry(client, keys)
        self._is_open = is_open
        self.plan = plan
        self.source = source
        self._runs = [_Run(record, plan, keys.queue, index, folder) for index in range(len(plan.encodings))]

    def feed(self, max_backlog_bytes: int) -> bool:
        """Send what the queue takes now. Returns whether something was sent."""
        now = time.monotonic()
        due = [run for run in self._runs if not run.over and (not run.sent or now >= run.check_at)]
        return sum(self._feed(run, max_backlog_bytes) for run in due) > 0

    def gather(self) -> bool:
        """Store what came back, and drop it from Redis. Returns whether something came."""
        return sum(self._gather(run) for run in self._runs if not run.over) > 0

    @property
    def over(self) -> bool:
        """Every document has its outcome, or will never have one."""
        return all(run.over for run in self._runs)

    def cancel(self) -> None:
        """Have what is not computed yet skipped."""
        for run in self._runs:
            if not run.over:
                try:
                    self._registry.cancel(run.spec.run)
                except RunNotFoundError:
                    # Nothing was sent yet; nothing will be.
                    run.over = True

    def forget(self) -> None:
        """Drop the runs and what is left of their results, once the batch's files are published."""
        for run in self._runs:
            self._registry.forget(run.spec.run)

    def counts(self) -> tuple[int, int]:
        """(lines with all their vectors, lines that have failed)."""
        completed, failed = 0, len(self.plan.refusals)
        for run in self._runs:
            per_line = np.add.reduceat(run.outcomes.done().astype(np.int64), run.first)
            completed += int((per_line == run.counts).sum())
            ordinals = np.array([ordinal for ordinal in run.failures if ordinal >= 0], np.int64)
            failed += len(np.unique(np.searchsorted(run.first, ordinals, side="right")))
        return completed, failed

    def outcome(self, line: int) -> tuple[NDArray[np.float32], NDArray[np.int32], dict[int, DeadLetter]]:
        """Of one planned line: vectors float32 [n, components], tokens int32 [n] (0: none), and failures by index."""
        run = self._runs[int(self.plan.runs[line])]
        start = int(self.plan.first[line])
        stop = start + int(self.plan.counts[line])
        failures = {i - start: run.failures[i] for i in range(start, stop) if i in run.failures} if run.failures else {}
        return run.outcomes.vectors[start:stop], run.outcomes.tokens[start:stop], failures

    def _feed(self, run: _Run, max_backlog_bytes: int) -> bool:
        try:
            state = self._registry.state(run.spec.run)
        except RunNotFoundError:
            if not self._is_open():
                return False
            self._registry.create(run.spec)
            state = self._registry.state(run.spec.run)
        if state.input_closed or state.status.terminal:
            run.sent, run.check_at = True, time.monotonic() + _CHECK_S
            return False
        position = int(state.position or 0)
        moved = False
        for job in self._jobs(run, position):
            rows = job.num_rows
            sent = self._registry.enqueue(
                run.spec,
                expected=_position(position),
                position=_position(position + rows),
                max_backlog_bytes=max_backlog_bytes,
                documents=rows,
                payload=encode_job(job),
            )
            if sent.outcome not in (EnqueueOutcome.OK, EnqueueOutcome.DUP):
                # Full: later. Fenced, stopped or gone: the next look at the run says how to go on.
                return moved
            position += rows
            moved = True
        closed = self._registry.enqueue(
            run.spec,
            expected=_position(position),
            position=_position(position),
            max_backlog_bytes=max_backlog_bytes,
            close=True,
        )
        run.sent = closed.outcome in (EnqueueOutcome.OK, EnqueueOutcome.DUP)
        run.check_at = time.monotonic() + _CHECK_S
        return True

    def _jobs(self, run: _Run, position: int) -> Iterator[pa.RecordBatch]:
        """The run's documents from ordinal `position` on, as jobs."""
        index = int(np.searchsorted(run.first, position, side="right")) - 1
        skip = position - int(run.first[index])
        held: list[Any] = []
        size = 0
        with self.source.open("rb") as file:
            for line in run.lines[index:].tolist():
                file.seek(int(self.plan.offsets[line]))
                raw = file.readline()
                _, _, inputs = parse_line(raw)
                held.extend(inputs.documents[skip:])
                skip = 0
                size += len(raw)
                if len(held) >= _JOB_DOCUMENTS or size >= _JOB_BYTES:
                    yield from _cut(held, position)
                    position += len(held)
                    held, size = [], 0
        if held:
            yield from _cut(held, position)

    def _gather(self, run: _Run) -> bool:
        wanted = [(run.spec.run, Cursor("0", run.letters))]
        look = look_at(self._client, self._keys, wanted, count=_RESULTS_AT_ONCE)[0]
        if look.status is None:
            # Not sent yet; or lost by the server, and then it is sent again.
            run.sent = False
            return False
        dropped = []
        for entry_id, payload in look.results:
            try:
                run.outcomes.store(VectorBatch.decode(payload))
            except CodecError as error:
                log.warning("results %s of run %s are left out: %s", entry_id, run.spec.run, error)
            dropped.append((entry_id, len(payload)))
        if dropped:
            run.outcomes.sync()
            drop_results(self._client, self._keys, run.spec.run, dropped)
        for entry_id, letter in look.letters:
            run.letters = entry_id
            run.failures[letter.ordinal] = letter
        more = bool(look.results or look.letters)
        run.over = look.over and not more
        if run.over and look.error:
            log.warning("run %s ended %s: %s", run.spec.run, look.status, look.error)
        return more


class _Run:
    """One run of a batch: the lines with the same options."""

    def __init__(self, record: BatchRecord, plan: Plan, queue: str, index: int, folder: Path) -> None:
        self.lines = plan.lines(index)
        self.first = plan.first[self.lines]
        self.counts = plan.counts[self.lines]
        self.outcomes = Outcomes(
            folder,
            index,
            documents=plan.documents(index),
            components=plan.components(index),
            max_length=plan.max_length,
        )
        window_s = max(0, record.expires_at - int(time.time()))
        self.spec = RunSpec(
            run=f"{record.id}-{index}",
            queue=queue,
            model_fingerprint=plan.fingerprint,
            encoding=plan.encodings[index],
            sink=StreamSink(ttl_s=min(_MOST_TTL_S, window_s + _KEEP_RESULTS_S)),
            lane=Lane.BULK,
            created_at=float(record.created_at),
        )
        #: Failures by ordinal. They stay in Redis until the batch is over, so a restart reads them again.
        self.failures: dict[int, DeadLetter] = {}
        self.letters = "0"
        self.sent = False
        self.check_at = 0.0
        self.over = False


def parse_line(raw: bytes) -> tuple[str, EmbeddingsRequest, Inputs]:
    """(custom id, body, inputs) of a line that the plan accepted."""
    line = decode_line(raw, len(raw))
    body = embeddings_request(memoryview(line.body))
    return line.custom_id, body, parse_inputs(body.input, _PLANNED)


def _cut(documents: list[Any], start: int) -> Iterator[pa.RecordBatch]:
    """Jobs of documents whose first one has ordinal `start`; texts and token ids do not share a job."""
    ids = [str(start + index) for index in range(len(documents))]
    for job, _ in jobs(documents, ids=ids):
        ordinals = pa.array(job.column("ordinal").to_numpy() + start)
        yield job.set_column(1, "ordinal", ordinals)


def _position(documents: int) -> str:
    return str(documents) if documents else ""
