"""Rows for texts whose vector exists already: in an older dataset, or in this run under another id.

The producer holds such documents back. Once every other document has its outcome, their rows are made of what the
corpus says (id, ordinal, metadata) and of what the row of the same text says (vector, token count), and take the way of
all rows: staged, committed, published. A file of the older dataset whose rows are all wanted as they are becomes a file
of this run by a hard link.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import redis
from embedq_broker.commit import TOKEN_TTL_MS, Commit, CommitRecord
from embedq_broker.consume import Consumer, Stage
from embedq_broker.faults import fault_point
from embedq_broker.registry import Registry
from embedq_producer.feed import Stopped
from embedq_producer.ordinals import OrdinalSet
from embedq_producer.repeats import HeldBack, LostCommitError, Repeats
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.run import ParquetSink, RunSpec, RunStatus
from embedq_schemas.text_hash import digest_bytes, text_keys
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.files import fsync_directory, storage_errors
from embedq_worker.sinks.finish import stranded
from embedq_worker.sinks.parquet import stage
from embedq_worker.sinks.publish import publish
from numpy.typing import NDArray

from embedq.dataset.reader import DatasetReader, facts_in

SPOOL_NAME = "known.tmp"
_FROM_THE_VECTORS = ("vector", "n_tokens", "truncated", "text_sha256")
_POLL_S = 0.1
_PUBLISHED_WITHIN_S = 3600.0
"""Time between a commit and its file's name, at most."""
_OPEN = (RunStatus.VALIDATING, RunStatus.IN_PROGRESS)


class KnownVectors:
    """`embedq_producer.repeats.Vectors` of one run of `embedq run`."""

    def __init__(
        self,
        client: redis.Redis,
        registry: Registry,
        dataset: Dataset,
        spec: RunSpec,
        *,
        max_length: int,
        done: OrdinalSet,
        spool: Path,
        older: DatasetReader | None = None,
    ) -> None:
        """
        Args:
            max_length: tokens that longer texts are cut to.
            done: ordinals of documents that have their outcome.
            spool: folder for the documents held back.
            older: a dataset whose vectors are what the run would compute; it stays as it is meanwhile.
        """
        assert isinstance(spec.sink, ParquetSink)
        self._client, self._registry, self._dataset, self._spec = client, registry, dataset, spec
        self._max_length, self._done, self._spool, self._older = max_length, done, spool, older
        self._file_bytes = spec.sink.file_bytes
        self._consumer = Consumer(client, registry.keys, Stage.EMBED, f"known-{uuid.uuid4().hex}", lease_ms=1)

    def begin(self) -> Repeats:
        """For one pass over the corpus."""
        columns = (*self._spec.metadata, "text") if self._spec.keep_text else self._spec.metadata
        return Repeats(self._spool / SPOOL_NAME, columns, self._done, self._older_keys())

    def _older_keys(self) -> Iterator[NDArray[np.uint64]]:
        if self._older is not None and self._older.files:
            for batch in self._older.batches(["text_sha256"], batch_rows=1 << 20):
                yield text_keys(batch.column("text_sha256"))

    def supply(self, held: HeldBack, stopping: Callable[[], bool]) -> Iterator[None]:
        """As `Vectors` says.

        Raises:
            Stopped: the run takes no more input.
            LostCommitError: the server lost what it had committed.
            OutputError: a file that holds vectors is gone or damaged.
            StorageError: the disk refused.
        """
        if not held.waiting.any() or not self._all_settled(stopping):
            return
        fault_point("copy.begun")
        for record in self._registry.unpublished(self._spec.run):
            publish(self._client, self._registry.keys, self._dataset, record, replay=True)
        held.settle(self._settled())
        for file in self._files(held):
            if stopping():
                return
            yield
            # The position moved after the commit: where the commit is lost from now on, so is the position.
            if not self._is_committed(file):
                raise LostCommitError

    def _settled(self) -> OrdinalSet:
        """Ordinals of the rows that this run has by now."""
        listed = self._dataset.store.files().values()
        files = [file for file in listed if self._is_committed(file) or self._is_past_losing(file)]
        return OrdinalSet(pair for file in files for pair in file.ranges)

    def _is_committed(self, file: PublishedFile) -> bool:
        return bool(self._client.exists(self._registry.keys.token(file.token)))

    def _is_past_losing(self, file: PublishedFile) -> bool:
        """Whether the server has forgotten the commit as it forgets all of them after a day."""
        with storage_errors(f"look at {self._dataset}/{file.name}"):
            written = self._dataset.store.modified(file.name)
        return time.time() - written > TOKEN_TTL_MS / 1000 - _PUBLISHED_WITHIN_S

    def _all_settled(self, stopping: Callable[[], bool]) -> bool:
        """Wait until every document sent has its outcome; False if asked to stop."""
        run = self._spec.run
        while not stopping():
            empty = self._registry.streams_empty()
            state = self._registry.state(run)
            if state.status not in _OPEN:
                raise Stopped(state.status)
            missing = state.counters.input - state.counters.settled
            if not missing:
                return True
            if empty:
                # Such a run would wait for ever; once it is resumed these documents are sent again.
                self._registry.transition(run, RunStatus.FAILED, _OPEN, error=stranded(missing))
                continue
            time.sleep(_POLL_S)
        return False

    def _files(self, held: HeldBack) -> Iterator[PublishedFile]:
        """Commit and publish files of known vectors; each is yielded when it is."""
        rows = _Rows()
        for reader, file in self._sources():
            if not held.waiting.any():
                break
            if reader is self._older and (linked := self._link(reader, file, held)) is not None:
                yield self._commit(linked)
                continue
            for part, facts in self._copies(reader, file, held):
                full = rows.nbytes + part.column("vector").nbytes > self._file_bytes
                if rows.nbytes and (full or facts != rows.facts):
                    yield self._commit(self._stage(rows))
                    rows = _Rows()
                rows.add(part, facts)
        if rows.nbytes:
            yield self._commit(self._stage(rows))

    def _sources(self) -> Iterator[tuple[DatasetReader, PublishedFile]]:
        older = [(self._older, file) for file in self._older.files] if self._older is not None else []
        yield from older
        files = self._dataset.store.files().values()
        computed = tuple(file for file in files if file.run == self._spec.run and not file.copied)
        own = DatasetReader(self._dataset, self._spec, computed, complete=False, summary={})
        yield from ((own, file) for file in computed)

    def _link(self, reader: DatasetReader, file: PublishedFile, held: HeldBack) -> PublishedFile | None:
        """Stage a whole file of the older dataset, if each of its rows is wanted, at the ordinal that it has."""
        asked = held.schema
        if not {"id", *asked.names} <= set(reader.schema.names) or len(reader.schema) != len(asked) + 3:
            return None
        if any(reader.schema.field(name).type != asked.field(name).type for name in asked.names):
            return None
        names = list(asked.names)
        found = pa.Table.from_batches(reader.file_batches(file, reader.select(names), 1 << 16)).select(names)
        order = np.argsort(found.column("ordinal").to_numpy(), kind="stable")
        ordinals = found.column("ordinal").to_numpy()[order]
        if np.any(ordinals[1:] == ordinals[:-1]):
            return None
        rows = held.at(ordinals)
        if rows is None:
            return None
        for first in range(0, len(rows), 1 << 16):
            part = slice(first, first + (1 << 16))
            wanted, there = held.take(rows[part]), found.take(pa.array(order[part]))
            if any(not _equal(wanted.column(name), there.column(name)) for name in names):
                return None
        staged = self._staged_name()
        with storage_errors(f"write into {self._dataset.staging}"):
            try:
                os.link(reader.locate(file), self._dataset.path / staged)
            except OSError:
                # A file system without hard links, or another one: the rows are copied.
                return None
            fsync_directory(self._dataset.staging)
        held.waiting[rows] = False
        token = Path(staged).stem
        return msgspec.structs.replace(file, token=token, run=self._spec.run, copied=True)

    def _staged_name(self) -> str:
        return f"_staging/{uuid.uuid4().hex}.tmp"

    def _copies(
        self, reader: DatasetReader, file: PublishedFile, held: HeldBack
    ) -> Iterator[tuple[pa.RecordBatch, Mapping[str, str]]]:
        """Rows of documents held back that have the text of one of the file's rows; each is then waited for no more."""
        schema = reader.select(list(_FROM_THE_VECTORS))
        digests = reader.file_batches(file, reader.select(["text_sha256"]), 1 << 16)
        if not any(len(held.find(text_keys(batch.column("text_sha256")))[0]) for batch in digests):
            return
        with reader.opened(file) as opened:
            facts = {f"embedq.{name}": value for name, value in facts_in(opened.schema_arrow).items()}
        facts["embedq.run"] = self._spec.run
        for batch in reader.file_batches(file, schema, reader.batch_rows):
            sources, rows = held.find(text_keys(batch.column("text_sha256")))
            wanted = digest_bytes(held.take(np.sort(rows), ["text_sha256"]).column(0)) if len(rows) else None
            if wanted is None:
                continue
            order = np.argsort(rows, kind="stable")
            sources, rows = sources[order], rows[order]
            same = (wanted == digest_bytes(batch.column("text_sha256"))[sources]).all(axis=1)
            # A text may lie here twice.
            same[1:] &= rows[1:] != rows[:-1]
            sources, rows = sources[same], rows[same]
            held.waiting[rows] = False
            row_bytes = max(1, batch.column("vector").nbytes // batch.num_rows)
            most = max(1, min(reader.batch_rows, self._file_bytes // row_bytes))
            for first in range(0, len(rows), most):
                part = slice(first, first + most)
                yield self._row_batch(batch.take(pa.array(sources[part])), held.take(rows[part])), facts

    def _row_batch(self, vectors: pa.RecordBatch, documents: pa.RecordBatch) -> pa.RecordBatch:
        names = ("id", "ordinal", *_FROM_THE_VECTORS, *self._spec.metadata, *(["text"] if self._spec.keep_text else []))
        fields, arrays = [], []
        for name in names:
            source = vectors if name in _FROM_THE_VECTORS else documents
            arrays.append(source.column(name))
            fields.append(vectors.schema.field(name) if source is vectors else pa.field(name, arrays[-1].type))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def _stage(self, rows: _Rows) -> PublishedFile:
        with storage_errors(f"write into {self._dataset}"):
            self._dataset.store.prepare()
        batches = [VectorBatch(part) for part in rows.parts]
        tokens = sum(self._tokens(part) for part in rows.parts)
        file = stage(self._dataset, uuid.uuid4().hex, self._spec.run, batches, rows.facts, tokens)
        return msgspec.structs.replace(file, copied=True)

    def _tokens(self, rows: pa.RecordBatch) -> int:
        """After truncation."""
        lengths = rows.column("n_tokens").to_numpy()
        return int(np.minimum(lengths, self._max_length).sum())

    def _commit(self, file: PublishedFile) -> PublishedFile:
        """Count the rows of a staged file in, and out as succeeded, in one step; then publish it."""
        fault_point("copy.staged")
        run = self._spec.run
        commit = Commit(self._consumer, token=file.token)
        commit.add_file(file, str(self._dataset))
        for counter in ("input", "ready", "succeeded"):
            commit.count(run, counter, file.rows)
        commit.send(self._client, durability=self._spec.durability)
        fault_point("copy.committed")
        # By its record rather than by the reply, which may have been lost and repeated.
        for record in self._registry.unpublished(run):
            if record.file.token == file.token:
                publish(self._client, self._registry.keys, self._dataset, CommitRecord(record.id, record.dataset, file))
        fault_point("copy.published")
        return file


@dataclass
class _Rows:
    """Rows that wait for their file; all have the same facts."""

    parts: list[pa.RecordBatch] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, rows: pa.RecordBatch, facts: Mapping[str, str]) -> None:
        self.parts.append(rows)
        self.facts = facts
        self.nbytes += rows.column("vector").nbytes


def _equal(wanted: pa.Array, there: pa.ChunkedArray) -> bool:
    return bool(pa.chunked_array([wanted]).equals(there))
