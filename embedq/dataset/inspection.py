"""What a dataset holds and whether it is sound (`embedq inspect`): one pass over its files, in bounded memory."""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from embedq_schemas.run import RunSpec
from embedq_schemas.text_hash import text_keys
from embedq_worker.embed import NORM_TOLERANCE
from embedq_worker.sinks.errors import read_errors
from numpy.typing import NDArray

from embedq.dataset.reader import DatasetReader, VectorFacts
from embedq.dataset.repeats import RepeatedKeys
from embedq.dataset.row_keys import row_keys

_COLUMNS = ("vector", "n_tokens", "truncated", "text_sha256")


@dataclass(frozen=True)
class Norms:
    """L2 norms of float32 and float16 vectors, which others do not keep.

    `not_unit`: rows whose norm is not 1 within 1e-3; `not_finite`: with NaN or infinity.
    """

    smallest: float
    mean: float
    largest: float
    not_unit: int
    not_finite: int


@dataclass(frozen=True)
class Tokens:
    """Tokens of the whole texts, before truncation. `histogram`: (first, last, documents) of ranges that double."""

    median: int
    p95: int
    p99: int
    largest: int
    total: int
    histogram: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class DatasetInspection:
    """`repeated_ids` and `repeated_texts` count rows after the first of each; texts are compared by their SHA-256."""

    path: str
    spec: RunSpec
    complete: bool
    rows: int
    files: int
    size_bytes: int
    columns: dict[str, str]
    facts: VectorFacts | None
    #: Bytes of a stored vector.
    vector_bytes: int
    #: The smallest and the largest value that int8 and uint8 vectors can hold, over all dimensions.
    ranges: tuple[float, float] | None
    norms: Norms | None
    tokens: Tokens | None
    truncated: int
    repeated_ids: int
    repeated_texts: int
    errors: dict[str, int]
    #: Part files that lie in the directory and are in no manifest: left by a process that was killed.
    strangers: int
    summary: dict[str, Any]


def inspect_dataset(reader: DatasetReader) -> DatasetInspection:
    """Read every row once; raises OutputError where a file does not read back."""
    lengths, norms, truncated = _Lengths(), _NormsSoFar(), 0
    repeated_ids = repeated_texts = 0
    if reader.files:
        with RepeatedKeys() as ids, RepeatedKeys() as texts:
            for batch in reader.batches([*reader.key, *_COLUMNS]):
                ids.add(row_keys(batch, chunked=reader.chunked))
                texts.add(text_keys(batch.column("text_sha256")))
                if reader.vector_type.floating:
                    norms.add(reader.as_float32(batch))
                lengths.add(batch.column("n_tokens").to_numpy())
                truncated += batch.column("truncated").true_count
            repeated_ids, repeated_texts = ids.find()[0], texts.find()[0]
    listed = {file.name for file in reader.files}
    return DatasetInspection(
        path=str(reader.dataset),
        spec=reader.spec,
        complete=reader.complete,
        rows=reader.rows,
        files=len(reader.files),
        size_bytes=reader.size_bytes,
        columns={field.name: str(field.type) for field in reader.schema} if reader.files else {},
        facts=reader.facts if reader.files else None,
        vector_bytes=reader.row_bytes if reader.files else 0,
        ranges=_extremes(reader) if reader.files else None,
        norms=norms.result(reader.rows) if reader.files and reader.vector_type.floating else None,
        tokens=lengths.result() if reader.files else None,
        truncated=truncated,
        repeated_ids=repeated_ids,
        repeated_texts=repeated_texts,
        errors=dict(Counter(str(letter.code) for letter in read_errors(reader.dataset)).most_common()),
        strangers=sum(name not in listed for name in fnmatch.filter(reader.dataset.store.sizes(), "part-*.parquet")),
        summary=reader.summary,
    )


def _extremes(reader: DatasetReader) -> tuple[float, float] | None:
    ranges = reader.ranges
    return None if ranges is None else (float(ranges[0].min()), float(ranges[1].max()))


class _NormsSoFar:
    def __init__(self) -> None:
        self._smallest, self._largest, self._sum = np.inf, 0.0, 0.0
        self._not_unit = self._not_finite = 0

    def add(self, vectors: NDArray[np.float32]) -> None:
        norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
        finite = norms[np.isfinite(norms)]
        self._not_finite += len(norms) - len(finite)
        if len(finite):
            self._smallest = min(self._smallest, float(finite.min()))
            self._largest = max(self._largest, float(finite.max()))
            self._sum += float(finite.sum())
            self._not_unit += int((np.abs(finite - 1) > NORM_TOLERANCE).sum())

    def result(self, rows: int) -> Norms:
        finite = rows - self._not_finite
        mean = self._sum / finite if finite else float("nan")
        return Norms(self._smallest, mean, self._largest, self._not_unit, self._not_finite)


class _Lengths:
    """Exact counts by length; texts are at most some hundred thousand tokens long."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    def add(self, lengths: NDArray[np.int32]) -> None:
        counts = np.bincount(lengths, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def result(self) -> Tokens:
        counts = self._counts
        upto = np.cumsum(counts)

        def at(share: float) -> int:
            return int(np.searchsorted(upto, share * upto[-1], side="left"))

        largest = len(counts) - 1
        edges = [0, *(1 << power for power in range(largest.bit_length() + 1))]
        ranges = pairwise(edges)
        histogram = [(first, min(end - 1, largest), int(counts[first:end].sum())) for first, end in ranges]
        return Tokens(
            median=at(0.5),
            p95=at(0.95),
            p99=at(0.99),
            largest=largest,
            total=int((counts * np.arange(len(counts))).sum()),
            histogram=tuple(row for row in histogram if row[2]),
        )
