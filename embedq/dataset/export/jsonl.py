"""JSON lines: one object per row with all columns, in input order.

A vector's numbers are those stored, and read back to the same float32 or float16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray

from embedq.dataset.export.whole import whole
from embedq.dataset.reader import DatasetReader


def export_jsonl(reader: DatasetReader, output: Path, *, replace: bool) -> None:
    """Write the file `output`; raises OutputError, StorageError."""
    with whole(output, replace=replace, directory=False) as path, path.open("w", encoding="utf-8") as file:
        for batch in reader.batches(order="input", batch_rows=min(reader.batch_rows, 4096)):
            file.writelines(json_lines(batch))


def json_lines(batch: pa.RecordBatch) -> Iterator[str]:
    """A JSON object and a line end for each row; numbers of vectors with the fewest digits that read back to them."""
    vectors = _joined(VectorBatch(batch).vectors).to_pylist()
    for row, numbers in zip(batch.drop_columns(["vector"]).to_pylist(), vectors, strict=True):
        yield f'{json.dumps(row, ensure_ascii=False, default=_hex)[:-1]}, "vector": [{numbers}]}}\n'


def _joined(vectors: NDArray[Any]) -> pa.Array:
    """Each vector's numbers as text: Arrow writes the fewest digits that read back to the same float32."""
    if vectors.dtype == np.float16:
        vectors = vectors.astype(np.float32)
    count, width = vectors.shape
    numbers = pa.array(vectors.reshape(-1)).cast(pa.string())
    offsets = np.arange(count + 1, dtype=np.int32) * width
    return pc.binary_join(pa.ListArray.from_arrays(offsets, numbers), ", ")


def _hex(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
