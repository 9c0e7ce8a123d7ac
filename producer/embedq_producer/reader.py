"""A corpus as a stream of Arrow blocks, in constant memory, from any recorded position.

Only the set of ids grows with the corpus (8 bytes per document). What gives no document becomes a `Reject`; it takes an
ordinal like any document, so that succeeded + failed + skipped = input can be checked at the end.

Reading on from a position reads what lies before it again: the ids there decide which later documents are duplicates,
and so it works for compressed files and streams as for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
from embedq_schemas.errors import DocumentErrorCode, InputError
from embedq_schemas.ipc import METADATA_TYPE

from .assembly import DecodedBlock
from .blocks import CorpusBlock, ReadOptions, Reject, document_schema
from .changes import check_cut
from .columns import find, metadata_type_of, require_columns, type_at
from .corpus import Corpus, SourceFile
from .csv_rows import CsvFile
from .damage import DamagedFileError
from .documents import DocumentParser, LineParser, Parser
from .formats import HEAD_BYTES, TABLES, Format, of_content, of_name, refuse_others
from .id_set import IdSet, hash_ids
from .json_array import split_elements
from .json_values import infer_type
from .line_files import decode_lines, skip_byte_order_mark
from .lines import READ_BYTES, LineBatch, is_utf8, split_lines
from .pieces import Piece, block_of, merge, piece_of_rows
from .position import START, Position
from .streams import ByteStream
from .tables import broken_off, open_table, read_table

_SAMPLE_BLOCKS = 16
"""Blocks in which the first value of a JSON field is looked for."""
_DELIMITERS = {Format.CSV: ",", Format.TSV: "\t"}


def read_corpus(corpus: Corpus, *, options: ReadOptions, start: Position = START) -> Iterator[CorpusBlock]:
    """Blocks of the corpus from `start` to its end; an empty corpus has none.

    A document whose id an earlier document of the corpus has is rejected (`duplicate_id`), or, if it brought no id,
    counted in `duplicates`.

    Raises InputError, at some `next`, if the corpus cannot be read, changes while it is read, or is not the one `start`
    was recorded on, and under `strict` instead of the block that holds the first bad document.
    """
    schema = document_schema(replace(options, splitter=None))
    ids = IdSet()
    strict_in = corpus.name if options.strict else None
    in_files = replace(start, chunks=0)
    pieces = _pieces(corpus, options, in_files)
    if start != START:
        _read_past(pieces, in_files, ids, corpus.name)
    for piece in merge(pieces, options):
        # Where a file ends and where the next begins is one place.
        piece.start = start
        block = block_of(piece, schema, ids, strict_in, options.splitter)
        yield block
        start = block.end


def metadata_types(corpus: Corpus, options: ReadOptions) -> tuple[pa.DataType, ...]:
    """The type of each metadata column, from the first file with documents: its schema's, or what its first values are.

    JSON: int64, double, bool, string, or lists of these, where all values of the first block that has any are that;
    else text, as where the first blocks have none. CSV: text. Depends on the corpus and on the fields' names alone.
    Raises InputError where a table lacks a column that was asked for, or the file cannot be read.
    """
    sample = ReadOptions(id_field=options.id_field, text_field=options.text_field, template=options.template,
                         metadata=options.metadata, max_line_bytes=options.max_line_bytes)  # fmt: skip
    for file in corpus.files:
        try:
            found = _types_in(file, sample)
        except DamagedFileError as error:
            if len(corpus.files) == 1:
                raise InputError(f"The corpus {file.name} cannot be read: {error}.") from None
            continue
        if found is not None:
            return found
    return (METADATA_TYPE,) * len(options.metadata)


def _types_in(file: SourceFile, options: ReadOptions) -> tuple[pa.DataType, ...] | None:
    """None where the file holds no document."""
    with ExitStack() as stack:
        stream = ByteStream(stack.enter_context(file.place.peek()), file.name)
        kind = _format(file, stream)
        if kind in TABLES:
            schema = open_table(file.place, kind, stream, stack).schema
            require_columns(options, schema, file.name)
            return tuple(
                metadata_type_of(type_at(schema, path)) if (path := find(schema, name)) else METADATA_TYPE
                for name in options.metadata
            )
        if kind in (Format.TEXT, Format.FILES):
            if options.metadata or options.template:
                raise InputError(f"The corpus {file.name} is plain text, without fields for metadata or a template.")
            return ()
        if kind in _DELIMITERS:
            header = _open_csv(stream, kind, options, file.name)
            if header.header:
                require_columns(options, header.schema, file.name)
            return (METADATA_TYPE,) * len(options.metadata) if header.header else None
        if not options.metadata:
            return ()
        return _json_types(stream, kind, options, file.name)


def _json_types(stream: ByteStream, kind: Format, options: ReadOptions, name: str) -> tuple[pa.DataType, ...] | None:
    parser = DocumentParser(options)
    found: dict[str, pa.DataType] = {}
    documents = 0
    for block in islice(_line_blocks(stream, kind, parser, options, START, name, None), _SAMPLE_BLOCKS):
        documents += len(block.rows)
        for field in parser.attributes:
            inferred = None if field in found else infer_type([getattr(row, field) for row in block.rows])
            if inferred is not None:
                found[field] = inferred
        if len(found) == len(parser.attributes):
            break
    return tuple(found.get(field, METADATA_TYPE) for field in parser.attributes) if documents else None


def _read_past(pieces: Iterator[Piece], start: Position, ids: IdSet, name: str) -> None:
    """Take the ids of all documents before `start`; leaves the pieces from there on."""
    for piece in pieces:
        ids.add(hash_ids(piece.ids))
        if piece.end == start:
            return
    raise InputError(f"The corpus {name} was changed: the place where the run stopped is not in it any more.")


def _pieces(corpus: Corpus, options: ReadOptions, start: Position) -> Iterator[Piece]:
    ordinal = 0
    for index, file in enumerate(corpus.files):
        beginning = Position(index, 0, 0, ordinal)
        cut = start if start.file == index and start.line else None
        if start != START and start.file == index and not start.line:
            check_cut(beginning, start, file.name)
        for piece in _read_file(file, beginning, options, cut):
            if len(corpus.files) > 1:
                piece.files = ((piece.start.ordinal, file.shown_label),)
            yield piece
            ordinal = piece.end.ordinal
        file.check_unchanged()


def _read_file(file: SourceFile, start: Position, options: ReadOptions, cut: Position | None) -> Iterator[Piece]:
    """Pieces of one file. What is no such file at all is one reject."""
    reached = start
    try:
        with ExitStack() as stack:
            for piece in _open_file(file, start, options, cut, stack):
                yield piece
                reached = piece.end
    except DamagedFileError as error:
        yield broken_off(reached, error, options)


def _open_file(
    file: SourceFile, start: Position, options: ReadOptions, cut: Position | None, stack: ExitStack
) -> Iterator[Piece]:
    stream = ByteStream(stack.enter_context(file.place.open()), file.name)
    kind = _format(file, stream)
    if kind in TABLES:
        yield from read_table(open_table(file.place, kind, stream, stack), options, start, name=file.name, cut=cut)
    elif kind is Format.FILES:
        piece = _whole_file(file, stream, options, start)
        check_cut(piece.end, cut, file.name)
        yield piece
    elif kind in _DELIMITERS:
        yield from _open_csv(stream, kind, options, file.name).pieces(options, start, cut=cut)
    else:
        parser: Parser = LineParser(options) if kind is Format.TEXT else DocumentParser(options)
        for block in _line_blocks(stream, kind, parser, options, start, file.name, cut):
            yield piece_of_rows(block, parser)


def _format(file: SourceFile, stream: ByteStream) -> Format:
    """What was asked for; else what the first bytes prove, what the name says, what the first bytes suggest."""
    if file.format is not None:
        return file.format
    head = stream.head(HEAD_BYTES)
    found, named = of_content(head), of_name(file.label)
    if found not in TABLES:
        refuse_others(head)
    if found is not None and (found in TABLES or named is None):
        return found
    return named or Format.JSONL


def _line_blocks(
    stream: ByteStream,
    kind: Format,
    parser: Parser,
    options: ReadOptions,
    start: Position,
    name: str,
    cut: Position | None,
) -> Iterator[DecodedBlock]:
    skipped = skip_byte_order_mark(stream)
    split: Callable[..., Iterator[LineBatch]] = split_lines
    if kind is Format.JSON and stream.head(HEAD_BYTES).lstrip()[:1] == b"[":
        split = split_elements
    batches = split(stream, max_line_bytes=options.max_line_bytes)
    return decode_lines(batches, parser, options, start, name=name, skipped_bytes=skipped, cut=cut)


def _open_csv(stream: ByteStream, kind: Format, options: ReadOptions, name: str) -> CsvFile:
    return CsvFile(stream, delimiter=_DELIMITERS[kind], name=name, max_row_bytes=options.max_line_bytes)


def _whole_file(file: SourceFile, stream: ByteStream, options: ReadOptions, start: Position) -> Piece:
    """A text file as one document, whose id is its path."""
    size = skip_byte_order_mark(stream)
    parts, longest = [], options.max_line_bytes
    while size <= longest and (part := stream.read(READ_BYTES)):
        parts.append(part)
        size += len(part)
    body = b"".join(parts)
    rejects = []
    if size > longest:
        message = f"the file has more than max_line_bytes = {longest} bytes"
        rejects = [Reject(start.ordinal, 1, file.shown_label, DocumentErrorCode.LINE_TOO_LONG, message)]
    elif not is_utf8(body):
        rejects = [Reject(start.ordinal, 1, file.shown_label, DocumentErrorCode.INVALID_UTF8, "the file is not UTF-8")]
    count = 0 if rejects else 1
    return Piece(
        start=start,
        end=Position(start.file, size, 1, start.ordinal + 1),
        ids=pa.array([file.label][:count], pa.string()),
        made=set(),
        ordinals=np.arange(start.ordinal, start.ordinal + count, dtype=np.int64),
        lines=[1],
        texts=pa.array([body][:count], pa.binary()).cast(pa.string()),
        metadata=[pa.nulls(count, kind) for kind in options.types],
        rejects=rejects,
        nbytes=0 if rejects else size,
    )
