"""Writing: vectors wait here until they fill a file or a moment passes, then are staged, committed and published.

Runs in its own thread, so that the device computes the next batch meanwhile. Everything held here is under lease; a
full disk or a full server is waited out with the vectors in hand, and the bounded queue stops the reading.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import redis
from embedq_broker.commit import Commit, CommitOutcome, CommitRecord, Committed, unpublished
from embedq_broker.consume import Consumer
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_schemas.errors import EmbedqError, OutputError, StorageError, UsageError
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.quantize import VectorType
from embedq_schemas.run import Durability, ParquetSink, RunSpec, RunStatus, StreamSink
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray

from embedq_worker.calibrate import Calibration, vector_metadata
from embedq_worker.embed import Embedded
from embedq_worker.hold import until_accepted
from embedq_worker.keeper import Progress
from embedq_worker.runs import RunCache
from embedq_worker.sinks.dataset import Dataset, open_dataset
from embedq_worker.sinks.parquet import stage
from embedq_worker.sinks.publish import publish
from embedq_worker.sinks.store import CommittedFileError

T = TypeVar("T")
log = logging.getLogger(__name__)

_IDLE_S = 0.02
"""Pause in the flow after which it is worth asking whether a run has sent everything."""
_STARVED_S = 1.0
"""Pause after which waiting rows are written anyway: their uncommitted inputs may be what fills the queue."""
_CALIBRATION_PATIENCE_S = 10.0
"""The same for rows that are too few to find their run's ranges from."""


@dataclass
class _Pending:
    """Rows of one parquet run that wait for their file."""

    since: float
    #: Vectors as the run stores them.
    items: list[Embedded] = field(default_factory=list)
    #: Behind them, vectors in float32 until the run's ranges are found.
    loose: list[Embedded] = field(default_factory=list)
    vector_bytes: int = 0
    input_bytes: int = 0


class Writer:
    """The writing thread of one embedder process."""

    def __init__(
        self,
        client: redis.Redis,
        consumer: Consumer,
        progress: Progress,
        *,
        url: str,
        roots: Sequence[str | Path],
        file_metadata: Callable[[RunSpec], Mapping[str, str]],
        flush_interval_s: float,
        storage_patience_s: float,
        most_input_bytes: int,
        starved: Callable[[], bool] = lambda: True,
        depth: int = 64,
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._keys: Keys = consumer.keys
        self._registry = Registry(client, consumer.keys)
        self._progress = progress
        self._url = url
        self._roots = roots
        self._file_metadata = file_metadata
        self._flush_interval_s = flush_interval_s
        self._storage_patience_s = storage_patience_s
        self._most_input_bytes = most_input_bytes
        self._starved = starved
        self._last_item = time.monotonic()
        self._queue: queue.Queue[Embedded | None] = queue.Queue(maxsize=depth)
        self._pending: dict[str, _Pending] = {}
        self._draining = threading.Event()
        self._runs = RunCache(self._registry, url=url, give_up=self._draining.is_set)
        self._calibration = Calibration(roots)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, embedded: Embedded) -> None:
        """Hand over a batch; waits while the writer is behind. Raises what ended the writer, if something did."""
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                self._queue.put(embedded, timeout=0.5)
            except queue.Full:
                # Waiting for a slow disk or server is not a hang: the writer says itself when it makes no progress.
                continue
            return

    def drain(self) -> None:
        """Let nothing be waited out any more; `close` follows."""
        self._draining.set()

    def close(self, timeout_s: float) -> None:
        """Write and commit everything handed over, then end the thread. Raises what ended the writer early."""
        self.drain()
        deadline = time.monotonic() + timeout_s
        # A writer that ended, or hangs, takes nothing more from a full queue.
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise StorageError(f"the writer did not finish within {timeout_s:.0f} s")

    def check(self) -> None:
        """Raise what ended the writer, if something did."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=self._wait_s())
                except queue.Empty:
                    self._flush_due(idle=True)
                    continue
                if item is None:
                    for run, pending in list(self._pending.items()):
                        if self._settled(run, pending, now=self._nothing_follows(run)):
                            self._flush(run)
                        else:
                            # Ranges of these few would be bad ones for all that follow.
                            log.info("%d token batches of run %s are given back", len(pending.loose), run)
                    return
                self._last_item = time.monotonic()
                self._accept(item)
                self._flush_due(idle=False)
        except BaseException as error:  # the computing thread must hear of it, whatever it is
            self._failure = error

    def _wait_s(self) -> float:
        if not self._pending:
            return 1.0
        if any(pending.loose for pending in self._pending.values()):
            return _IDLE_S
        oldest = min(pending.since for pending in self._pending.values())
        due = oldest + self._flush_interval_s - time.monotonic()
        return max(0.001, min(due, _IDLE_S if self._queue.empty() else due))

    def _accept(self, item: Embedded) -> None:
        self._runs.load(part.run for part in item.parts)
        specs = {part.run: self._runs.spec(part.run) for part in item.parts}
        first = next(iter(specs.values()), None)
        if len(specs) == 1 and first is not None and isinstance(first.sink, ParquetSink):
            pending = self._pending.setdefault(first.run, _Pending(time.monotonic()))
            pending.loose.append(item)
            pending.input_bytes += len(item.entry.payload)
            crowded = pending.input_bytes >= self._most_input_bytes
            settled = self._settled(first.run, pending, now=crowded)
            if settled and (crowded or pending.vector_bytes >= first.sink.file_bytes):
                self._flush(first.run)
            return
        self._commit_results(item, specs)

    def _flush_due(self, *, idle: bool) -> None:
        now = time.monotonic()
        # While a batch is being computed, more rows are on their way to the same file.
        resting = idle and self._starved()
        starved = resting and now - self._last_item >= _STARVED_S
        stuck = resting and now - self._last_item >= _CALIBRATION_PATIENCE_S
        for run, pending in list(self._pending.items()):
            due = starved or now - pending.since >= self._flush_interval_s
            last = resting and (pending.loose or not due) and self._nothing_follows(run)
            if (due or last) and self._settled(run, pending, now=last or stuck):
                self._flush(run)

    def _settled(self, run: str, pending: _Pending, *, now: bool) -> bool:
        """Bring what waits into the run's vector type; False while it is too little to find the ranges from.

        Args:
            now: find them from what is there.
        """
        if not pending.loose:
            return True
        spec = self._runs.spec(run)
        batches = [part.vectors for item in pending.loose for part in item.parts if part.vectors is not None]
        if spec is not None and batches:
            kind = spec.encoding.vector_type
            try:
                ranges = self._patiently(lambda: self._calibration.ranges(spec, batches, now=now))
                if kind.ranged and ranges is None:
                    return False
                _check_type(kind, batches[0].dimension, ranges)
            except (OutputError, UsageError) as error:
                self._fail_run(run, error)
            else:
                pending.loose = [item.quantized(kind, ranges) for item in pending.loose]
        pending.items += pending.loose
        pending.vector_bytes += sum(item.vector_bytes for item in pending.loose)
        pending.loose = []
        return True

    def _nothing_follows(self, run: str) -> bool:
        """Whether the run's last token batches are out: then waiting for a fuller file is waiting for nothing."""
        try:
            return self._registry.all_in_batches(run)
        except redis.exceptions.RedisError:
            return False

    def _commit_results(self, item: Embedded, specs: Mapping[str, RunSpec | None]) -> None:
        """Results for streams, dead letters of any run, and documents of runs that are gone."""
        commit = Commit(self._consumer, inputs=[item.entry])
        durability = Durability.PROCESS
        documents = tokens = 0
        for part in item.parts:
            spec = specs[part.run]
            rows = part.vectors.num_documents if part.vectors is not None else 0
            for letter in part.dead:
                commit.add_dead_letter(part.run, letter)
            commit.count(part.run, "skipped", part.skipped)
            if spec is None or part.vectors is None:
                continue
            if not self._runs.wanted(part.run):
                commit.count(part.run, "skipped", rows)
                continue
            assert isinstance(spec.sink, StreamSink), "a batch that mixes runs holds only runs with result streams"
            kind, ranges = spec.encoding.vector_type, spec.encoding.ranges
            try:
                _check_type(kind, part.vectors.dimension, ranges)
            except UsageError as error:
                self._fail_run(part.run, error)
                commit.count(part.run, "skipped", rows)
                continue
            vectors = part.vectors.quantized(kind, ranges)
            commit.add_result(part.run, rows, vectors.encode(), ttl_ms=spec.sink.ttl_s * 1000)
            commit.count(part.run, "succeeded", rows)
            commit.count(part.run, "tokens", part.tokens)
            documents, tokens = documents + rows, tokens + part.tokens
            if spec.durability is not Durability.PROCESS:
                durability = spec.durability
        committed = self._send(commit, durability)
        if committed.outcome is CommitOutcome.LOST:
            log.warning("token batch %s was taken over by another worker; its vectors are discarded", item.entry.id)
            return
        self._progress.done(documents, tokens)

    def _flush(self, run: str) -> None:
        """Stage, commit and publish everything that waits for `run`."""
        items = self._pending.pop(run).items
        spec = self._runs.spec(run)
        while items:
            wanted = self._runs.wanted(run)
            commit = Commit(self._consumer, inputs=[item.entry for item in items])
            parts = [part for item in items for part in item.parts]
            batches = [part.vectors for part in parts if part.vectors is not None] if wanted else []
            tokens = sum(part.tokens for part in parts)
            rows = sum(batch.num_documents for batch in batches)
            for part in parts:
                for letter in part.dead:
                    commit.add_dead_letter(run, letter)
                unwanted = part.vectors.num_documents if part.vectors is not None and not wanted else 0
                commit.count(run, "skipped", part.skipped + unwanted)
            dataset, file = None, None
            if batches and spec is not None:
                try:
                    dataset, file = self._stage(spec, commit.token, batches, tokens)
                except (OutputError, UsageError) as error:
                    self._fail_run(run, error)
                    continue
                commit.add_file(file, str(dataset))
                commit.count(run, "succeeded", rows)
                commit.count(run, "tokens", tokens)
            committed = self._send(commit, spec.durability if spec else Durability.PROCESS)
            if committed.outcome is CommitOutcome.LOST:
                # Another worker has some of these batches: write the file again without their rows.
                if dataset is not None and file is not None:
                    dataset.store.discard(file)
                lost = set(committed.lost)
                log.warning("%d of %d token batches were taken over by another worker", len(lost), len(items))
                items = [item for item in items if (item.entry.stream, item.entry.id) not in lost]
                continue
            self._progress.done(rows, tokens)
            if dataset is not None and file is not None:
                self._publish(dataset, file, committed)
            return

    def _stage(
        self, spec: RunSpec, token: str, batches: list[VectorBatch], tokens: int
    ) -> tuple[Dataset, PublishedFile]:
        dataset = open_dataset(spec.sink.path, self._roots)  # type: ignore[union-attr]
        ranges = self._calibration.ranges(spec, (), now=False)

        def attempt() -> PublishedFile:
            dataset.prepare(spec)
            if ranges is not None and not np.array_equal(dataset.claim_ranges(ranges), ranges):
                # Somebody emptied the directory under a run: its files must not be read with each other's ranges.
                raise OutputError(f"{dataset} has other ranges than the vectors that wait for it")
            metadata = {**self._file_metadata(spec), **vector_metadata(spec, ranges)}
            return stage(dataset, token, spec.run, batches, metadata, tokens, moved=self._moved)

        return dataset, self._patiently(attempt)

    def _moved(self) -> None:
        self._progress.ticks += 1

    def _publish(self, dataset: Dataset, file: PublishedFile, committed: Committed) -> None:
        def attempt() -> None:
            record_id = next((entry_id for entry_id in committed.added[-1:] if entry_id), None)
            replay = record_id is None
            if record_id is None:
                # The reply that named the record was lost; the record itself was not, unless someone published it.
                known = {record.file.token: record for record in unpublished(self._client, self._keys)}
                if file.token not in known:
                    return
                record_id = known[file.token].id
            record = CommitRecord(record_id, str(dataset), file)
            until_accepted(
                lambda: publish(self._client, self._keys, dataset, record, replay=replay),
                url=self._url,
                give_up=self._draining.is_set,
            )

        try:
            self._patiently(attempt)
        except OutputError as error:
            # It is committed, so housekeeping goes on trying.
            log.error("cannot publish a file of run %s: %s", file.run, error)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Retry while the disk refuses, up to the configured patience, with the work in hand."""
        started = time.monotonic()
        wait_s = 0.1
        try:
            while True:
                try:
                    return attempt()
                except CommittedFileError:
                    raise
                except StorageError as error:
                    if self._draining.is_set() or time.monotonic() - started >= self._storage_patience_s:
                        raise
                    log.warning("holding finished vectors: %s", error)
                    self._progress.hold("waiting for storage", str(error))
                    time.sleep(wait_s)
                    wait_s = min(wait_s * 2, 5.0)
        finally:
            self._progress.let_go()

    def _send(self, commit: Commit, durability: Durability) -> Committed:
        def attempt() -> Committed:
            self._moved()  # waiting for the server is not a hang
            return commit.send(self._client, durability=durability)

        return until_accepted(attempt, url=self._url, give_up=self._draining.is_set)

    def _fail_run(self, run: str, error: EmbedqError) -> None:
        """Nobody can write the run's output: end the run, so that its entries are skipped and counted."""
        log.error("run %s failed: %s", run, error)
        running = [RunStatus.VALIDATING, RunStatus.IN_PROGRESS]
        until_accepted(
            lambda: self._registry.transition(run, RunStatus.FAILED, running, error=str(error)),
            url=self._url,
            give_up=self._draining.is_set,
        )
        self._runs.forget(run)


def _check_type(kind: VectorType, dimension: int, ranges: NDArray[np.float32] | None) -> None:
    if fault := kind.fault(dimension, ranges):
        raise UsageError(fault)
