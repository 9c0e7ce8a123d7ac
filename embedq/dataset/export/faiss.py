"""FAISS: `index.faiss`, and `ids.parquet`, whose row i describes the index's vector i.

The index is exact: IndexFlatIP, or IndexBinaryFlat for binary and ubinary vectors. float16, int8 and uint8 vectors,
which FAISS has no exact index for, become float32.

FAISS holds a whole index in memory to write it. A flat index's file is a header, a count and the vectors, so here the
header of the installed FAISS is followed by the vectors as they come; a small index is written both ways first, and
where they differ the index is built in memory after all.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from embedq_schemas.quantize import bits_of
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray

from embedq.dataset.export.side import beside_ids
from embedq.dataset.export.whole import whole
from embedq.dataset.extras import extra
from embedq.dataset.reader import DatasetReader


@dataclass(frozen=True)
class _Flat:
    """A kind of flat index."""

    make: Callable[[], Any]
    serialize: Callable[[Any], Any]
    write: Callable[[Any, str], None]
    #: Of the vectors it takes: a row has `width` values.
    dtype: str
    width: int
    #: Where the header holds the number of vectors, as int64: behind four letters and int32 sizes.
    count_at: int

    @property
    def header(self) -> bytes:
        """An empty index as FAISS writes it, without the count of its values, which comes last."""
        return bytes(self.serialize(self.make()))[:-8]


def export_faiss(reader: DatasetReader, output: Path, *, replace: bool) -> None:
    """Write the directory `output`; raises UsageError without FAISS, OutputError, StorageError."""
    with extra("faiss"):
        import faiss
    packed = reader.vector_type.packed
    flat = _binary(faiss, reader.dimensions) if packed else _inner_product(faiss, reader.dimensions)

    def values(block: VectorBatch) -> NDArray[Any]:
        stored = bits_of(block.vectors, reader.vector_type) if packed else reader.as_float32(block)
        return np.ascontiguousarray(stored, flat.dtype)

    with whole(output, replace=replace, directory=True) as folder, beside_ids(reader, folder) as blocks:
        if _streams(flat):
            with (folder / "index.faiss").open("wb") as file:
                _write(file, flat, map(values, blocks))
            return
        index = flat.make()
        for block in blocks:
            index.add(values(block))
        flat.write(index, str(folder / "index.faiss"))


def _inner_product(faiss: Any, dimensions: int) -> _Flat:
    return _Flat(
        lambda: faiss.IndexFlatIP(dimensions), faiss.serialize_index, faiss.write_index, "<f4", dimensions, count_at=8
    )


def _binary(faiss: Any, dimensions: int) -> _Flat:
    return _Flat(
        lambda: faiss.IndexBinaryFlat(dimensions),
        faiss.serialize_index_binary,
        faiss.write_index_binary,
        "u1",
        dimensions // 8,
        count_at=12,
    )


def _write(file: BinaryIO, flat: _Flat, blocks: Iterable[NDArray[Any]]) -> None:
    header = flat.header
    file.write(header + bytes(8))
    rows = values = 0
    for vectors in blocks:
        file.write(vectors.data)
        rows, values = rows + len(vectors), values + vectors.size
    file.seek(flat.count_at)
    file.write(struct.pack("<q", rows))
    file.seek(len(header))
    file.write(struct.pack("<Q", values))


def _streams(flat: _Flat) -> bool:
    """Whether a small index comes out the same both ways."""
    sample = np.arange(3 * flat.width).reshape(3, flat.width).astype(flat.dtype)
    ours = io.BytesIO()
    _write(ours, flat, [sample])
    index = flat.make()
    index.add(sample)
    return ours.getvalue() == bytes(flat.serialize(index))
