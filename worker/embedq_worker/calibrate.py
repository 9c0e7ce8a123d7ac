"""Ranges of int8 and uint8 vectors: found once for a run, from its first vectors, and the same in all its files.

The first embedder with enough rows lays them down with the dataset, which takes one file of that name; all others read
them there. They outlive the server and every process, and another run may be given them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from embedq_schemas.quantize import encode_ranges, ranges_of
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray

from embedq_worker.sinks.dataset import open_dataset

log = logging.getLogger(__name__)

CALIBRATION_ROWS = 1000
"""Vectors that give ranges which fit those that follow; fewer are enough where no more come."""
_FEW_ROWS = 100
_MOST_RUNS = 256


class Calibration:
    """The ranges of runs that write datasets, as far as this process knows them. For one thread."""

    def __init__(self, roots: Sequence[str | Path]) -> None:
        self._roots = roots
        self._known: OrderedDict[str, NDArray[np.float32]] = OrderedDict()

    def ranges(self, spec: RunSpec, batches: Sequence[VectorBatch], *, now: bool) -> NDArray[np.float32] | None:
        """The run's ranges, float32 [2, dimension]; None while they are not found, and where its type has none.

        Args:
            spec: a run with a dataset.
            batches: the float32 vectors that wait for them here.
            now: find them from these, however few.

        Raises:
            OutputError: the dataset belongs to another run or lies outside the roots, or its ranges do not read back.
            StorageError: the disk refused.
        """
        if not spec.encoding.vector_type.ranged:
            return None
        if spec.run in self._known:
            self._known.move_to_end(spec.run)
            return self._known[spec.run]
        assert isinstance(spec.sink, ParquetSink)
        dataset = open_dataset(spec.sink.path, self._roots)
        found = dataset.ranges()
        rows = sum(batch.num_documents for batch in batches)
        if found is None and (spec.encoding.vector_ranges or (rows and (now or rows >= CALIBRATION_ROWS))):
            proposed = spec.encoding.ranges
            if proposed is None:
                parts = [ranges_of(batch.vectors) for batch in batches if batch.num_documents]
                proposed = ranges_of(np.concatenate(parts))
                if rows < _FEW_ROWS:
                    log.warning("the ranges of run %s are those of its first %d vectors alone", spec.run, rows)
            dataset.prepare(spec)
            found = dataset.claim_ranges(proposed)
        if found is not None:
            self._known[spec.run] = found
            if len(self._known) > _MOST_RUNS:
                self._known.popitem(last=False)
        return found


def vector_metadata(spec: RunSpec, ranges: NDArray[np.float32] | None) -> Mapping[str, str]:
    """What a Parquet file says of how its vectors are stored."""
    facts = {"embedq.vector_type": spec.encoding.vector_type.value}
    return facts if ranges is None else facts | {"embedq.ranges": encode_ranges(ranges)}
