"""An engine without a model: fixed unit vectors, for measuring the pipeline around it and testing protocols."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine.base import PackedBatch, check_batch, check_dimensions
from embedq_worker.engine.settings import EngineSettings


class NullEngine:
    """Vectors depend on a text's tokens alone, so that a lost, doubled or swapped row shows."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        self.dimension = checkpoint.dimension
        self.max_length = checkpoint.max_length
        self.max_batch_tokens = 16_384 if settings.max_batch_tokens == "auto" else settings.max_batch_tokens
        self.device = "cpu"
        self.description: Mapping[str, str] = {"engine": "null", "device": "cpu"}
        self._vocab_size = checkpoint.vocab_size
        self._table = np.random.default_rng(0).standard_normal((256, self.dimension), dtype=np.float32)
        self._second = 0.5 * np.roll(self._table, 1, axis=1)
        self._steps = 0

    @property
    def steps(self) -> int:
        return self._steps

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        check_batch(batch, vocab_size=self._vocab_size, max_length=self.max_length)
        width = check_dimensions(dimensions, self.dimension)
        self._steps += 1
        if len(batch) == 0:
            return np.empty((0, width), np.float32)
        starts = batch.cu_seqlens[:-1]
        sums = np.add.reduceat(batch.input_ids, starts, dtype=np.uint64)
        # Length and first token keep texts apart whose sums agree; the odd factor spreads neighbours over the table.
        sums += batch.lengths.astype(np.uint64) * np.uint64(0x10001) + batch.input_ids[starts]
        sums *= np.uint64(0x9E3779B97F4A7C15)
        sums ^= sums >> np.uint64(29)
        rows = self._table[(sums & np.uint64(255)).astype(np.intp), :width]
        rows += self._second[((sums >> np.uint64(8)) & np.uint64(255)).astype(np.intp), :width]
        if normalize:
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows

    def close(self) -> None:
        self._table = self._table[:0]
