"""A dataset's rows in the order of its run's input, in bounded memory for any number of rows.

A merge over files: the manifest says which ordinals each file holds, so a file is read when the first of its rows is
due and dropped after its last. Files follow the input roughly, so few are open at a time; where that fails, sorted
files beyond the memory budget go to a temporary directory and are read from there through memory maps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from embedq_schemas.errors import OutputError
from embedq_schemas.manifest import PublishedFile
from numpy.typing import NDArray

from embedq.dataset.reader import DatasetReader

MEMORY_BYTES = 512 << 20
"""Sorted files held in memory at once; more are mapped from the temporary directory."""


@dataclass
class _Sorted:
    """One file's rows by ordinal, as far as they are not given out."""

    number: int  # position in the manifest: of two rows of one ordinal the later file's is newer
    table: pa.Table
    ordinals: NDArray[np.int64]
    spill: Path | None
    start: int = 0

    @property
    def held_bytes(self) -> int:
        return 0 if self.spill else int(self.table.nbytes)

    def take_until(self, last: int) -> pa.Table:
        """Rows up to the ordinal `last`, included."""
        end = int(np.searchsorted(self.ordinals, last, side="right"))
        part = self.table.slice(self.start, end - self.start)
        self.start = end
        return part


def in_input_order(
    reader: DatasetReader, schema: pa.Schema, batch_rows: int, *, memory_bytes: int = MEMORY_BYTES
) -> Iterator[pa.RecordBatch]:
    """Batches of at most `batch_rows` rows in the order of `ordinal`, with the columns of `schema`.

    Of rows with equal ordinal and id, which are one document's, only the newest comes. Other rows of one ordinal come
    in the order of the manifest; a foreign producer may have numbered its jobs alike.

    Memory: `memory_bytes`, and twice the largest file. Disk: in the temporary directory, what the files that wait for
    each other hold beyond that. Raises OutputError where a file does not hold what the manifest says.
    """
    due = sorted(enumerate(reader.files), key=lambda item: item[1].ordinals[0])
    ranks = Ranks(reader.files)
    active: list[_Sorted] = []
    with tempfile.TemporaryDirectory(prefix="embedq-order-") as folder:
        for first in range(0, ranks.total, batch_rows):
            last = ranks.ordinal(min(first + batch_rows, ranks.total) - 1)
            while due and due[0][1].ordinals[0] <= last:
                number, file = due.pop(0)
                budget = memory_bytes - sum(other.held_bytes for other in active)
                active.append(_load(reader, number, file, schema, budget, Path(folder)))
            active.sort(key=lambda one: one.number)
            merged = _merge([one.take_until(last) for one in active])
            # In one chunk, and no longer than asked for although ordinals repeat.
            table = merged.select(schema.names).cast(schema).combine_chunks()
            yield from table.to_batches(max_chunksize=batch_rows)
            for done in [one for one in active if one.start == len(one.ordinals)]:
                active.remove(done)
                if done.spill is not None:
                    done.spill.unlink()


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


def _load(
    reader: DatasetReader, number: int, file: PublishedFile, schema: pa.Schema, budget: int, folder: Path
) -> _Sorted:
    path = reader.locate(file)
    keys = [reader.schema.field(name) for name in ("id", "ordinal") if name not in schema.names]
    wanted = pa.schema([*schema, *keys])
    # Offsets of 64 bits: the texts of one file may have more than 2 GB.
    large = pa.schema([_widened(field) for field in wanted])
    batches = [batch.cast(large) for batch in reader.file_batches(file, wanted, reader.batch_rows)]
    table = pa.Table.from_batches(batches, large).combine_chunks()
    ordinals = table.column("ordinal").to_numpy()
    _check(path, file, ordinals)
    if np.any(ordinals[1:] < ordinals[:-1]):
        order = np.argsort(ordinals, kind="stable")
        table, ordinals = table.take(order), ordinals[order]
    spill = None
    if table.nbytes > budget:
        spill = folder / file.token
        with pa.OSFile(str(spill), "wb") as sink, pa.ipc.new_file(sink, large) as writer:
            writer.write_table(table)
        table = pa.ipc.open_file(pa.memory_map(str(spill))).read_all()
        ordinals = table.column("ordinal").to_numpy()
    return _Sorted(number, table, ordinals, spill)


def _widened(field: pa.Field) -> pa.Field:
    return field.with_type(pa.large_string()) if field.type == pa.string() else field


def _check(path: Path, file: PublishedFile, ordinals: NDArray[np.int64]) -> None:
    promised = sum(b - a + 1 for a, b in zip(file.ordinals[::2], file.ordinals[1::2], strict=True))
    found = np.unique(ordinals)
    if len(ordinals) != file.rows or len(found) != promised:
        raise OutputError(f"{path} holds {len(ordinals)} rows, its manifest says {file.rows}")
    if (found[0], found[-1]) != (file.ordinals[0], file.ordinals[-1]):
        raise OutputError(f"{path} holds ordinals {found[0]} to {found[-1]}, its manifest says others")


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
