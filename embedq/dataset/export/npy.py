"""NumPy: `vectors.npy` (float32 [n, dimensions], for memory mapping) and `ids.parquet`, whose row i describes row i."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from embedq.dataset.export.side import beside_ids
from embedq.dataset.export.whole import whole
from embedq.dataset.reader import DatasetReader


def export_npy(reader: DatasetReader, output: Path, *, replace: bool) -> None:
    """Write the directory `output`; raises OutputError, StorageError."""
    with (
        whole(output, replace=replace, directory=True) as folder,
        beside_ids(reader, folder) as blocks,
        (folder / "vectors.npy").open("wb") as file,
    ):
        _write_header(file, reader.rows, reader.dimensions)
        rows = 0
        for vectors in blocks:
            file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
            rows += len(vectors)
        # Doubled rows come once. A header has room for any number of rows.
        file.seek(0)
        _write_header(file, rows, reader.dimensions)


def _write_header(file: BinaryIO, rows: int, dimensions: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dimensions)}
    np.lib.format.write_array_header_1_0(file, header)
