"""Long texts as several documents: every chunk takes an ordinal of its own, right after the one before it.

So chunks are sent, counted, resumed, retried and recognised like any other documents, and all chunks of a text lie
together in input order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from embedq_schemas.chunks import CHUNK_COLUMNS
from numpy.typing import NDArray

from .blocks import CorpusBlock, Splitter


def split_documents(
    documents: pa.RecordBatch, split: Splitter, most: int
) -> tuple[pa.RecordBatch, NDArray[np.int64], list[tuple[int, str]]]:
    """Cut the texts of `documents` (id, ordinal, text, metadata), n rows.

    Args:
        most: chunks of all of them at most; the texts with the most chunks are refused until no more are left.

    Returns:
        The chunks, with `CHUNK_COLUMNS` behind their document's columns and the ordinal of their document; int64 [n],
        how many chunks each document has; (row, why) of documents that have none.
    """
    chunks = split(documents.column("text"))
    counts = np.bincount(chunks.owners, minlength=documents.num_rows)
    refused = dict(chunks.refused)
    while counts.sum() > most:
        row = int(counts.argmax())
        refused[row] = f"the text gives {counts[row]} chunks, and a job holds {most}"
        counts[row] = 0
    kept = pa.array(counts[chunks.owners] > 0)
    rows = documents.take(pa.array(chunks.owners)).set_column(2, documents.schema.field("text"), chunks.texts)
    for (name, kind), column in zip(CHUNK_COLUMNS.items(), chunks.columns, strict=True):
        rows = rows.append_column(pa.field(name, kind), column)
    return rows.filter(kept), counts, sorted(refused.items())


def number_chunks(block: CorpusBlock, ordinals: NDArray[np.int64], counts: NDArray[np.int64]) -> CorpusBlock:
    """Give every row of the block an ordinal of its own.

    Args:
        block: its rows and rejects have the ordinals of their documents.
        ordinals: of the documents that were cut, ascending, and `counts`: how many chunks each has.
    """
    more = np.maximum(counts - 1, 0)
    before = block.start.chunks + np.concatenate(([0], np.cumsum(more)))
    own = block.documents.column("ordinal").to_numpy()
    shifted = own + before[np.searchsorted(ordinals, own)] + block.documents.column("chunk_index").to_numpy()
    field = block.documents.schema.field("ordinal")
    rejects = tuple(
        replace(reject, ordinal=reject.ordinal + int(before[np.searchsorted(ordinals, reject.ordinal)]))
        for reject in block.rejects
    )
    documents = block.documents.set_column(1, field, pa.array(shifted))
    return replace(block, documents=documents, rejects=rejects, end=replace(block.end, chunks=int(before[-1])))
