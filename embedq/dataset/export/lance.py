"""Lance: a dataset directory with all columns, in input order; LanceDB opens it as a table of its parent directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from embedq_schemas.errors import EmbedqError

from embedq.dataset.export.whole import whole
from embedq.dataset.extras import extra
from embedq.dataset.reader import DatasetReader


def export_lance(reader: DatasetReader, output: Path, *, replace: bool) -> None:
    """Write the directory `output`; raises UsageError without Lance, OutputError, StorageError."""
    with extra("lance"):
        import lance
    failed: list[EmbedqError] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from reader.batches(order="input")
        except EmbedqError as error:
            failed.append(error)
            raise

    with whole(output, replace=replace, directory=True) as folder:
        rows = pa.RecordBatchReader.from_batches(reader.schema, batches())
        try:
            lance.write_dataset(rows, str(folder), mode="create")
        except Exception:
            # Lance wraps what ended its source into an error of its own.
            if failed:
                raise failed[0] from None
            raise
