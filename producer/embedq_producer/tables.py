"""Parquet, Arrow IPC files and streams, Feather: rows in batches of bounded size, whatever the file's own are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from embedq_schemas.errors import DocumentErrorCode, InputError
from numpy.typing import NDArray

from .blocks import ReadOptions, Reject
from .changes import check_cut, ended_early
from .columns import TableParser
from .damage import READ_ERRORS, DamagedFileError, damage
from .formats import Format
from .pieces import Piece
from .places import Place, describe_os_error
from .position import Position
from .streams import ByteStream

_BUFFER_BYTES = 1 << 20
_BINARY = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


@dataclass(frozen=True)
class Table:
    """An open file of rows."""

    schema: pa.Schema
    batches: Callable[[list[str], ReadOptions], Iterator[pa.RecordBatch]]
    """Batches with at least the columns at these dotted paths, in order."""


def open_table(place: Place, kind: Format, stream: ByteStream, stack: ExitStack) -> Table:
    """Open a file of rows, whose bytes are `stream`; `stack` closes what is opened.

    Raises:
        DamagedFileError: it is no such file.
        InputError: it cannot be read here.
    """
    with failures(place.name):
        return _parquet(place, stream, stack) if kind is Format.PARQUET else _arrow(place, stream, stack)


def read_table(
    table: Table, options: ReadOptions, start: Position, *, name: str, cut: Position | None = None
) -> Iterator[Piece]:
    """Pieces of one file, from `start`, its beginning, to its end.

    With `cut` a piece ends there. Damage ends the file with a reject that stands for the rest of it. Raises InputError
    where `cut` is no position of this file, or a read fails.
    """
    parser = TableParser(options, table.schema)
    reached = start
    to_cut = cut.line if cut is not None else 0
    try:
        for batch in _guarded(table.batches(parser.paths, options), name):
            done = 0
            while done < batch.num_rows:
                count = min(batch.num_rows - done, options.block_documents, to_cut or batch.num_rows)
                for piece in _pieces(parser, batch.slice(done, count), reached, options):
                    yield piece
                    reached = piece.end
                done += count
                if to_cut:
                    to_cut -= count
                    if to_cut == 0:
                        check_cut(reached, cut, name)
    except DamagedFileError as error:
        if to_cut == 0:
            yield broken_off(reached, error, options)
            return
    if to_cut:
        raise ended_early(name, reached, cut)


def _pieces(parser: TableParser, rows: pa.RecordBatch, start: Position, options: ReadOptions) -> Iterator[Piece]:
    sizes = parser.sizes(rows)
    reached = start
    for begin, end in _bounds(sizes, options):
        line, count = reached.line + (end - begin), end - begin
        until = Position(start.file, line, line, reached.ordinal + count)
        part, lines = rows.slice(begin, count), range(reached.line + 1, line + 1)
        long = sizes[begin:end] > options.max_line_bytes
        rejects = []
        if long.any():
            for row in np.flatnonzero(long).tolist():
                message = f"the row has {sizes[begin + row]} bytes, more than max_line_bytes = {options.max_line_bytes}"
                code = DocumentErrorCode.LINE_TOO_LONG
                rejects.append(Reject(reached.ordinal + row, lines[row], None, code, message))
            part = part.filter(pa.array(~long))
        yield parser.piece(part, lines, reached, until, rejects, nbytes=int(sizes[begin:end][~long].sum()))
        reached = until


def broken_off(reached: Position, error: DamagedFileError, options: ReadOptions) -> Piece:
    """A piece of one reject, for the rest of a file from `reached` on."""
    message = f"the rest of the file cannot be read: {error}" if reached.line else f"the file cannot be read: {error}"
    return Piece(
        start=reached,
        end=Position(reached.file + 1, 0, 0, reached.ordinal + 1),
        ids=pa.array([], pa.string()),
        made=set(),
        ordinals=np.zeros(0, np.int64),
        lines=[reached.line + 1],
        texts=pa.array([], pa.string()),
        metadata=[pa.nulls(0, kind) for kind in options.types],
        rejects=[Reject(reached.ordinal, reached.line + 1, None, DocumentErrorCode.UNREADABLE_FILE, message)],
        nbytes=0,
    )


@contextmanager
def failures(name: str) -> Iterator[None]:
    """What the readers raise: damage of the content as DamagedFileError, all else as InputError."""
    try:
        yield
    except READ_ERRORS as error:
        if (damaged := damage(error)) is not None:
            raise damaged from error
        raise InputError(f"The corpus {name} cannot be read: {describe_os_error(error)}.") from error


def _guarded(batches: Iterator[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    while True:
        with failures(name):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _bounds(sizes: NDArray[np.int64], options: ReadOptions) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fit into one block each; a row above the longest takes no room, it is not kept."""
    ends = np.cumsum(np.where(sizes > options.max_line_bytes, 0, sizes))
    begin = 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + options.block_bytes, side="right"))
        end = min(max(end, begin + 1), begin + options.block_documents)
        yield begin, end
        begin = end


def _parquet(place: Place, stream: ByteStream, stack: ExitStack) -> Table:
    source = _anywhere(place, stream, "Parquet")
    file = stack.enter_context(pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False))

    def batches(paths: list[str], options: ReadOptions) -> Iterator[pa.RecordBatch]:
        leaves = [column.path for column in (file.schema.column(i) for i in range(len(file.schema)))]
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            wanted = [i for i, leaf in enumerate(leaves) if any(leaf == p or leaf.startswith(p + ".") for p in paths)]
            size = sum(metadata.column(i).total_uncompressed_size for i in wanted)
            # As many rows as fill a block on average: large texts must not add up to more than memory holds.
            rows = max(1, min(options.block_documents, options.block_bytes * metadata.num_rows // max(1, size)))
            yield from _filled_batches(file, group, rows, paths, metadata.num_rows)

    return Table(file.schema_arrow, batches)


def _filled_batches(file: Any, group: int, rows: int, paths: list[str], total: int) -> Iterator[pa.RecordBatch]:
    if paths:
        yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=paths, use_threads=False)
        return
    # None of the columns asked for is in this file: its rows still count, each without a text.
    for begin in range(0, total, rows):
        yield pa.record_batch({"": pa.nulls(min(rows, total - begin))})


def _arrow(place: Place, stream: ByteStream, stack: ExitStack) -> Table:
    if stream.head(6) == b"ARROW1":
        file = _anywhere(place, stream, "an Arrow file")
        reader = stack.enter_context(pa.ipc.open_file(_mapped(place, stack) or file))
        every = (reader.get_batch(i) for i in range(reader.num_record_batches))
        return Table(reader.schema, lambda paths, _: (_checked(batch, paths) for batch in every))
    source = _mapped(place, stack) if stream.compression is None else None
    reader = stack.enter_context(pa.ipc.open_stream(source or pa.PythonFile(_Readable(stream), mode="r")))
    return Table(reader.schema, lambda paths, _: (_checked(batch, paths) for batch in reader))


def _checked(batch: pa.RecordBatch, paths: list[str]) -> pa.RecordBatch:
    """Raise ArrowInvalid where an offset leads outside its buffer: Arrow takes them as they lie in the file."""
    batch.validate()
    for name in {path if path in batch.schema.names else path.partition(".")[0] for path in paths}:
        column = batch.column(name)
        if as_binary := _BINARY.get(column.type):
            # What is not UTF-8 costs its own row alone, and is found there.
            column = column.view(as_binary)
        column.validate(full=True)
    return batch


def _mapped(place: Place, stack: ExitStack) -> Any:
    """A file of this machine as memory, which an uncompressed one does not take however large its batches are."""
    return stack.enter_context(pa.memory_map(str(place.path))) if place.path is not None else None


def _anywhere(place: Place, stream: ByteStream, what: str) -> BinaryIO:
    """The file itself, to be read at any place; raises InputError where that is impossible."""
    if stream.compression is not None or not place.repeatable:
        raise InputError(f"The corpus {place.name} is {what} inside a stream or a compressed file; give it as a file.")
    stream.raw.seek(0)
    return stream.raw


class _Readable:
    """As much of a file object as Arrow's stream reader needs."""

    closed = False

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0 and (part := self._stream.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """The stream belongs to others."""
