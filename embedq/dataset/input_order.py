"""A dataset's rows in the order of its run's input, in bounded memory for any number of rows.

A merge over files: the manifest says which ordinals each file holds, so a file is read when the first of its rows is
due and dropped after its last. Files follow the input roughly, so few are open at a time; where that fails, sorted
files beyond the memory budget go to a temporary directory and are read from there through memory maps. A large file
that ascends already is read as it goes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from embedq_schemas.errors import OutputError
from embedq_schemas.manifest import PublishedFile
from embedq_worker.sinks.files import storage_errors
from numpy.typing import NDArray

from embedq.dataset.reader import DatasetReader

MEMORY_BYTES = 256 << 20
"""Sorted files held in memory at once; more are mapped from the temporary directory."""


class _Sorted:
    """One file's rows by ordinal, as far as they are not given out: in memory, or in a file that is mapped."""

    def __init__(self, number: int, table: pa.Table, spill: Path | None) -> None:
        #: Position in the manifest: of two rows of one document the later file's is newer.
        self.number = number
        self.held_bytes = 0 if spill else int(table.nbytes)
        self._table = table
        self._ordinals: NDArray[np.int64] = table.column("ordinal").to_numpy()
        self._spill = spill
        self._start = 0

    @property
    def done(self) -> bool:
        return self._start == len(self._ordinals)

    def take_until(self, last: int) -> pa.Table:
        """Rows up to the ordinal `last`, included."""
        end = int(np.searchsorted(self._ordinals, last, side="right"))
        part = self._table.slice(self._start, end - self._start)
        self._start = end
        return part

    def close(self) -> None:
        if self._spill is not None:
            self._spill.unlink()


class _Streamed:
    """A file whose rows ascend already, as after a compaction: read batch by batch."""

    held_bytes = 96 << 20
    """Of its row group, read and decoded."""

    def __init__(self, number: int, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self.number = number
        self._batches = batches
        self._schema = schema
        self._rest: pa.RecordBatch | None = next(batches, None)

    @property
    def done(self) -> bool:
        return self._rest is None

    def take_until(self, last: int) -> pa.Table:
        """Rows up to the ordinal `last`, included."""
        parts = []
        while self._rest is not None:
            end = int(np.searchsorted(self._rest.column("ordinal").to_numpy(), last, side="right"))
            parts.append(self._rest.slice(0, end))
            if end < self._rest.num_rows:
                self._rest = self._rest.slice(end)
                break
            self._rest = next(self._batches, None)
        return pa.Table.from_batches(parts, self._schema)

    def close(self) -> None:
        pass


def in_input_order(
    reader: DatasetReader, schema: pa.Schema, batch_rows: int, *, memory_bytes: int = MEMORY_BYTES
) -> Iterator[pa.RecordBatch]:
    """Batches of at most `batch_rows` rows in the order of `ordinal`, with the columns of `schema`.

    Of rows with equal ordinal and id, which are one document's, only the newest comes. Other rows of one ordinal come
    in the order of the manifest; a foreign producer may have numbered its jobs alike.

    Memory: `memory_bytes`, and twice the largest file. Disk: in the temporary directory, what the files that wait for
    each other hold beyond that. Raises OutputError where a file does not hold what the manifest says, and StorageError
    where the temporary directory is full.
    """
    due = sorted(enumerate(reader.files), key=lambda item: item[1].ordinals[0])
    ranks = Ranks(reader.files)
    active: list[_Sorted | _Streamed] = []
    with (
        storage_errors("sort rows in the temporary directory (TMPDIR names another)"),
        tempfile.TemporaryDirectory(prefix="embedq-order-") as folder,
    ):
        for first in range(0, ranks.total, batch_rows):
            last = ranks.ordinal(min(first + batch_rows, ranks.total) - 1)
            while due and due[0][1].ordinals[0] <= last:
                number, file = due.pop(0)
                budget = memory_bytes - sum(other.held_bytes for other in active)
                active.append(_begin(reader, number, file, schema, budget, Path(folder)))
            active.sort(key=lambda one: one.number)
            merged = _merge([one.take_until(last) for one in active])
            # In one chunk, and no longer than asked for although ordinals repeat.
            table = merged.select(schema.names).cast(schema).combine_chunks()
            yield from table.to_batches(max_chunksize=batch_rows)
            for done in [one for one in active if one.done]:
                active.remove(done)
                done.close()


class Ranks:
    """The sorted union of all files' ordinals, as ranges."""

    def __init__(self, files: tuple[PublishedFile, ...]) -> None:
        pairs = np.concatenate([np.array(file.ordinals, dtype=np.int64).reshape(-1, 2) for file in files] or [_NONE])
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        # A range may begin inside an earlier one where rows are doubled; what is new of it begins behind all of them.
        reach = np.maximum.accumulate(pairs[:, 1]) if len(pairs) else pairs[:, 1]
        self._firsts = pairs[:, 0].copy()
        self._firsts[1:] = np.maximum(self._firsts[1:], reach[:-1] + 1)
        self._ends = np.cumsum(np.maximum(0, pairs[:, 1] - self._firsts + 1))
        self.total = int(self._ends[-1]) if len(pairs) else 0

    def ordinal(self, rank: int) -> int:
        """The ordinal with `rank` smaller ones before it."""
        index = int(np.searchsorted(self._ends, rank, side="right"))
        before = int(self._ends[index - 1]) if index else 0
        return int(self._firsts[index]) + rank - before


_NONE = np.empty((0, 2), dtype=np.int64)


def _begin(
    reader: DatasetReader, number: int, file: PublishedFile, schema: pa.Schema, budget: int, folder: Path
) -> _Sorted | _Streamed:
    keys = [reader.schema.field(name) for name in ("id", "ordinal") if name not in schema.names]
    wanted = pa.schema([*schema, *keys])
    # Offsets of 64 bits: the texts of one file may have more than 2 GB.
    large = pa.schema([_widened(field) for field in wanted])
    batches = (batch.cast(large) for batch in reader.file_batches(file, wanted, reader.batch_rows))
    ordinals = _ordinals(reader, file)
    ascending = not np.any(ordinals[1:] < ordinals[:-1])
    if ascending and _Streamed.held_bytes < min(budget, file.size_bytes):
        return _Streamed(number, batches, large)
    table = pa.Table.from_batches(batches, large).combine_chunks()
    if not ascending:
        table = table.take(np.argsort(ordinals, kind="stable"))
    if table.nbytes <= budget:
        return _Sorted(number, table, None)
    spill = folder / file.token
    with pa.OSFile(str(spill), "wb") as sink, pa.ipc.new_file(sink, large) as writer:
        writer.write_table(table)
    return _Sorted(number, pa.ipc.open_file(pa.memory_map(str(spill))).read_all(), spill)


def _widened(field: pa.Field) -> pa.Field:
    return field.with_type(pa.large_string()) if field.type == pa.string() else field


def _ordinals(reader: DatasetReader, file: PublishedFile) -> NDArray[np.int64]:
    """The file's ordinals, which must be those that the manifest promises: the merge relies on it."""
    schema = reader.select(["ordinal"])
    parts = [batch.column("ordinal").to_numpy() for batch in reader.file_batches(file, schema, 1 << 20)]
    ordinals: NDArray[np.int64] = np.concatenate(parts)
    promised = sum(b - a + 1 for a, b in file.ranges)
    found = np.unique(ordinals)
    path = f"{reader.dataset}/{file.name}"
    if len(ordinals) != file.rows or len(found) != promised:
        raise OutputError(f"{path} holds {len(ordinals)} rows, its manifest says {file.rows}")
    if (found[0], found[-1]) != (file.ordinals[0], file.ordinals[-1]):
        raise OutputError(f"{path} holds ordinals {found[0]} to {found[-1]}, its manifest says others")
    return ordinals


def _merge(parts: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables(part for part in parts if part.num_rows).combine_chunks()
    ordinals = table.column("ordinal").to_numpy()
    order = np.argsort(ordinals, kind="stable")
    ascending = ordinals[order]
    if np.any(ascending[1:] == ascending[:-1]):
        keys = zip(ascending.tolist(), table.column("id").take(order).to_pylist(), strict=True)
        newest = {key: place for place, key in enumerate(keys)}
        order = order[sorted(newest.values())]
    if len(order) < table.num_rows or np.any(order[1:] < order[:-1]):
        table = table.take(order)
    return table
