"""Chunks: long texts as several documents, each a slice of the text it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

#: Columns that tell a chunk's place in its document. `text[char_start:char_end]`, in Unicode code points, is the chunk.
CHUNK_COLUMNS = {
    "chunk_index": pa.int32(),
    "chunk_count": pa.int32(),
    "char_start": pa.int64(),
    "char_end": pa.int64(),
}


@dataclass(frozen=True)
class Chunks:
    """What n texts were cut into: m chunks, those of one text together and in their order."""

    #: int64 [m], ascending: which text each chunk is from. A text of `refused` has none, any other has one or more.
    owners: NDArray[np.int64]
    #: string [m].
    texts: pa.StringArray
    #: int32 [m]: 0 for the first chunk of a text.
    index: NDArray[np.int32]
    #: int64 [m] each, in code points of the whole text.
    char_start: NDArray[np.int64]
    char_end: NDArray[np.int64]
    #: Text -> why it cannot be cut.
    refused: Mapping[int, str]

    @cached_property
    def columns(self) -> list[pa.Array]:
        """Those of `CHUNK_COLUMNS`."""
        counts = np.bincount(self.owners)[self.owners].astype(np.int32)
        return [pa.array(self.index), pa.array(counts), pa.array(self.char_start), pa.array(self.char_end)]


def chunk_at(documents: pa.RecordBatch, row: int) -> int | None:
    """Which chunk of its document a row is; None where no texts were cut."""
    at = documents.schema.get_field_index("chunk_index")
    if at < 0 or documents.schema.field(at).type != CHUNK_COLUMNS["chunk_index"]:
        return None
    index: int | None = documents.column(at)[row].as_py()
    return index
