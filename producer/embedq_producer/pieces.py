"""Pieces of a corpus, whatever they were read from: columns, rejects, and where they begin and end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from embedq_broker.consume import MAX_ENTRY_DOCUMENTS
from embedq_schemas.errors import DocumentErrorCode, InputError
from numpy.typing import NDArray

from .assembly import DecodedBlock
from .blocks import CorpusBlock, ReadOptions, Reject, Splitter
from .documents import Parser, content_id, document_ids
from .id_set import IdSet, hash_ids
from .position import Position
from .splitting import number_chunks, split_documents


@dataclass(slots=True)
class Piece:
    """Consecutive documents of one file, or of several; before ids are compared."""

    start: Position
    end: Position
    ids: pa.StringArray
    """[n], content ids where a document brought none."""
    made: set[int]
    """Indices of the ids that were made from the content."""
    ordinals: NDArray[np.int64]
    """[n]"""
    lines: Sequence[int]
    """1-based, of every ordinal from `start` to `end`, rejected ones included."""
    texts: pa.StringArray
    """[n]"""
    metadata: list[pa.Array]
    rejects: list[Reject]
    nbytes: int
    files: tuple[tuple[int, str], ...] = ()
    """Where the corpus has several: the first ordinal of each file, and its name, for rejects."""

    @property
    def count(self) -> int:
        return self.end.ordinal - self.start.ordinal


def piece_of_rows(block: DecodedBlock, parser: Parser) -> Piece:
    """Decoded lines as columns."""
    rows, rejects, first = block.rows, block.rejects, block.start.ordinal
    ordinals = np.arange(first, block.end.ordinal, dtype=np.int64)
    lines = block.line_numbers
    if rejects:
        ordinals = np.delete(ordinals, [reject.ordinal - first for reject in rejects])
    metadata, unfit = parser.metadata_columns(rows)
    if unfit:
        for row, message in unfit.items():
            found = rows[row].id
            document_id = None if found is None else str(found)
            ordinal, code = int(ordinals[row]), DocumentErrorCode.INVALID_METADATA
            rejects.append(Reject(ordinal, lines[ordinal - first], document_id, code, message))
        rejects.sort(key=lambda reject: reject.ordinal)
        keep = np.ones(len(rows), dtype=np.bool_)
        keep[list(unfit)] = False
        rows = [row for row, kept in zip(rows, keep, strict=True) if kept]
        ordinals = ordinals[keep]
        metadata = [column.filter(pa.array(keep)) for column in metadata]
    ids, made = document_ids(rows)
    texts = pa.array([row.text for row in rows], pa.string())
    return Piece(block.start, block.end, ids, made, ordinals, lines, texts, metadata, rejects, block.nbytes)


def with_content_ids(ids: pa.StringArray, texts: pa.StringArray) -> tuple[pa.StringArray, set[int]]:
    """`ids` [n], with an id made from its text wherever there is none; and the indices of those."""
    if not ids.null_count:
        return ids, set()
    missing = np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False)).tolist()
    values = ids.to_pylist()
    for row in missing:
        values[row] = content_id(texts[row].as_py())
    return pa.array(values, pa.string()), set(missing)


def merge(pieces: Iterable[Piece], options: ReadOptions) -> Iterator[Piece]:
    """Join neighbours while they fit into one block: small files and small record batches make no small jobs."""
    pending: list[Piece] = []
    count = nbytes = 0
    for piece in pieces:
        full = count + piece.count > options.block_documents or nbytes + piece.nbytes > options.block_bytes
        if pending and full:
            yield _joined(pending)
            pending, count, nbytes = [], 0, 0
        pending.append(piece)
        count, nbytes = count + piece.count, nbytes + piece.nbytes
        if count >= options.block_documents or nbytes >= options.block_bytes:
            yield _joined(pending)
            pending, count, nbytes = [], 0, 0
    if pending:
        yield _joined(pending)


def _joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    made: set[int] = set()
    before = 0
    for piece in pieces:
        made.update(before + row for row in piece.made)
        before += len(piece.ids)
    columns = zip(*(piece.metadata for piece in pieces), strict=True)
    return Piece(
        start=pieces[0].start,
        end=pieces[-1].end,
        ids=pa.concat_arrays([piece.ids for piece in pieces]),
        made=made,
        ordinals=np.concatenate([piece.ordinals for piece in pieces]),
        lines=[line for piece in pieces for line in piece.lines],
        texts=pa.concat_arrays([piece.texts for piece in pieces]),
        metadata=[pa.concat_arrays(arrays) for arrays in columns],
        rejects=[reject for piece in pieces for reject in piece.rejects],
        nbytes=sum(piece.nbytes for piece in pieces),
        files=tuple(span for piece in pieces for span in piece.files),
    )


def block_of(piece: Piece, schema: pa.Schema, ids: IdSet, strict_in: str | None, split: Splitter | None) -> CorpusBlock:
    """Columns with each id once, long texts cut. With `strict_in`, a corpus's name, the first reject is raised as
    InputError. `schema` is that of documents before they are cut.
    """
    columns = [piece.ids, pa.array(piece.ordinals), piece.texts, *piece.metadata]
    documents = pa.RecordBatch.from_arrays(columns, schema=schema)
    rejects = piece.rejects
    fresh = ids.add(hash_ids(piece.ids))
    duplicates = 0
    if not fresh.all():
        for index in np.flatnonzero(~fresh).tolist():
            if index in piece.made:
                duplicates += 1
                continue
            message = "an earlier document has the same id"
            rejects.append(_reject(piece, index, DocumentErrorCode.DUPLICATE_ID, message))
        documents = documents.filter(pa.array(fresh))
    if split is not None:
        whole = documents.column("ordinal").to_numpy()
        documents, counts, refused = split_documents(documents, split, MAX_ENTRY_DOCUMENTS)
        rows = np.flatnonzero(fresh)
        rejects += [_reject(piece, int(rows[row]), DocumentErrorCode.TOO_LONG, why) for row, why in refused]
    rejects.sort(key=lambda reject: reject.ordinal)
    if piece.files:
        firsts = [first for first, _ in piece.files]
        rejects = [replace(reject, file=piece.files[bisect_right(firsts, reject.ordinal) - 1][1]) for reject in rejects]
    if strict_in is not None and rejects:
        bad = rejects[0]
        raise InputError(f"The corpus {bad.file or strict_in}, line {bad.line}: {bad.message} ({bad.code}).")
    block = CorpusBlock(documents, tuple(rejects), piece.start, piece.end, duplicates)
    return block if split is None else number_chunks(block, whole, counts)


def _reject(piece: Piece, row: int, code: DocumentErrorCode, message: str) -> Reject:
    """For the document at `row` of the piece."""
    ordinal = int(piece.ordinals[row])
    line = int(piece.lines[ordinal - piece.start.ordinal])
    return Reject(ordinal, line, piece.ids[row].as_py(), code, message)
