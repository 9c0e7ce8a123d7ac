"""Files of lines: JSON lines, elements of a JSON array, plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from embedq_schemas.errors import DocumentErrorCode

from .assembly import BlockAssembler, DecodedBlock
from .blocks import ReadOptions, Reject
from .changes import check_cut, ended_early
from .damage import DamagedFileError
from .documents import Parser
from .lines import LineBatch
from .position import Position
from .streams import ByteStream

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def skip_byte_order_mark(stream: ByteStream) -> int:
    """Read past the mark at the beginning of a text; returns its size, 0 where there is none."""
    if stream.head(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
        return 0
    return len(stream.read(len(_BYTE_ORDER_MARK)))


def decode_lines(
    batches: Iterable[LineBatch],
    parser: Parser,
    options: ReadOptions,
    start: Position,
    *,
    name: str,
    skipped_bytes: int = 0,
    cut: Position | None = None,
) -> Iterator[DecodedBlock]:
    """Blocks of one file, from `start`, its beginning, to its end; an empty file has none.

    With `cut` a block ends there. Damage ends the last block with a reject that stands for the rest of the file.
    Raises InputError where `cut` is no position of this file.
    """
    assembler = BlockAssembler(parser, options, start, skipped_bytes=skipped_bytes)
    to_cut = cut.line if cut is not None else 0
    try:
        for batch in batches:
            if to_cut:
                before, batch = batch.split(to_cut)
                to_cut -= len(before.lines)
                yield from assembler.feed(before)
                if to_cut == 0:
                    block = assembler.finish()
                    check_cut(block.end, cut, name)
                    yield block
            if batch.lines:
                yield from assembler.feed(batch)
    except DamagedFileError as error:
        if to_cut == 0:
            yield _broken_off(assembler.finish(), error)
            return
    if to_cut:
        raise ended_early(name, assembler.finish().end, cut)
    last = assembler.finish()
    if last.line_numbers:
        yield last


def _broken_off(block: DecodedBlock, error: DamagedFileError) -> DecodedBlock:
    end = block.end
    message = f"the rest of the file cannot be read: {error}"
    block.rejects.append(Reject(end.ordinal, end.line + 1, None, DocumentErrorCode.UNREADABLE_FILE, message))
    block.line_numbers.append(end.line + 1)
    block.end = Position(end.file + 1, 0, 0, end.ordinal + 1)
    return block
