"""Exact search over a dataset: every vector is compared, blockwise, in constant memory.

Questions stay float32, whatever documents are stored as: `asymmetric` comparison, which keeps more of the order than
quantised questions would. A document's vector is what its stored form stands for: see `dequantize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from embedq_schemas.manifest import PublishedFile
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from embedq.dataset.reader import DatasetReader

_SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Hit:
    """One document found. `row` holds its columns without the vector; `score` is the cosine similarity.

    Of compact vectors it is an estimate: the dot product of the question with what the document's stored vector stands
    for, which for int8 and uint8 is close to the cosine, and for binary and ubinary keeps the order only.
    """

    score: float
    row: dict[str, Any]


def nearest(reader: DatasetReader, queries: NDArray[np.float32], k: int, *, threads: int) -> list[list[Hit]]:
    """For each query the `k` rows with the largest cosine similarity, best first; of equal ones the earlier row.

    Args:
        reader: the dataset.
        queries: float32 [n, dimensions], unit vectors.
        k: rows per query.
        threads: CPU threads, each of which holds one row group.

    Raises:
        OutputError: a file of the dataset is gone or damaged.
    """
    best = [_Best(k) for _ in range(len(queries))]
    # One row group a thread: the products of one are too small to be shared.
    with threadpool_limits(limits=1), ThreadPoolExecutor(threads) as pool:
        for group in pool.map(lambda place: _best_of_group(reader, place, queries, k), _groups(reader)):
            for found, other in zip(best, group, strict=True):
                found.offer(other.scores, other.positions)
    rows = _fetch(reader, np.unique(np.concatenate([found.positions for found in best])))
    return [
        [Hit(float(score), rows[int(at)]) for score, at in zip(found.scores, found.positions, strict=True)]
        for found in best
    ]


class _Best:
    """The best so far of one query: scores, and the positions of their rows in the dataset's file order."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.scores: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self.positions: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def offer(self, scores: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        """Take in scores [n] of rows behind all that came before, equal ones by position. The earlier wins a tie."""
        worst = self.scores[-1] if len(self.scores) == self._k else -np.inf
        candidates = np.flatnonzero(scores > worst)
        if not len(candidates):
            return
        together = np.concatenate((self.scores, scores[candidates]))
        order = np.argsort(-together, kind="stable")[: self._k]
        self.scores = together[order]
        self.positions = np.concatenate((self.positions, positions[candidates]))[order]


@dataclass(frozen=True)
class _Group:
    """One row group: its file, its number there, and the position of its first row in the dataset's file order."""

    file: PublishedFile
    number: int
    first: int
    rows: int


def _groups(reader: DatasetReader) -> Iterator[_Group]:
    first = 0
    for file in reader.files:
        with reader.opened(file) as opened:
            sizes = [opened.metadata.row_group(number).num_rows for number in range(opened.num_row_groups)]
        for number, rows in enumerate(sizes):
            yield _Group(file, number, first, rows)
            first += rows


def _best_of_group(reader: DatasetReader, group: _Group, queries: NDArray[np.float32], k: int) -> list[_Best]:
    best = [_Best(k) for _ in range(len(queries))]
    rows = max(1, min(reader.batch_rows, _SCORES_AT_ONCE // max(1, len(queries))))
    first = group.first
    for batch in reader.file_batches(group.file, reader.select(["vector"]), rows, groups=[group.number]):
        vectors = reader.as_float32(batch)
        scores = vectors @ queries.T
        if not reader.facts.normalized:
            scores /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        positions = np.arange(first, first + len(vectors))
        for query, found in enumerate(best):
            found.offer(scores[:, query], positions)
        first += len(vectors)
    return best


def _fetch(reader: DatasetReader, positions: NDArray[np.int64]) -> dict[int, dict[str, Any]]:
    """The rows at `positions` (ascending, in file order) without their vectors, by position."""
    schema = reader.select([name for name in reader.schema.names if name not in ("vector", "text_sha256")])
    rows: dict[int, dict[str, Any]] = {}
    for group in _groups(reader):
        wanted = positions[(positions >= group.first) & (positions < group.first + group.rows)]
        if len(wanted):
            batches = reader.file_batches(group.file, schema, group.rows, groups=[group.number])
            found = pa.Table.from_batches(batches, schema).take(wanted - group.first).to_pylist()
            rows.update(zip(wanted.tolist(), found, strict=True))
    return rows
