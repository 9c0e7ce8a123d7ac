"""Lines to blocks: which lines belong together, which decode, and where each block ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
from embedq_schemas.errors import DocumentErrorCode

from .blocks import ReadOptions, Reject
from .documents import BadLineError, Parser, check_utf8
from .lines import LineBatch
from .position import Position


@dataclass(slots=True)
class DecodedBlock:
    """The decoded lines of one block, before ids are compared."""

    start: Position
    end: Position
    rows: list[Any] = field(default_factory=list)
    """Rows of `DocumentParser`, in order."""
    rejects: list[Reject] = field(default_factory=list)
    line_numbers: list[int] = field(default_factory=list)
    """1-based, of every non-blank line, rejected ones included."""
    nbytes: int = 0


class BlockAssembler:
    """Takes batches of lines and gives blocks.

    A block is closed by the line that no longer fits, so what it holds depends on where it starts and on the options
    alone, never on how the input happened to arrive. Blank lines belong to the block before them.
    """

    def __init__(self, parser: Parser, options: ReadOptions, start: Position, *, skipped_bytes: int = 0) -> None:
        """`skipped_bytes` lie between `start` and the first line: a byte order mark."""
        self._parser = parser
        self._options = options
        self._file, self._line, self._ordinal = start.file, start.line, start.ordinal
        self._offset = start.offset + skipped_bytes
        self._bytes = 0
        self._block = DecodedBlock(start, start)

    def feed(self, batch: LineBatch) -> Iterator[DecodedBlock]:
        """Blocks that this batch closes."""
        lines, longest = batch.lines, self._options.max_line_bytes
        sizes = [batch.dropped_bytes] if batch.dropped_bytes else list(map(len, lines))
        too_long = max(sizes) > longest
        # A line that is not kept takes no room in the block.
        kept = [size if size <= longest else 0 for size in sizes] if too_long else sizes
        begin = 0
        while begin < len(lines):
            end = begin + self._fitting(kept, begin)
            if end == begin:
                if not self._is_blank(lines[begin], sizes[begin]):
                    yield self._close()
                    continue
                end = begin + 1
            checked = batch.valid_utf8 and not too_long
            if not (checked and self._take_all(lines[begin:end], sum(sizes[begin:end]))):
                for line, size in zip(lines[begin:end], sizes[begin:end], strict=True):
                    self._take(line, size, checked=checked)
            begin = end
        if not batch.terminated:
            self._offset -= 1

    def finish(self) -> DecodedBlock:
        """The last block, which may hold no line."""
        return self._close()

    def _fitting(self, kept: list[int], begin: int) -> int:
        count = len(self._block.line_numbers)
        room = self._options.block_documents - count
        sums = list(accumulate(kept[begin : begin + room], initial=self._bytes))
        return max(bisect_right(sums, self._options.block_bytes, lo=1) - 1, 0 if count else 1)

    def _close(self) -> DecodedBlock:
        block = self._block
        block.nbytes = self._bytes
        block.end = Position(self._file, self._offset, self._line, self._ordinal)
        self._block = DecodedBlock(block.end, block.end)
        self._bytes = 0
        return block

    def _take_all(self, lines: list[bytes], size: int) -> bool:
        """Take the lines if every one of them is a document, else none."""
        try:
            rows = list(map(self._parser.decode, lines))
        except (msgspec.DecodeError, RecursionError, BadLineError):
            return False
        count = len(rows)
        self._block.rows += rows
        self._block.line_numbers += range(self._line + 1, self._line + count + 1)
        self._offset += size + count
        self._line += count
        self._ordinal += count
        self._bytes += size
        return True

    def _take(self, line: bytes, size: int, *, checked: bool) -> None:
        self._offset += size + 1
        self._line += 1
        if self._is_blank(line, size):
            return
        block = self._block
        block.line_numbers.append(self._line)
        try:
            block.rows.append(self._decode(line, size, checked))
        except BadLineError as bad:
            block.rejects.append(Reject(self._ordinal, self._line, bad.document_id, bad.code, bad.message))
        self._ordinal += 1
        self._bytes += size if size <= self._options.max_line_bytes else 0

    def _is_blank(self, line: bytes, size: int) -> bool:
        # A line above the bound may have been dropped unseen, so none of them counts as blank.
        return size <= self._options.max_line_bytes and (size == 0 or line.isspace())

    def _decode(self, line: bytes, size: int, checked: bool) -> Any:
        if size > self._options.max_line_bytes:
            message = f"the line has {size} bytes, more than max_line_bytes = {self._options.max_line_bytes}"
            raise BadLineError(DocumentErrorCode.LINE_TOO_LONG, message)
        if not checked:
            check_utf8(line)
        try:
            return self._parser.decode(line)
        except (msgspec.DecodeError, RecursionError):
            return self._parser.examine(line)
