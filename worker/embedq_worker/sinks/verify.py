"""Whether a file is the Parquet file that was written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from embedq_schemas.errors import StorageError


def verify(path: Path, rows: int) -> None:
    """Read the footer of the file at `path`; raises StorageError unless it is Parquet with `rows` rows."""
    try:
        found = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} does not read back: {str(error)[:200]}") from None
    if found != rows:
        raise StorageError(f"{path} reads back with {found} rows, {rows} were written")


def verify_content(path: Path, rows: int) -> None:
    """Read the whole file, with its page checksums; raises StorageError unless everything is as it was written."""
    verify(path, rows)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} is damaged: {str(error)[:200]}") from None
