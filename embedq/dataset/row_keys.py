"""What tells the rows of a dataset apart, in 64 bits: their id, and where texts were cut, the number of the chunk."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from embedq_producer.id_set import hash_ids
from numpy.typing import NDArray


def row_keys(rows: pa.RecordBatch, *, chunked: bool) -> NDArray[np.uint64]:
    """Evenly distributed hashes [n] of the keys of `rows`, whose columns are `id` and, if `chunked`, `chunk_index`."""
    keys = hash_ids(rows.column("id"))
    if not chunked:
        return keys
    numbers = rows.column("chunk_index").to_numpy().astype(np.uint64)
    mixed: NDArray[np.uint64] = (keys ^ (numbers * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    return mixed
