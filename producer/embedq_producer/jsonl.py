"""A JSONL corpus as a stream of Arrow blocks, in constant memory, from any recorded position.

Only the set of ids grows with the corpus (8 bytes per document). A line that gives no document becomes a `Reject`; it
takes an ordinal like any other non-blank line, so that succeeded + failed + skipped = input can be checked at the end.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from embedq_schemas.errors import DocumentErrorCode, InputError

from .assembly import BlockAssembler, DecodedBlock
from .blocks import CorpusBlock, ReadOptions, Reject, document_schema
from .corpus import describe_os_error, open_corpus, read_some
from .documents import DocumentParser, document_ids
from .id_set import IdSet, hash_ids
from .lines import split_lines
from .position import START, Position

__all__ = ["START", "CorpusBlock", "Position", "ReadOptions", "Reject", "document_schema", "read_jsonl", "rescan_ids"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(path: Path | BinaryIO, *, options: ReadOptions, start: Position = START) -> Iterator[CorpusBlock]:
    """Blocks of the corpus from `start` to its end; an empty corpus has none.

    `path` may be an open stream of bytes; one that cannot seek is read from START only. A document whose id an earlier
    document of the corpus has is rejected (`duplicate_id`), or, if it brought no id, counted in `duplicates`. To decide
    the same after a restart, the part before `start` is read again first (`rescan_ids`).

    Raises InputError, at the first `next`, if the corpus cannot be read or is not the one `start` was recorded on, and
    under `strict` instead of the block that holds the first bad line.
    """
    parser = DocumentParser(options.id_field, options.text_field, options.metadata)
    schema = document_schema(options)
    name = _name(path)
    with open_corpus(path) if isinstance(path, Path) else nullcontext(path) as stream:
        ids = IdSet() if start == START else rescan_ids(stream, options=options, end=start)
        for decoded in _decode(stream, name, parser, options, start):
            block = _to_block(decoded, parser, schema, ids)
            if options.strict and block.rejects:
                bad = block.rejects[0]
                raise InputError(f"The corpus {name}, line {bad.line}: {bad.message} ({bad.code}).")
            yield block


def rescan_ids(path: Path | BinaryIO, *, options: ReadOptions, end: Position) -> IdSet:
    """The ids of all documents before `end`, as a reader that got there has them. Leaves a stream at `end`.

    Texts are decoded too, because a line without a usable text is no document and leaves its id free, but nothing of
    them is kept. Raises InputError if `end` is no position of this corpus.
    """
    name = _name(path)
    parser = DocumentParser(options.id_field, options.text_field, ())
    ids = IdSet()
    reached = START
    with open_corpus(path) if isinstance(path, Path) else nullcontext(path) as stream:
        _rewind(stream, name, end)
        for decoded in _decode(stream, name, parser, options, START, stop=end):
            ids.add(hash_ids(document_ids(decoded.rows)[0]))
            reached = decoded.end
        stream.seek(end.byte_offset)
    if reached != end:
        raise InputError(
            f"The corpus {name} was changed: the first {end.byte_offset} bytes hold {reached.line} lines now, and held "
            f"{end.line} when the run stopped there."
        )
    return ids


def _name(path: Path | BinaryIO) -> str:
    return str(path) if isinstance(path, Path) else str(getattr(path, "name", "<stream>"))


def _rewind(stream: BinaryIO, name: str, end: Position) -> None:
    if not stream.seekable():
        raise InputError(f"The corpus {name} is a stream, which can only be read from its start.")
    try:
        size = stream.seek(0, io.SEEK_END)
        before = b"\n"
        if 0 < end.byte_offset < size:
            stream.seek(end.byte_offset - 1)
            before = read_some(stream, 1, name)
        stream.seek(0)
    except OSError as error:
        raise InputError(f"The corpus {name} cannot be read: {describe_os_error(error)}.") from error
    stopped = f"the run stopped at byte {end.byte_offset}"
    if end.byte_offset > size:
        raise InputError(f"The corpus {name} was changed: it has {size} bytes, and {stopped}.")
    if before != b"\n":
        raise InputError(f"The corpus {name} was changed: {stopped}, where no line begins now.")


def _decode(
    stream: BinaryIO,
    name: str,
    parser: DocumentParser,
    options: ReadOptions,
    start: Position,
    stop: Position | None = None,
) -> Iterator[DecodedBlock]:
    """Blocks from `start`, where the stream stands, to the end; with `stop` to there, the last block even if empty."""
    head = _read_head(stream, name) if start == START else b""
    if stop is not None:
        head = head[: stop.byte_offset]
    skipped = len(head) if head == _BYTE_ORDER_MARK else 0
    assembler = BlockAssembler(parser, options, start, skipped_bytes=skipped)
    batches = split_lines(
        stream,
        name=name,
        max_line_bytes=options.max_line_bytes,
        head=head[skipped:],
        stop_after=None if stop is None else stop.byte_offset - start.byte_offset - skipped,
    )
    for batch in batches:
        yield from assembler.feed(batch)
    last = assembler.finish()
    if last.line_numbers or stop is not None:
        yield last


def _read_head(stream: BinaryIO, name: str) -> bytes:
    head = b""
    # A raw stream may give fewer bytes than asked for.
    while len(head) < len(_BYTE_ORDER_MARK) and (more := read_some(stream, len(_BYTE_ORDER_MARK) - len(head), name)):
        head += more
    return head


def _to_block(decoded: DecodedBlock, parser: DocumentParser, schema: pa.Schema, ids: IdSet) -> CorpusBlock:
    rows, rejects, first = decoded.rows, decoded.rejects, decoded.start.ordinal
    ordinals = np.arange(first, decoded.end.ordinal, dtype=np.int64)
    if rejects:
        ordinals = np.delete(ordinals, [reject.ordinal - first for reject in rejects])
    id_column, made = document_ids(rows)
    text_column = pa.array([row.text for row in rows], pa.string())
    columns = [id_column, pa.array(ordinals), text_column, *parser.metadata_columns(rows)]
    documents = pa.RecordBatch.from_arrays(columns, schema=schema)
    fresh = ids.add(hash_ids(id_column))
    duplicates = 0
    if not fresh.all():
        for index in np.flatnonzero(~fresh).tolist():
            if index in made:
                duplicates += 1
                continue
            ordinal = int(ordinals[index])
            line, document_id = decoded.line_numbers[ordinal - first], id_column[index].as_py()
            message = "an earlier document has the same id"
            rejects.append(Reject(ordinal, line, document_id, DocumentErrorCode.DUPLICATE_ID, message))
        rejects.sort(key=lambda reject: reject.ordinal)
        documents = documents.filter(pa.array(fresh))
    return CorpusBlock(documents, tuple(rejects), decoded.start, decoded.end, duplicates)
