"""NumPy: `vectors.npy`, as the dataset stores them, for memory mapping, and `ids.parquet`, whose row i describes row i.

int8 and uint8 vectors have their `ranges.npy` beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

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
        kind = reader.vector_type.dtype.newbyteorder("<")
        width = reader.vector_type.width(reader.dimensions)
        _write_header(file, kind, reader.rows, width)
        rows = 0
        for block in blocks:
            file.write(np.ascontiguousarray(block.vectors, dtype=kind).data)
            rows += block.num_documents
        # Doubled rows come once. A header has room for any number of rows.
        file.seek(0)
        _write_header(file, kind, rows, width)
        if reader.ranges is not None:
            np.save(folder / "ranges.npy", reader.ranges)


def _write_header(file: BinaryIO, kind: np.dtype[Any], rows: int, width: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, header)
