"""CSV and TSV: rows that may span lines, with exact positions, and no row that takes others with it."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
from embedq_schemas.errors import DocumentErrorCode

from .blocks import ReadOptions, Reject
from .changes import check_cut, ended_early
from .columns import TableParser
from .damage import DamagedFileError
from .line_files import skip_byte_order_mark
from .lines import LineBatch, split_lines
from .pieces import Piece
from .position import Position
from .streams import ByteStream
from .tables import broken_off

# For the whole process; `max_line_bytes` is the bound that counts.
csv.field_size_limit(1 << 30)


class _Line(NamedTuple):
    text: str
    size: int
    """With its newline, where it has one."""
    too_long: bool
    valid_utf8: bool
    """False: perhaps not."""


class _TooLongError(Exception):
    """A quoted field is not closed within the bound."""


class _Lines:
    """Lines for the csv module, which takes as many as a row needs; those of a broken row can be given back."""

    def __init__(self, batches: Iterator[LineBatch], max_row_bytes: int) -> None:
        self._batches = batches
        self._ahead: deque[_Line] = deque()
        self._bound = max_row_bytes
        self.taken: list[_Line] = []
        self._taken_bytes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ahead:
            self._ahead.extend(_decoded(next(self._batches), self._bound))
        line = self._ahead[0]
        if not self.taken:
            self._taken_bytes = 0
        elif line.too_long or self._taken_bytes + line.size > self._bound:
            raise _TooLongError(f"a quote is not closed within max_line_bytes = {self._bound}")
        self.taken.append(self._ahead.popleft())
        self._taken_bytes += line.size
        return line.text

    def give_back(self) -> None:
        """All lines taken but the first are to be read again."""
        self._ahead.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]


def _decoded(batch: LineBatch, longest: int) -> Iterator[_Line]:
    last = len(batch.lines) - 1
    for index, line in enumerate(batch.lines):
        size = batch.dropped_bytes or len(line)
        # Whether a long line was kept depends on how it arrived, so none of them is looked at.
        too_long = size > longest
        # What is not UTF-8 is found again as surrogates, in its own row.
        text = "\n" if too_long else line.decode("utf-8", "surrogateescape") + "\n"
        yield _Line(text, size + (batch.terminated or index < last), too_long, batch.valid_utf8)


class CsvFile:
    """A CSV file whose header was read."""

    def __init__(self, stream: ByteStream, *, delimiter: str, name: str, max_row_bytes: int) -> None:
        """Raises InputError where the header is none, DamagedFileError where it cannot be read."""
        self._name = name
        self._mark = skip_byte_order_mark(stream)
        self._lines = _Lines(split_lines(stream, max_line_bytes=max_row_bytes), max_row_bytes)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        self._max_row_bytes = max_row_bytes
        self.header: list[str] = []
        try:
            while not self.header:
                self.header = next(self._reader)
                if self._lines.taken[-1].too_long:
                    raise _TooLongError(f"it is longer than max_line_bytes = {max_row_bytes}")
        except StopIteration:
            pass
        except (csv.Error, _TooLongError) as error:
            raise DamagedFileError(f"its header is broken: {error}") from None
        if any(map(_has_surrogates, self.header)):
            raise DamagedFileError("its header is not UTF-8")

    @property
    def schema(self) -> pa.Schema:
        """All columns are strings."""
        return pa.schema([(column, pa.string()) for column in self.header])

    def pieces(self, options: ReadOptions, start: Position, *, cut: Position | None = None) -> Iterator[Piece]:
        """Pieces of the file from its beginning, `start`, to its end; as `read_table`."""
        rows = _Rows(options, self.schema, start, self._mark)
        rows.skip(self._lines.taken)
        to_cut = cut is not None and cut.line > 0
        while True:
            if to_cut and cut is not None and rows.line >= cut.line:
                check_cut(rows.reached, cut, self._name)
                yield rows.close()
                to_cut = False
            try:
                row, bad = self._next()
            except StopIteration:
                break
            except DamagedFileError as error:
                if to_cut:
                    break
                if rows.count:
                    yield rows.close()
                yield broken_off(rows.reached, error, options)
                return
            taken = self._lines.taken
            size = sum(line.size for line in taken)
            if rows.is_full_for(size):
                yield rows.close()
            rows.take(row, bad, taken)
        if to_cut:
            raise ended_early(self._name, rows.reached, cut)
        if rows.count:
            yield rows.close()

    def _next(self) -> tuple[list[str], tuple[DocumentErrorCode, str] | None]:
        """The next row and None, or why it is none."""
        self._lines.taken.clear()
        try:
            row = next(self._reader)
        except _TooLongError as error:
            self._lines.give_back()
            return [], (DocumentErrorCode.LINE_TOO_LONG, str(error))
        except csv.Error as error:
            self._lines.give_back()
            return [], (DocumentErrorCode.INVALID_ROW, f"the row is not valid CSV: {error}")
        line = self._lines.taken[0]
        if line.too_long:
            message = f"the line has {line.size - 1} bytes, more than max_line_bytes = {self._max_row_bytes}"
            return [], (DocumentErrorCode.LINE_TOO_LONG, message)
        if row and len(row) != len(self.header):
            message = f"the row has {len(row)} fields, and the header {len(self.header)}"
            return row, (DocumentErrorCode.INVALID_ROW, message)
        return row, None


class _Rows:
    """Rows on their way into a piece."""

    def __init__(self, options: ReadOptions, schema: pa.Schema, start: Position, mark: int) -> None:
        self._options = options
        self._parser = TableParser(options, schema, cells=True)
        names = [path for path in self._parser.paths if path in schema.names]
        if repeated := [column for column in names if schema.names.count(column) > 1]:
            raise DamagedFileError(f"it has two columns {repeated[0]!r}")
        self._columns = {column: schema.names.index(column) for column in names}
        self._file, self._ordinal, self._offset, self.line = start.file, start.ordinal, start.offset + mark, start.line
        self._start = start
        self._reset()

    @property
    def reached(self) -> Position:
        return Position(self._file, self._offset, self.line, self._ordinal)

    @property
    def count(self) -> int:
        return len(self._numbers)

    def is_full_for(self, size: int) -> bool:
        """Whether a row of `size` bytes belongs into the next piece."""
        return bool(self._numbers) and (
            len(self._numbers) >= self._options.block_documents or self._nbytes + size > self._options.block_bytes
        )

    def skip(self, lines: list[_Line]) -> None:
        """Lines that are no row: the header, a blank one."""
        self._offset += sum(line.size for line in lines)
        self.line += len(lines)

    def take(self, row: list[str], bad: tuple[DocumentErrorCode, str] | None, lines: list[_Line]) -> None:
        """A row, or what is wrong with it."""
        number = self.line + 1
        self.skip(lines)
        if not row and bad is None:
            return
        if (
            bad is None
            and not all(line.valid_utf8 for line in lines)
            and any(_has_surrogates(row[index]) for index in self._columns.values())
        ):
            bad = (DocumentErrorCode.INVALID_UTF8, "the row is not UTF-8")
        self._numbers.append(number)
        if bad is None:
            for column, index in self._columns.items():
                self._values[column].append(row[index])
            self._rows += 1
            self._nbytes += sum(line.size for line in lines)
        else:
            self._rejects.append(Reject(self._ordinal, number, None, *bad))
        self._ordinal += 1

    def close(self) -> Piece:
        """What was taken so far."""
        # Rows without any of the columns still count.
        columns = {name: pa.array(values, pa.string()) for name, values in self._values.items()}
        batch = pa.record_batch(columns or {"": pa.nulls(self._rows)})
        piece = self._parser.piece(batch, self._numbers, self._start, self.reached, self._rejects, self._nbytes)
        self._start = self.reached
        self._reset()
        return piece

    def _reset(self) -> None:
        self._numbers: list[int] = []
        self._rows = self._nbytes = 0
        self._rejects: list[Reject] = []
        self._values: dict[str, list[str]] = {column: [] for column in self._columns}


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
