"""One vector for each document whose text was cut: the mean of its chunks' vectors, weighted by their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from embedq_schemas.chunks import CHUNK_COLUMNS
from embedq_schemas.errors import UsageError
from embedq_schemas.quantize import VectorType
from embedq_schemas.vector_batch import vector_field
from numpy.typing import NDArray

from embedq.dataset.reader import DatasetReader, Order

_OF_ONE_CHUNK = {*CHUNK_COLUMNS, "text", "text_sha256"} - {"chunk_count"}
_STORED_AS = (b"embedq.vector_type", b"embedq.ranges")
_LIGHT = ("id", "chunk_index", "chunk_count", "n_tokens", "truncated")


def pooled(reader: DatasetReader) -> PooledReader:
    """The dataset of chunks `reader` as one of documents; raises UsageError where its texts were not cut."""
    if not reader.chunked:
        raise UsageError(f"{reader.dataset} holds no chunks; its run was made without --on-long chunk")
    return PooledReader(reader.dataset, reader.spec, reader.files, reader.complete, reader.summary, reader)


@dataclass(frozen=True)
class PooledReader(DatasetReader):
    """Documents in input order. `ordinal` and metadata are those of a document's first chunk, `n_tokens` is the sum
    over its chunks, with what they repeat and their special tokens.

    Vectors are float32, and unit vectors where those of the chunks are. A document is left out while some of its chunks
    have no vector.
    """

    of: DatasetReader

    @cached_property
    def schema(self) -> pa.Schema:
        """`id, ordinal, vector, n_tokens, truncated`, metadata, `chunk_count`."""
        own = self.of.schema
        kept = [field for field in own if field.name not in _OF_ONE_CHUNK]
        kept[own.get_field_index("vector")] = vector_field(self.of.dimensions, VectorType.FLOAT32)
        metadata = {name: value for name, value in (own.metadata or {}).items() if name not in _STORED_AS}
        return pa.schema(kept, metadata)

    @property
    def chunked(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        """Documents that have a vector."""
        return self._counts[0]

    @property
    def left_out(self) -> int:
        """Documents some of whose chunks have none."""
        return self._counts[1]

    @cached_property
    def _counts(self) -> tuple[int, int]:
        whole = others = 0
        for sums in self._documents(_LIGHT, 1 << 16):
            found = int(sums.whole.sum())
            whole, others = whole + found, others + len(sums.whole) - found
        return whole, others

    def batches(
        self, columns: Sequence[str] | None = None, *, order: Order = "input", batch_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """As `DatasetReader.batches` does, always in input order."""
        names = self.select(columns).names
        for sums in self._documents(None, batch_rows):
            if sums.whole.any():
                yield self._rows(sums).filter(pa.array(sums.whole)).select(names)

    def _documents(self, columns: Sequence[str] | None, batch_rows: int | None) -> Iterator[_Sums]:
        beginnings, last = _Beginnings(), None
        for batch in self.of.batches(columns, order="input", batch_rows=batch_rows):
            begin = beginnings.rows(batch)
            found = _sums(self.of, batch, begin)
            if last is not None:
                found = last.followed_by(found, as_one=not len(begin) or begin[0] > 0)
            # More chunks of the last document may follow.
            if len(found.tokens) > 1:
                yield found.part(slice(0, -1))
            last = found.part(slice(-1, None))
        if last is not None:
            yield last

    def _rows(self, sums: _Sums) -> pa.RecordBatch:
        means = sums.vectors / np.maximum(sums.tokens, 1)[:, None]
        if self.facts.normalized:
            means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), np.finfo(np.float64).tiny)
        values = pa.array(means.astype(np.float32).reshape(-1))
        made = {
            "vector": pa.FixedSizeListArray.from_arrays(values, type=self.schema.field("vector").type),
            "n_tokens": pa.array(sums.tokens.astype(np.int32)),
            "truncated": pa.array(sums.truncated),
        }
        arrays = [made[name] if name in made else sums.documents.column(name) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


@dataclass(frozen=True)
class _Sums:
    """Over the chunks of k documents."""

    documents: pa.RecordBatch  # each one's first chunk
    vectors: NDArray[np.float64]  # [k, dimensions], each times its tokens
    tokens: NDArray[np.int64]  # [k]
    chunks: NDArray[np.int64]  # [k]
    truncated: NDArray[np.bool_]  # [k]

    @property
    def whole(self) -> NDArray[np.bool_]:
        """bool [k]: whose chunks are all there."""
        return np.asarray(self.chunks == self.documents.column("chunk_count").to_numpy())

    def part(self, rows: slice) -> _Sums:
        first, last, _ = rows.indices(len(self.tokens))
        return _Sums(
            self.documents.slice(first, last - first),
            self.vectors[rows],
            self.tokens[rows],
            self.chunks[rows],
            self.truncated[rows],
        )

    def followed_by(self, other: _Sums, *, as_one: bool) -> _Sums:
        """Both; `as_one`: the last document of this is the first of the other."""
        begin = np.arange(len(self.tokens) + len(other.tokens))
        if as_one:
            begin = np.delete(begin, len(self.tokens))
        documents = pa.concat_batches([self.documents, other.documents]).take(pa.array(begin))
        vectors, tokens, chunks = (
            np.add.reduceat(np.concatenate((getattr(self, name), getattr(other, name))), begin, axis=0)
            for name in ("vectors", "tokens", "chunks")
        )
        truncated = np.logical_or.reduceat(np.concatenate((self.truncated, other.truncated)), begin)
        return _Sums(documents, vectors, tokens, chunks, truncated)


def _sums(reader: DatasetReader, batch: pa.RecordBatch, begin: NDArray[np.int64]) -> _Sums:
    """Over stretches of rows; what lies before the first of `begin` is a document begun earlier."""
    begin = begin if len(begin) and begin[0] == 0 else np.concatenate(([0], begin))
    tokens = batch.column("n_tokens").to_numpy().astype(np.int64)
    light = "vector" not in batch.schema.names
    vectors = np.empty((len(tokens), 0)) if light else reader.as_float32(batch) * tokens[:, None].astype(np.float64)
    truncated = batch.column("truncated").to_numpy(zero_copy_only=False)
    return _Sums(
        batch.select([name for name in batch.schema.names if name != "vector"]).take(pa.array(begin)),
        np.add.reduceat(vectors, begin, axis=0),
        np.add.reduceat(tokens, begin),
        np.diff(np.append(begin, batch.num_rows)),
        np.logical_or.reduceat(truncated, begin),
    )


class _Beginnings:
    """Tells, batch after batch in input order, where a document's chunks begin."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Rows of `batch` (one or more) that are the first of their document."""
        index, ids = batch.column("chunk_index").to_numpy(), batch.column("id")
        new = np.ones(batch.num_rows, dtype=np.bool_)
        new[1:] = (index[1:] <= index[:-1]) | pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
        if self._last is not None:
            new[0] = ids[0].as_py() != self._last[0] or index[0] <= self._last[1]
        self._last = (ids[-1].as_py(), int(index[-1]))
        return np.flatnonzero(new)
