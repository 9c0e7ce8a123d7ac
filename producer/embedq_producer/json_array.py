"""One JSON array of documents, element by element, in constant memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .damage import DamagedFileError
from .lines import READ_BYTES, LineBatch, is_utf8
from .streams import ByteStream

# A string is one token, so that brackets inside it do not count. An unfinished one is a lone quote.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\],]', re.DOTALL)
_OPEN, _CLOSE, _COMMA, _QUOTE = b"{[", b"}]", b",", b'"'


def split_elements(stream: ByteStream, *, max_line_bytes: int) -> Iterator[LineBatch]:
    """Elements of the array that `stream` begins with, as if they were lines.

    What a broken element holds is found by its brackets, so it takes no other with it unless a quote or a bracket of
    its own is missing. Raises DamagedFileError where the array is not closed, or something follows it, and InputError
    as `ByteStream.read` does. Holds one read and one element of at most `max_line_bytes`, unless one is longer: the
    rest of it is dropped while it is read.
    """
    text = stream.head(1 << 16)
    opening = text.index(b"[")
    stream.read(opening + 1)
    buffer = b""
    searched, begin, first, depth = 0, 0, 0, 1
    dropped = 0
    wanted = READ_BYTES
    elements = 0
    while chunk := stream.read(wanted):
        buffer += chunk
        lines: list[bytes] = []
        incomplete = False
        for token in _TOKEN.finditer(buffer, searched):
            mark = buffer[token.start() : token.start() + 1]
            if mark == _QUOTE:
                if token.end() - token.start() == 1:
                    searched, incomplete = token.start(), True
                    break
                continue
            if mark in _OPEN:
                depth += 1
            elif mark in _CLOSE:
                depth -= 1
            if depth == 0 or (depth == 1 and mark == _COMMA):
                element = buffer[begin : token.start()]
                if dropped:
                    yield LineBatch([b""], valid_utf8=True, dropped_bytes=dropped + len(element))
                    dropped = 0
                    elements += 1
                    first = token.end()
                elif depth or elements or lines or element.strip():
                    # A missing element is no blank line: a lone comma is no JSON.
                    lines.append(element if element.strip() else _COMMA)
                begin = token.end()
                if depth == 0:
                    break
        if not incomplete:
            searched = len(buffer)
        if lines:
            elements += len(lines)
            yield LineBatch(lines, valid_utf8=is_utf8(memoryview(buffer)[first:begin]))
        if depth == 0:
            _check_end(buffer[begin:], stream)
            return
        buffer, searched, begin, first = buffer[begin:], searched - begin, 0, 0
        if len(buffer) > max_line_bytes:
            # Of an unfinished string its opening is enough to find its end, and a backslash that escapes what follows.
            escaped = (len(buffer) - len(buffer.rstrip(b"\\"))) % 2
            rest = _QUOTE + b"\\" * escaped if incomplete else b""
            dropped += len(buffer) - len(rest)
            buffer, searched = rest, 0
        # Doubling keeps the work linear where one element is far longer than a read.
        wanted = min(max(READ_BYTES, len(buffer)), max_line_bytes)
    raise DamagedFileError("the file ends inside the JSON array")


def _check_end(rest: bytes, stream: ByteStream) -> None:
    while not rest.strip():
        rest = stream.read(READ_BYTES)
        if not rest:
            return
    raise DamagedFileError("something follows the JSON array")
