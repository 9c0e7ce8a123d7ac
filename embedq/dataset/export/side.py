"""What goes with bare vectors: a Parquet file whose row i describes vector i."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from embedq_schemas.vector_batch import VectorBatch

from embedq.dataset.reader import DatasetReader

IDS_NAME = "ids.parquet"


@contextmanager
def beside_ids(reader: DatasetReader, folder: Path) -> Iterator[Iterator[VectorBatch]]:
    """Iterate over the vectors in input order; their rows go to `folder/ids.parquet`."""
    schema = reader.schema.remove(reader.schema.get_field_index("vector"))
    with pq.ParquetWriter(folder / IDS_NAME, schema, compression="zstd") as writer:

        def vectors() -> Iterator[VectorBatch]:
            for batch in reader.batches(order="input"):
                writer.write_table(pa.Table.from_batches([batch]).select(schema.names))
                yield VectorBatch(batch)

        yield vectors()
