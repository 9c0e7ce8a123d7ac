"""Exact search over a dataset: every vector is compared, blockwise, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from embedq.dataset.reader import DatasetReader

_SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Hit:
    """One document found. `row` holds its columns without the vector; `score` is the cosine similarity."""

    score: float
    row: dict[str, Any]


def nearest(reader: DatasetReader, queries: NDArray[np.float32], k: int, *, threads: int) -> list[list[Hit]]:
    """For each query the `k` rows with the largest cosine similarity, best first; of equal ones the earlier row.

    Args:
        reader: the dataset.
        queries: float32 [n, dimensions], unit vectors.
        k: rows per query.
        threads: CPU threads of the products.

    Raises:
        OutputError: a file of the dataset is gone or damaged.
    """
    best = [_Best(k) for _ in range(len(queries))]
    with threadpool_limits(limits=threads):
        for first, scores in _scored(reader, queries):
            for query, found in enumerate(best):
                found.offer(scores[:, query], first)
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

    def offer(self, scores: NDArray[np.float32], first: int) -> None:
        """Take in the scores [n] of the rows at `first` and behind it. What was there before wins a tie."""
        worst = self.scores[-1] if len(self.scores) == self._k else -np.inf
        candidates = np.flatnonzero(scores > worst)
        if not len(candidates):
            return
        together = np.concatenate((self.scores, scores[candidates]))
        order = np.argsort(-together, kind="stable")[: self._k]
        self.scores = together[order]
        self.positions = np.concatenate((self.positions, candidates + first))[order]


def _scored(reader: DatasetReader, queries: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Position of a block's first row, and its scores [rows, queries]."""
    rows = max(1, min(reader.batch_rows, _SCORES_AT_ONCE // max(1, len(queries))))
    transposed = np.ascontiguousarray(queries.T)
    first = 0
    for batch in reader.batches(["vector"], batch_rows=rows):
        vectors = VectorBatch(batch).vectors
        scores = vectors @ transposed
        if not reader.facts.normalized:
            scores /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        yield first, scores
        first += len(scores)


def _fetch(reader: DatasetReader, positions: NDArray[np.int64]) -> dict[int, dict[str, Any]]:
    """The rows at `positions` (ascending, in file order) without their vectors, by position."""
    columns = [name for name in reader.schema.names if name not in ("vector", "text_sha256")]
    rows: dict[int, dict[str, Any]] = {}
    start = 0
    for file in reader.files:
        inside = positions[(positions >= start) & (positions < start + file.rows)]
        if len(inside):
            with reader.opened(file) as opened:
                group_start = start
                for group in range(opened.num_row_groups):
                    group_rows = opened.metadata.row_group(group).num_rows
                    wanted = inside[(inside >= group_start) & (inside < group_start + group_rows)]
                    if len(wanted):
                        table = opened.read_row_group(group, columns=columns).select(columns)
                        found = table.take(wanted - group_start).to_pylist()
                        rows.update(zip(wanted.tolist(), found, strict=True))
                    group_start += group_rows
        start += file.rows
    return rows
