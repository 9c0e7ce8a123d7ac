"""Long texts as several documents: every chunk takes an ordinal of its own, right after the one before it.

So chunks are sent, counted, resumed, retried and recognised like any other documents, and all chunks of a text lie
together in input order. However many they are, no block holds more of them than of other documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from embedq_schemas.chunks import CHUNK_COLUMNS, Chunks
from numpy.typing import NDArray

from .blocks import CorpusBlock, ReadOptions, Reject
from .position import Position


def split_block(block: CorpusBlock, chunks: Chunks, options: ReadOptions) -> Iterator[CorpusBlock]:
    """The block as one or more, of chunks instead of documents.

    Args:
        block: documents and rejects with the ordinals that they have where nothing is cut. What lies before
            `block.start.sent` was given before.
        chunks: of its documents' texts.
        options: `block_documents` and `block_bytes` bound a block, metadata included, unless one row has more.
    """
    rows = _Rows.of(block, chunks)
    start, first = block.start, int(np.searchsorted(rows.ordinals, block.start.next_ordinal))
    rejects = [reject for reject in rows.rejects if reject.ordinal >= start.next_ordinal]
    for end in rows.ends(first, options):
        whole = end == len(rows.ordinals)
        until = rows.end if whole else replace(start, sent=int(rows.ordinals[end]) - start.ordinal - start.chunks)
        if whole and until.next_ordinal < start.next_ordinal:
            # Blocks were larger when the run stopped: what was given before reaches into the next one.
            until = replace(until, sent=start.next_ordinal - until.next_ordinal)
        here = tuple(reject for reject in rejects if whole or reject.ordinal < until.next_ordinal)
        rejects = rejects[len(here) :]
        duplicates = block.duplicates if whole else 0
        yield CorpusBlock(rows.documents(first, end), here, start, until, duplicates)
        start, first = until, end


@dataclass(frozen=True)
class _Rows:
    """The chunks of a block; their documents' columns are repeated for those asked for only."""

    block: CorpusBlock
    chunks: Chunks
    ordinals: NDArray[np.int64]  # [chunks], ascending
    rejects: tuple[Reject, ...]
    end: Position

    @classmethod
    def of(cls, block: CorpusBlock, chunks: Chunks) -> _Rows:
        own = block.documents.column("ordinal").to_numpy()
        more = np.maximum(np.bincount(chunks.owners, minlength=len(own)) - 1, 0)
        before = block.start.chunks + np.concatenate(([0], np.cumsum(more)))
        ordinals = own[chunks.owners] + before[chunks.owners] + chunks.index
        rejects = (
            replace(reject, ordinal=reject.ordinal + int(before[np.searchsorted(own, reject.ordinal)]))
            for reject in block.rejects
        )
        return cls(block, chunks, ordinals, tuple(rejects), replace(block.end, chunks=int(before[-1])))

    def ends(self, first: int, options: ReadOptions) -> Iterator[int]:
        """Where the blocks end that hold the rows from `first` on: one at least, the last behind all rows."""
        total, sizes = len(self.ordinals), np.cumsum(self._sizes())
        while True:
            before = sizes[first - 1] if first else 0
            fitting = int(np.searchsorted(sizes, before + options.block_bytes, side="right"))
            first = min(total, max(first + 1, min(fitting, first + options.block_documents)))
            yield first
            if first == total:
                return

    def _sizes(self) -> NDArray[np.int64]:
        """Bytes of each row, about: int64 [chunks]."""
        texts = pc.binary_length(self.chunks.texts).to_numpy().astype(np.int64)
        others = np.zeros(self.block.documents.num_rows, dtype=np.int64)
        for column in self.block.documents.drop_columns(["text"]).columns:
            if pa.types.is_string(column.type):
                others += pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
            else:
                others += -(-column.nbytes // max(1, len(column)))
        sizes: NDArray[np.int64] = texts + others[self.chunks.owners]
        return sizes

    def documents(self, first: int, end: int) -> pa.RecordBatch:
        """Rows `first` to `end`: their document's columns, their own text and ordinal, and `CHUNK_COLUMNS`."""
        documents, rows = self.block.documents, slice(first, end)
        # Without the whole text, of which every chunk would get a copy.
        found = documents.drop_columns(["text"]).take(pa.array(self.chunks.owners[rows]))
        found = found.set_column(1, documents.schema.field("ordinal"), pa.array(self.ordinals[rows]))
        found = found.add_column(2, documents.schema.field("text"), self.chunks.texts[rows])
        for (name, kind), column in zip(CHUNK_COLUMNS.items(), self.chunks.columns, strict=True):
            found = found.append_column(pa.field(name, kind), column[rows])
        return found
