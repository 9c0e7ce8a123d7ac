"""Lance: a dataset directory with all columns, in input order; LanceDB opens it as a table of its parent directory.

It searches lists, so int8 and uint8 vectors become float32 ones, and the bytes of binary and ubinary ones lists of
uint8, as its Hamming distance takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from embedq_schemas.errors import EmbedqError
from embedq_schemas.quantize import bits_of
from embedq_schemas.vector_batch import VectorBatch

from embedq.dataset.export.whole import whole
from embedq.dataset.extras import extra
from embedq.dataset.reader import DatasetReader


def export_lance(reader: DatasetReader, output: Path, *, replace: bool) -> None:
    """Write the directory `output`; raises UsageError without Lance, OutputError, StorageError."""
    with extra("lance"):
        import lance
    failed: list[EmbedqError] = []
    schema, convert = _searchable(reader)

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from map(convert, reader.batches(order="input"))
        except EmbedqError as error:
            failed.append(error)
            raise

    with whole(output, replace=replace, directory=True) as folder:
        rows = pa.RecordBatchReader.from_batches(schema, batches())
        try:
            lance.write_dataset(rows, str(folder), mode="create")
        except Exception:
            # Lance wraps what ended its source into an error of its own.
            if failed:
                raise failed[0] from None
            raise


def _searchable(reader: DatasetReader) -> tuple[pa.Schema, Callable[[pa.RecordBatch], pa.RecordBatch]]:
    """The schema to write, and what makes the dataset's batches so."""
    kind, width = reader.vector_type, reader.vector_type.width(reader.dimensions)
    if kind.floating:
        return reader.schema, lambda batch: batch
    lists = pa.list_(pa.float32() if kind.ranged else pa.uint8(), width)
    at = reader.schema.get_field_index("vector")
    schema = reader.schema.set(at, pa.field("vector", lists))

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        values = reader.as_float32(batch) if kind.ranged else bits_of(VectorBatch(batch).vectors, kind)
        column = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), type=lists)
        return batch.set_column(at, schema.field(at), column).cast(schema)

    return schema, convert
