"""FAISS: `index.faiss`, an exact IndexFlatIP, and `ids.parquet`, whose row i describes the index's vector i.

FAISS holds a whole index in memory to write it. A flat index's file is a header, a count and the vectors, so here the
header of the installed FAISS is followed by the vectors as they come; a small index is written both ways first, and
where they differ the index is built in memory after all.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from embedq.dataset.export.side import beside_ids
from embedq.dataset.export.whole import whole
from embedq.dataset.extras import extra
from embedq.dataset.reader import DatasetReader

_COUNT_AT = 8
"""Where the header holds the number of vectors, as int64: behind four letters and the int32 dimension."""


def export_faiss(reader: DatasetReader, output: Path, *, replace: bool) -> None:
    """Write the directory `output`; raises UsageError without FAISS, OutputError, StorageError."""
    with extra("faiss"):
        import faiss
    with whole(output, replace=replace, directory=True) as folder, beside_ids(reader, folder) as blocks:
        index = faiss.IndexFlatIP(reader.dimensions)
        if _streams(faiss, reader.dimensions):
            with (folder / "index.faiss").open("wb") as file:
                _write(file, _header(faiss, index), blocks)
            return
        for vectors in blocks:
            index.add(vectors)
        faiss.write_index(index, str(folder / "index.faiss"))


def _header(faiss: Any, empty: Any) -> bytes:
    """An empty index as FAISS writes it, without the count of its values, which comes last."""
    return bytes(faiss.serialize_index(empty))[:-8]


def _write(file: BinaryIO, header: bytes, blocks: Iterable[NDArray[np.float32]]) -> None:
    file.write(header + bytes(8))
    rows = values = 0
    for vectors in blocks:
        file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
        rows, values = rows + len(vectors), values + vectors.size
    file.seek(_COUNT_AT)
    file.write(struct.pack("<q", rows))
    file.seek(len(header))
    file.write(struct.pack("<Q", values))


def _streams(faiss: Any, dimensions: int) -> bool:
    """Whether a small index comes out the same both ways."""
    sample = np.arange(3 * dimensions, dtype=np.float32).reshape(3, dimensions)
    index = faiss.IndexFlatIP(dimensions)
    ours = io.BytesIO()
    _write(ours, _header(faiss, index), [sample])
    index.add(sample)
    return ours.getvalue() == bytes(faiss.serialize_index(index))
