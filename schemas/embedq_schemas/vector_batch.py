"""A vector batch: results as one Arrow record batch, on a result stream and in the rows of a Parquet dataset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedq_schemas import ipc
from embedq_schemas.errors import CodecError
from embedq_schemas.token_batch import COLUMNS as TOKEN_COLUMNS
from embedq_schemas.token_batch import TokenBatch

KIND = "vector_batch"


def columns(dimension: int) -> dict[str, pa.DataType]:
    """Leading columns of a vector batch whose vectors have `dimension` components."""
    return {
        "id": pa.string(),
        "ordinal": pa.int64(),
        "vector": vector_type(dimension),
        "n_tokens": pa.int32(),
        "truncated": pa.bool_(),
        "text_sha256": pa.binary(32),
    }


def vector_type(dimension: int) -> pa.DataType:
    """FixedSizeList<float32>[dimension], whose items are never null."""
    return pa.list_(pa.field("item", pa.float32()), dimension)


@dataclass(frozen=True)
class VectorBatch:
    """Vectors with their documents' ids. Columns of `columns(dimension)`, then metadata columns."""

    table: pa.RecordBatch

    @property
    def num_documents(self) -> int:
        return int(self.table.num_rows)

    @property
    def dimension(self) -> int:
        return int(self.table.schema.field("vector").type.list_size)

    @property
    def vectors(self) -> NDArray[np.float32]:
        """float32 [num_documents, dimension], without a copy."""
        flat: NDArray[np.float32] = self.table.column("vector").flatten().to_numpy(zero_copy_only=True)
        return flat.reshape(self.num_documents, self.dimension)

    def encode(self) -> memoryview:
        return ipc.encode(self.table, KIND)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> VectorBatch:
        """Inverse of `encode`; raises CodecError or UnsupportedVersionError."""
        try:
            with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
                vector = reader.schema.field("vector").type
        except (pa.ArrowException, ValueError, OSError, KeyError, MemoryError) as error:
            raise CodecError(f"{KIND}: not a valid Arrow stream: {str(error)[:200]}") from None
        if not pa.types.is_fixed_size_list(vector) or not 1 <= vector.list_size <= 65536:
            raise CodecError(f"{KIND}: column vector is {vector}, expected a fixed-size list of float32")
        batch = cls(ipc.decode(payload, KIND, columns(vector.list_size)))
        if batch.table.column("vector").flatten().null_count:
            raise CodecError(f"{KIND}: a vector holds nulls")
        return batch


def make_vector_batch(tokens: TokenBatch, vectors: NDArray[np.float32]) -> VectorBatch:
    """Join `vectors` (float32 [n, dimension], C-contiguous) to their documents, without a copy."""
    n, dimension = vectors.shape
    if n != tokens.num_documents:
        raise CodecError(f"{KIND}: {n} vectors for {tokens.num_documents} documents")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=vector_type(dimension))
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
