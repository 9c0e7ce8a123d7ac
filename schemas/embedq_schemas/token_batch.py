"""A token batch: many documents' token ids, packed without padding, with their document table beside them.

`input_ids` is a list<uint32> column: its values buffer is the packed `input_ids` of the forward pass and its offsets
buffer is `cu_seqlens`, so packing, the wire and the engine share the same two buffers without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedq_schemas import ipc
from embedq_schemas.errors import CodecError

KIND = "token_batch"
COLUMNS = {
    "id": pa.string(),
    "ordinal": pa.int64(),
    "input_ids": pa.list_(pa.field("item", pa.uint32())),
    "n_tokens": pa.int32(),
    "truncated": pa.bool_(),
    "text_sha256": pa.binary(32),
}


@dataclass(frozen=True)
class TokenBatch:
    """Documents ready for one forward pass. All share one run's encoding options."""

    #: Columns of `COLUMNS`, then metadata columns (string), then `text` where it is kept.
    table: pa.RecordBatch

    @property
    def num_documents(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def input_ids(self) -> NDArray[np.uint32]:
        """uint32 [total_tokens], all documents one after another."""
        values: NDArray[np.uint32] = self.table.column("input_ids").flatten().to_numpy(zero_copy_only=True)
        return values

    @cached_property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """int32 [num_documents + 1], starting at 0."""
        offsets: NDArray[np.int32] = self.table.column("input_ids").offsets.to_numpy(zero_copy_only=True)
        cu_seqlens: NDArray[np.int32] = offsets - offsets[0]
        return cu_seqlens

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    def encode(self) -> memoryview:
        """As an Arrow payload. Slices are written compactly, without their neighbours' ids."""
        return ipc.encode(self.table, KIND)

    @classmethod
    def decode(cls, payload: bytes | memoryview, *, vocab_size: int, max_length: int) -> TokenBatch:
        """Inverse of `encode`, validated against the model that will run it.

        Raises:
            UnsupportedVersionError: a newer major version.
            CodecError: not a token batch, an empty document, a document above `max_length`, an id outside the
                vocabulary.
        """
        batch = cls(ipc.decode(payload, KIND, COLUMNS))
        if batch.num_documents == 0:
            raise CodecError("token_batch: no documents")
        if batch.table.column("input_ids").values.null_count:
            raise CodecError("token_batch: input_ids holds nulls")
        ids = batch.input_ids
        lengths = np.diff(batch.cu_seqlens)
        if int(lengths.min()) < 1 or int(lengths.max()) > max_length:
            raise CodecError(
                f"token_batch: a document of {int(lengths.min())} to {int(lengths.max())} tokens, "
                f"expected 1 to {max_length}"
            )
        if int(ids.max()) >= vocab_size:
            raise CodecError(f"token_batch: token id {int(ids.max())} outside the vocabulary of {vocab_size}")
        return batch

    def slice(self, start: int, length: int) -> TokenBatch:
        """Documents `start` to `start + length`, sharing memory."""
        return TokenBatch(self.table.slice(start, length))

    def select(self, rows: NDArray[np.int64]) -> TokenBatch:
        """The documents at `rows`, copied."""
        return TokenBatch(self.table.take(pa.array(rows)))


def make_token_batch(
    documents: pa.RecordBatch,
    *,
    input_ids: NDArray[np.uint32],
    offsets: NDArray[np.int32],
    n_tokens: NDArray[np.int32],
    truncated: NDArray[np.bool_],
    text_sha256: pa.Array,
    metadata: tuple[str, ...],
) -> TokenBatch:
    """Join the tokenizer's arrays with the document table, without copying the ids.

    Args:
        documents: columns `id`, `ordinal` and the `metadata` names, n rows.
        input_ids: uint32 [offsets[-1]].
        offsets: int32 [n + 1].
        n_tokens: int32 [n], true counts before truncation.
        truncated: bool [n].
        text_sha256: FixedSizeBinary(32) [n].
        metadata: columns to carry through.
    """
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(input_ids), type=COLUMNS["input_ids"])
    arrays = [
        documents.column("id"),
        documents.column("ordinal"),
        lists,
        pa.array(n_tokens),
        pa.array(truncated),
        text_sha256,
        *(documents.column(name) for name in metadata),
    ]
    return TokenBatch(pa.RecordBatch.from_arrays(arrays, names=[*COLUMNS, *metadata]))
