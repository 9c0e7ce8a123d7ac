"""A vector batch: results as one Arrow record batch, on a result stream and in the rows of a Parquet dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedq_schemas import ipc
from embedq_schemas.errors import CodecError
from embedq_schemas.quantize import VectorType, quantize
from embedq_schemas.token_batch import COLUMNS as TOKEN_COLUMNS
from embedq_schemas.token_batch import TokenBatch

KIND = "vector_batch"
MAX_DIMENSION = 65536


TYPE_KEY = b"embedq.vector_type"
"""Metadata of the vector column: the `VectorType` of one that is fixed-size binary."""


def columns(dimension: int, kind: VectorType = VectorType.FLOAT32) -> dict[str, pa.DataType]:
    """Leading columns of a vector batch whose vectors have `dimension` components."""
    return {
        "id": pa.string(),
        "ordinal": pa.int64(),
        "vector": kind.arrow(dimension),
        "n_tokens": pa.int32(),
        "truncated": pa.bool_(),
        "text_sha256": pa.binary(32),
    }


def vector_type(dimension: int) -> pa.DataType:
    """FixedSizeList<float32>[dimension], whose items are never null."""
    return VectorType.FLOAT32.arrow(dimension)


def described(field: pa.Field) -> tuple[VectorType, int]:
    """Type and components of the vectors in a column; raises CodecError if they are not of a `VectorType`."""
    kind, width = field.type, 0
    found = None
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
        found = {pa.float32(): VectorType.FLOAT32, pa.float16(): VectorType.FLOAT16}.get(kind.value_type)
    elif pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        name = (field.metadata or {}).get(TYPE_KEY, b"").decode("ascii", "replace")
        found = next((each for each in VectorType if each == name and not each.floating), None)
    dimension = width * 8 if found is not None and found.packed else width
    if found is None or not 1 <= dimension <= MAX_DIMENSION:
        raise CodecError(f"column {field.name} holds {kind}, which is no type of vector")
    return found, dimension


@dataclass(frozen=True)
class VectorBatch:
    """Vectors with their documents' ids. Columns of `columns(dimension, vector_type)`, then metadata columns."""

    table: pa.RecordBatch

    @property
    def num_documents(self) -> int:
        return int(self.table.num_rows)

    @property
    def vector_type(self) -> VectorType:
        return described(self.table.schema.field("vector"))[0]

    @property
    def dimension(self) -> int:
        return described(self.table.schema.field("vector"))[1]

    @property
    def vectors(self) -> NDArray[Any]:
        """As they are stored, without a copy: float32, float16, int8 or uint8 [num_documents, dimension]; binary and
        ubinary int8 or uint8 [num_documents, dimension / 8].
        """
        kind, dimension = described(self.table.schema.field("vector"))
        column, width = self.table.column("vector"), kind.width(dimension)
        if kind.floating:
            return np.asarray(column.flatten().to_numpy(zero_copy_only=True)).reshape(-1, width)
        values = np.frombuffer(column.buffers()[1] or b"", dtype=kind.dtype)
        return values[column.offset * width :][: len(column) * width].reshape(-1, width)

    def quantized(self, kind: VectorType, ranges: NDArray[np.float32] | None = None) -> VectorBatch:
        """float32 vectors as `kind`; see `quantize`. Those that are `kind` already stay as they are."""
        if self.vector_type is kind:
            return self
        stored = np.ascontiguousarray(quantize(self.vectors, kind, ranges))
        field = vector_field(self.dimension, kind)
        index = self.table.schema.get_field_index("vector")
        return VectorBatch(self.table.set_column(index, field, _column(stored, field.type)))

    def encode(self) -> memoryview:
        return ipc.encode(self.table, KIND)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> VectorBatch:
        """Inverse of `encode`; raises CodecError or UnsupportedVersionError."""
        try:
            with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
                field = reader.schema.field("vector")
        except (pa.ArrowException, ValueError, OSError, KeyError, MemoryError) as error:
            raise CodecError(f"{KIND}: not a valid Arrow stream: {str(error)[:200]}") from None
        kind, dimension = described(field)
        batch = cls(ipc.decode(payload, KIND, columns(dimension, kind)))
        if kind.floating and batch.table.column("vector").flatten().null_count:
            raise CodecError(f"{KIND}: a vector holds nulls")
        return batch


def vector_field(dimension: int, kind: VectorType) -> pa.Field:
    """The column that holds vectors of `kind`."""
    return pa.field("vector", kind.arrow(dimension), metadata=None if kind.floating else {TYPE_KEY: kind.encode()})


def _column(stored: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """C-contiguous vectors [n, width] as an Arrow column, without a copy."""
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(stored.reshape(-1)), type=kind)
    return pa.Array.from_buffers(kind, len(stored), [None, pa.py_buffer(stored)])


def make_vector_batch(tokens: TokenBatch, vectors: NDArray[np.float32]) -> VectorBatch:
    """Join `vectors` (float32 [n, dimension], C-contiguous) to their documents, without a copy."""
    n, dimension = vectors.shape
    if n != tokens.num_documents:
        raise CodecError(f"{KIND}: {n} vectors for {tokens.num_documents} documents")
    lists = _column(vectors, vector_type(dimension))
    table = tokens.table
    extra = table.schema.names[len(TOKEN_COLUMNS) :]
    arrays = [
        table.column("id"),
        table.column("ordinal"),
        lists,
        table.column("n_tokens"),
        table.column("truncated"),
        table.column("text_sha256"),
        *(table.column(name) for name in extra),
    ]
    return VectorBatch(pa.RecordBatch.from_arrays(arrays, names=[*columns(dimension), *extra]))
