"""Text columns and ragged token columns as plain buffers, and the few operations tokenization needs on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

#: Above this many bytes of text an Arrow string array's 32-bit offsets could overflow once a prompt is prepended.
_WIDE_OFFSETS_FROM = 1 << 30


@dataclass(frozen=True)
class TextColumn:
    """UTF-8 texts: row `i` is `data[offsets[i]:offsets[i + 1]]`."""

    offsets: NDArray[np.int64]  # [n + 1], starts at 0
    data: NDArray[np.uint8]  # [bytes]

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class TokenColumn:
    """Token ids without special tokens: row `i` is `ids[offsets[i]:offsets[i + 1]]`."""

    offsets: NDArray[np.int64]  # [n + 1], starts at 0
    ids: NDArray[np.uint32]  # [tokens]

    def __len__(self) -> int:
        return len(self.offsets) - 1


def text_column(texts: pa.Array) -> TextColumn:
    """View an Arrow string array (sliced or not, no nulls) as buffers; only the offsets are copied."""
    if len(texts) == 0:
        return TextColumn(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.uint8))
    _, offset_buffer, data_buffer = texts.buffers()
    width = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    offsets = np.frombuffer(offset_buffer, dtype=width)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = np.empty(0, dtype=np.uint8) if data_buffer is None else np.frombuffer(data_buffer, dtype=np.uint8)
    return TextColumn(offsets - offsets[0], data[offsets[0] : offsets[-1]])


def prepend(prompt: str, texts: pa.Array) -> pa.Array:
    """Put `prompt` before every text, as one text: token merges then cross the boundary as in any other text."""
    if not prompt or len(texts) == 0:
        return texts
    if texts.nbytes + len(prompt.encode()) * len(texts) >= _WIDE_OFFSETS_FROM:
        texts = texts.cast(pa.large_string())
    return pc.binary_join_element_wise(pa.scalar(prompt, texts.type), texts, pa.scalar("", texts.type))


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Row lengths [n] to offsets int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def interleave(first: TokenColumn, second: TokenColumn, takes_second: NDArray[np.bool_]) -> TokenColumn:
    """Merge two columns in row order: row `i` is the next row of `second` where `takes_second[i]`, else of `first`."""
    lengths = np.empty(len(takes_second), dtype=np.int64)
    lengths[~takes_second] = np.diff(first.offsets)
    lengths[takes_second] = np.diff(second.offsets)
    offsets = offsets_of(lengths)
    ids = np.empty(offsets[-1], dtype=np.uint32)
    # Whole runs of rows are copied at once, so the loop is as long as the routed rows are many, not as the column.
    edges = np.flatnonzero(np.diff(takes_second)) + 1
    at = [0, 0]
    for start, end in zip([0, *edges], [*edges, len(takes_second)], strict=True):
        side = int(takes_second[start])
        source = second if side else first
        rows = end - start
        begin, stop = source.offsets[at[side]], source.offsets[at[side] + rows]
        ids[offsets[start] : offsets[end]] = source.ids[begin:stop]
        at[side] += rows
    return TokenColumn(offsets, ids)
