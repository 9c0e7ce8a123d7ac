"""Lance: a dataset directory with all columns, in input order; LanceDB opens it as a table of its parent directory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from embedq.dataset.export.whole import whole
from embedq.dataset.extras import extra
from embedq.dataset.reader import DatasetReader


def export_lance(reader: DatasetReader, output: Path, *, replace: bool) -> None:
    """Write the directory `output`; raises UsageError without Lance, OutputError, StorageError."""
    with extra("lance"):
        import lance
    with whole(output, replace=replace, directory=True) as folder:
        batches = pa.RecordBatchReader.from_batches(reader.schema, reader.batches(order="input"))
        lance.write_dataset(batches, str(folder), mode="create")
