"""Embedding one token batch: the forward pass, the checks on what it returns, and whose fault a failure is."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from embedq_broker import metrics
from embedq_broker.consume import Entry, Share
from embedq_broker.faults import fault_point
from embedq_schemas.chunks import chunk_at
from embedq_schemas.dead_letter import DeadLetter, Stage, clip
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import DocumentErrorCode, EngineError
from embedq_schemas.quantize import VectorType
from embedq_schemas.token_batch import TokenBatch
from embedq_schemas.vector_batch import VectorBatch, make_vector_batch
from numpy.typing import NDArray

from embedq_worker.engine.base import Engine, PackedBatch, launch

log = logging.getLogger(__name__)

NORM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class RunPart:
    """One run's documents of a token batch, with their outcomes."""

    run: str
    vectors: VectorBatch | None
    tokens: int  # of the documents that have a vector
    dead: tuple[DeadLetter, ...]
    skipped: int = 0


@dataclass(frozen=True)
class Embedded:
    """A token batch's outcome: each of its documents is in exactly one part, once."""

    entry: Entry
    parts: tuple[RunPart, ...]

    @property
    def vector_bytes(self) -> int:
        batches = (part.vectors for part in self.parts if part.vectors)
        return sum(batch.num_documents * batch.vector_type.row_bytes(batch.dimension) for batch in batches)

    def quantized(self, kind: VectorType, ranges: NDArray[np.float32] | None) -> Embedded:
        """With all vectors as `kind`; see `VectorBatch.quantized`."""
        parts = (
            part if part.vectors is None else replace(part, vectors=part.vectors.quantized(kind, ranges))
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))


class Embedding:
    """A token batch under way.

    A document that fails alone while a trivial one succeeds is guilty and becomes a dead letter; where the trivial one
    fails too, the device is, and EngineError is raised so that the process ends and the batch is delivered again.
    """

    def __init__(
        self, engine: Engine, entry: Entry, batch: TokenBatch, encoding: EncodingOptions, normalize: bool
    ) -> None:
        fault_point("embed.forward", batch.table.column("id"))
        self._began = time.perf_counter()
        self._engine, self._entry, self._batch = engine, entry, batch
        self._dimensions, self._normalize = encoding.dimensions, normalize
        # A unit vector fits into every type.
        half = encoding.vector_type is VectorType.FLOAT16 and not normalize
        self._largest = float(np.finfo(np.float16).max) if half else np.inf
        self._packed = PackedBatch(batch.input_ids, batch.cu_seqlens)
        self._flight = launch(engine, self._packed, dimensions=encoding.dimensions, normalize=normalize)

    @property
    def background(self) -> bool:
        """Whether another batch may be launched before this one's outcome is known."""
        return self._flight.background

    def most_done(self) -> None:
        """Return when the next batch should be launched."""
        self._flight.most_done()

    def outcome(self) -> Embedded:
        """Every row checked. Raises EngineError where the device is broken."""
        vectors, reasons = self._checked()
        metrics.stage_duration.labels("embed").observe(time.perf_counter() - self._began)
        fault_point("embed.forwarded", self._batch.table.column("id"))
        return Embedded(self._entry, split_by_run(self._entry.shares, self._batch, vectors, reasons))

    def _checked(self) -> tuple[NDArray[np.float32], dict[int, tuple[DocumentErrorCode, str]]]:
        engine, packed, normalize = self._engine, self._packed, self._normalize
        dimension = self._dimensions or engine.dimension
        try:
            vectors = self._flight.result()
            _check_shape(vectors, len(packed), dimension)
            suspects = _bad_rows(vectors, normalize, self._largest)
        except EngineError as error:
            log.warning("the forward pass failed on %d documents, trying each alone: %s", len(packed), error)
            vectors = np.zeros((len(packed), dimension), dtype=np.float32)
            suspects = np.arange(len(packed))
        if len(suspects) and not vectors.flags.writeable:
            vectors = vectors.copy()
        reasons: dict[int, tuple[DocumentErrorCode, str]] = {}
        for row in suspects.tolist():
            reason = _alone(engine, packed, row, vectors, self._dimensions, normalize, self._largest)
            if reason is not None:
                reasons[row] = reason
        if reasons:
            _probe(engine, packed)
        return vectors, reasons


def split_by_run(
    shares: Sequence[Share],
    batch: TokenBatch,
    vectors: NDArray[np.float32],
    reasons: Mapping[int, tuple[DocumentErrorCode, str]],
) -> tuple[RunPart, ...]:
    """Give each run its rows of `vectors` (float32 [n, dimension]); rows named in `reasons` become dead letters."""
    lengths = np.diff(batch.cu_seqlens)
    parts = []
    start = 0
    for share in shares:
        rows = np.arange(start, start + share.documents)
        bad = [int(row) for row in rows if int(row) in reasons] if reasons else []
        good = np.setdiff1d(rows, bad) if bad else rows
        result = None
        if len(good) == batch.num_documents:
            result = make_vector_batch(batch, vectors)
        elif len(good):
            documents = batch.slice(start, share.documents) if not bad else batch.select(good)
            result = make_vector_batch(documents, np.ascontiguousarray(vectors[good]))
        dead = tuple(dead_letter(batch, row, *reasons[row]) for row in bad)
        parts.append(RunPart(share.run, result, int(lengths[good].sum()), dead))
        start += share.documents
    return tuple(parts)


def dead_letter(batch: TokenBatch, row: int, code: DocumentErrorCode, message: str) -> DeadLetter:
    """The dead letter of document `row`."""
    return DeadLetter(
        id=batch.table.column("id")[row].as_py(),
        ordinal=batch.table.column("ordinal")[row].as_py(),
        chunk=chunk_at(batch.table, row),
        stage=Stage.EMBED,
        code=code,
        message=clip(message),
    )


def _alone(
    engine: Engine,
    packed: PackedBatch,
    row: int,
    vectors: NDArray[np.float32],
    dimensions: int | None,
    normalize: bool,
    largest: float,
) -> tuple[DocumentErrorCode, str] | None:
    """Encode document `row` by itself into `vectors`; the reason if that fails."""
    start, end = int(packed.cu_seqlens[row]), int(packed.cu_seqlens[row + 1])
    single = PackedBatch(packed.input_ids[start:end], np.array([0, end - start], dtype=np.int32))
    try:
        vector = engine.encode(single, dimensions=dimensions, normalize=normalize)
        _check_shape(vector, 1, vectors.shape[1])
    except EngineError as error:
        return DocumentErrorCode.ENGINE_FAILED, str(error)
    if len(_bad_rows(vector, normalize, largest)):
        reason = "the vector holds NaN or infinity, or cannot be normalised"
        return DocumentErrorCode.NOT_FINITE, f"{reason}, or is beyond float16" if np.isfinite(largest) else reason
    vectors[row] = vector[0]
    return None


def _probe(engine: Engine, packed: PackedBatch) -> None:
    """Raise EngineError if the device fails on a text of one token, the last one of a real document, too."""
    last = int(packed.cu_seqlens[1]) - 1
    single = PackedBatch(packed.input_ids[last : last + 1], np.array([0, 1], dtype=np.int32))
    # Not with the run's dimensions: those that the model cannot give are no fault of the device.
    vector = engine.encode(single)
    _check_shape(vector, 1, engine.dimension)
    if len(_bad_rows(vector, normalize=True)):
        raise EngineError("the device returns no unit vector even for a text of one token")


def _check_shape(vectors: NDArray[np.float32], n: int, dimension: int) -> None:
    if vectors.dtype != np.float32 or vectors.shape != (n, dimension):
        raise EngineError(f"the engine returned {vectors.dtype} {vectors.shape}, expected float32 {(n, dimension)}")


def _bad_rows(vectors: NDArray[np.float32], normalize: bool, largest: float = np.inf) -> NDArray[np.int64]:
    """Rows that are not finite, hold more than `largest`, or are not of norm 1 within the tolerance if they should."""
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    bad = ~np.isfinite(squares)
    if normalize:
        bad |= np.abs(np.sqrt(squares) - 1.0) > NORM_TOLERANCE
    if np.isfinite(largest):
        bad |= np.abs(vectors).max(axis=1) > largest
    return np.flatnonzero(bad)
