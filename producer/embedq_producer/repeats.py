"""Documents whose text is known: they are not sent, for their vectors are somewhere already or on their way.

A text counts as known from its second occurrence on, or from the first where the vectors of an older dataset are at
hand. Known texts are told by the first 8 bytes of their SHA-256, 8 bytes of memory each; whoever takes a vector for one
compares the whole digest, and hands back what only seemed to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from embedq_schemas.errors import StorageError
from embedq_schemas.text_hash import hash_texts, text_keys
from numpy.typing import NDArray

from .id_set import IdSet
from .ordinals import OrdinalSet

_SPOOL_ROWS = 8192


class Repeats:
    """Tells the documents to send from those to hold back; the latter wait in a file until their vectors are there.

    Made anew, from the beginning of the corpus, by each process that feeds a run: what it decides follows from the
    corpus alone.
    """

    def __init__(
        self, spool: Path, columns: Sequence[str], done: OrdinalSet, known: Iterable[NDArray[np.uint64]] = ()
    ) -> None:
        """
        Args:
            spool: the file; what lies there is overwritten.
            columns: names of the documents' columns to hold back besides id and ordinal.
            done: ordinals of documents that have their outcome, and are held back no more.
            known: keys of texts whose vectors are at hand.
        """
        self._spool, self._columns, self._done = spool, ("id", "ordinal", *columns), done
        self._seen = IdSet()
        for keys in known:
            self._seen.add(keys)
        self._file: pa.NativeFile | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self.count = 0
        """Documents held back."""

    def first_time(self, documents: pa.RecordBatch) -> NDArray[np.bool_]:
        """bool [n]: which of `documents` (id, ordinal, text, metadata) to send. Takes each document of a run once.

        Raises:
            StorageError: the disk refused.
        """
        if not documents.num_rows:
            return np.ones(0, dtype=np.bool_)
        digests = hash_texts(documents.column("text"))
        fresh = self._seen.add(text_keys(digests))
        held = ~fresh & ~self._done.contains(documents.column("ordinal").to_numpy())
        if held.any():
            rows = documents.select(list(self._columns)).append_column("text_sha256", digests)
            self._hold(rows.filter(pa.array(held)))
        return fresh

    def _hold(self, rows: pa.RecordBatch) -> None:
        self.count += rows.num_rows
        self._waiting.append(rows)
        if sum(part.num_rows for part in self._waiting) >= _SPOOL_ROWS:
            self._write()

    def _write(self) -> None:
        try:
            if self._writer is None:
                self._spool.parent.mkdir(parents=True, exist_ok=True)
                self._file = pa.OSFile(str(self._spool), "wb")
                self._writer = pa.ipc.new_file(self._file, self._waiting[0].schema)
            self._writer.write_batch(pa.concat_batches(self._waiting))
        except OSError as error:
            raise self._refused(error) from error
        self._waiting = []

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write {self._spool}: {error.strerror or error}")

    def close(self) -> HeldBack:
        """What was held back. No more documents follow. Raises StorageError."""
        if self._waiting:
            self._write()
        self._seen = IdSet()
        if self._writer is not None and self._file is not None:
            try:
                self._writer.close()
                self._file.close()
            except OSError as error:
                raise self._refused(error) from error
        return HeldBack(self._spool if self.count else None)


class HeldBack:
    """Documents held back, in the order of their ordinals; their columns stay on disk, 17 bytes each in memory."""

    def __init__(self, spool: Path | None) -> None:
        self._batches: list[pa.RecordBatch] = []
        if spool is not None:
            with pa.ipc.open_file(pa.memory_map(str(spool))) as reader:
                self._batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._first_ordinals = np.array([batch.column("ordinal")[0].as_py() for batch in self._batches], dtype=np.int64)
        keys = [text_keys(batch.column("text_sha256")) for batch in self._batches]
        joined = np.concatenate(keys) if keys else np.empty(0, dtype=np.uint64)
        self._rows: NDArray[np.int64] = np.argsort(joined, kind="stable")
        self._keys = joined[self._rows]
        self.waiting: NDArray[np.bool_] = np.ones(len(joined), dtype=np.bool_)
        """bool [n]: which have neither a vector nor another outcome yet."""

    @property
    def schema(self) -> pa.Schema:
        """Columns: id, ordinal, those asked for, text_sha256."""
        return self._batches[0].schema

    def settle(self, ordinals: OrdinalSet) -> None:
        """Wait no more for documents of these ordinals."""
        for start, batch in zip(self._starts, self._batches, strict=False):
            done = ordinals.contains(batch.column("ordinal").to_numpy())
            self.waiting[start : start + batch.num_rows] &= ~done

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pairs of (row of `keys`, row held back and waiting) with equal keys: int64 [m] each."""
        first = np.searchsorted(self._keys, keys, side="left")
        counts = np.searchsorted(self._keys, keys, side="right") - first
        owners = np.repeat(np.arange(len(keys)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._rows[first[owners] + within]
        waiting = self.waiting[rows]
        return owners[waiting], rows[waiting]

    def at(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The rows, int64 [n], of ascending `ordinals` [n]; None where one of them is not held back or not waiting."""
        found: list[NDArray[np.int64]] = []
        first, end = np.searchsorted(self._first_ordinals, ordinals[[0, -1]], side="right")
        for start, batch in zip(
            self._starts[max(0, first - 1) : end], self._batches[max(0, first - 1) : end], strict=True
        ):
            own = batch.column("ordinal").to_numpy()
            asked = ordinals[np.searchsorted(ordinals, own[0]) : np.searchsorted(ordinals, own[-1], side="right")]
            places = np.searchsorted(own, asked)
            if len(asked) and not np.array_equal(own[places], asked):
                return None
            found.append(places + start)
        rows = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
        return rows if len(rows) == len(ordinals) and self.waiting[rows].all() else None

    def take(self, rows: NDArray[np.int64], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The documents at ascending `rows` [n]; `columns` None means all."""
        names = list(columns or self.schema.names)
        # Batch by batch: what is taken from a column of many chunks has all of it put together first.
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        parts = [
            self._batches[owner].select(names).take(pa.array(rows[owners == owner] - self._starts[owner]))
            for owner in np.unique(owners).tolist()
        ]
        return pa.concat_batches(parts)

    def ordinals_waiting(self) -> OrdinalSet:
        """The ordinals of those that wait."""
        parts = [
            batch.column("ordinal").to_numpy()[self.waiting[start : start + batch.num_rows]]
            for start, batch in zip(self._starts, self._batches, strict=False)
        ]
        values = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        breaks = np.flatnonzero(np.diff(values) != 1)
        firsts, lasts = np.concatenate((values[:1], values[breaks + 1])), np.concatenate((values[breaks], values[-1:]))
        return OrdinalSet(zip(firsts.tolist(), lasts.tolist(), strict=True))


class Vectors(Protocol):
    """Where vectors of known texts come from; `feed` asks it."""

    def begin(self) -> Repeats:
        """For one pass over the corpus."""

    def supply(self, held: HeldBack, stopping: Callable[[], bool]) -> Iterator[None]:
        """Give the documents held back the vectors of their texts, once every document sent has its outcome.

        Yields after each file of rows that is committed; `held.waiting` then tells what is left. Ends early where
        `stopping`. The caller moves the producer's position at each yield; what the server has lost by then is raised
        at the next step as LostCommitError.
        """


class LostCommitError(Exception):
    """The server lost rows it had taken."""
