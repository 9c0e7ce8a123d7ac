"""The lines of a batch's input file: one request each, as the OpenAI Batch API defines them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import msgspec

ENDPOINT = "/v1/embeddings"
MAX_CUSTOM_ID_CHARS = 512


class BatchLine(msgspec.Struct, frozen=True):
    """One request. Further fields are ignored."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(BatchLine)


class LineError(Exception):
    """A line that is no request at all."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def read_lines(file: BinaryIO, most_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """(1-based line number, byte offset, line) of the lines that are not blank.

    A line above `most_bytes` comes cut, so that no line has to fit into memory.
    """
    number = offset = 0
    while line := file.readline(most_bytes + 1):
        number += 1
        start = offset
        offset += len(line)
        whole = line
        while len(line) > most_bytes and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
            offset += len(line)
            if not line:
                break
        if whole.strip():
            yield number, start, whole


def decode_line(line: bytes, most_bytes: int) -> BatchLine:
    """The request of a line; raises LineError."""
    if len(line) > most_bytes:
        raise LineError("line_too_long", f"The line is longer than {most_bytes:,} bytes.")
    try:
        request = _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise LineError("invalid_request", f"The line is not a request: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"The line is not valid JSON: {error}.") from None
    if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"`custom_id` must have 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise LineError("invalid_custom_id", message, "custom_id")
    if request.method != "POST":
        raise LineError("invalid_method", f"`method` is {request.method[:40]!r}; only POST is known.", "method")
    if request.url != ENDPOINT:
        raise LineError("mismatched_url", f"`url` is {request.url[:80]!r}; this batch is for {ENDPOINT}.", "url")
    return request
