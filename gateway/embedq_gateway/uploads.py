"""Multipart uploads, written to disk as they arrive; only the short form fields are held in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from embedq_gateway.body import bounded, require_content_type
from embedq_gateway.errors import ApiError
from embedq_gateway.files import Draft

_CHUNK_BYTES = 1 << 20
_FRAME_BYTES = 64 << 10
"""What the form's boundaries and fields may add to the file itself."""
_MOST_FIELD_BYTES = 4096
_MOST_FIELDS = 32
_FILE = "file"


class UploadForm:
    """A form with one file and a few short fields, parsed as it comes."""

    def __init__(self, boundary: bytes, draft: Draft) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.complete = False
        self._draft = draft
        self._name = ""
        self._value = bytearray()
        self._header = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_end": self._on_end,
            },
        )

    def write(self, data: bytes) -> None:
        """Take in the next bytes; raises ApiError 400, StorageError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, "invalid_form", f"The multipart form is broken: {error}.") from None

    def _on_part_begin(self) -> None:
        self._headers = {}
        self._name = ""
        self._value = bytearray()

    def _on_header_end(self) -> None:
        name, value = (bytes(part) for part in self._header)
        self._header = (bytearray(), bytearray())
        self._headers[name.lower()] = value

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name")
        if kind != b"form-data" or not name:
            raise ApiError(400, "invalid_form", "A part of the form has no name.")
        self._name = name.decode("utf-8", "replace")
        if self._name in self.fields or (self._name == _FILE and self.filename is not None):
            raise ApiError(400, "invalid_form", f"The field `{self._name[:100]}` occurs twice.")
        if len(self.fields) >= _MOST_FIELDS:
            raise ApiError(400, "invalid_form", f"The form has more than {_MOST_FIELDS} fields.")
        if self._name == _FILE:
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = filename.replace("\\", "/").rpartition("/")[2][:255] or "file"

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._draft.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MOST_FIELD_BYTES:
            raise ApiError(400, "invalid_form", f"The field `{self._name[:100]}` is too long.")

    def _on_part_end(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self.complete = True


async def receive_upload(request: Request, draft: Draft, *, max_file_bytes: int, timeout_s: float) -> UploadForm:
    """Read the form of `request`; its file goes into `draft`. Raises ApiError 400, 408, 413, 415, StorageError."""
    content_type = require_content_type(request, "multipart/form-data")
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise ApiError(400, "invalid_form", "The content type names no boundary.")
    try:
        form = UploadForm(boundary, draft)
    except FormParserError as error:
        raise ApiError(400, "invalid_form", f"The multipart form is broken: {error}.") from None
    held = bytearray()
    async for chunk in bounded(request, max_file_bytes + _FRAME_BYTES, timeout_s):
        held += chunk
        if len(held) >= _CHUNK_BYTES:
            await asyncio.to_thread(form.write, bytes(held))
            held.clear()
    await asyncio.to_thread(form.write, bytes(held))
    if not form.complete:
        raise ApiError(400, "invalid_form", "The form is not complete.")
    if form.filename is None:
        raise ApiError(400, "missing_field", "The field `file` is missing.", param="file")
    if draft.size > max_file_bytes:
        raise ApiError(413, "request_too_large", f"The file is larger than {max_file_bytes:,} bytes.", param="file")
    return form


def expiry(fields: dict[str, str], *, prefix: str = "expires_after") -> int | None:
    """Seconds of a form's `expires_after[anchor]=created_at` and `expires_after[seconds]`; raises ApiError 400."""
    anchor, seconds = fields.get(f"{prefix}[anchor]"), fields.get(f"{prefix}[seconds]")
    return None if anchor is None and seconds is None else checked_expiry(anchor, seconds, prefix)


def checked_expiry(anchor: Any, seconds: Any, param: str) -> int:
    """Seconds from an hour to 30 days, as OpenAI bounds them; raises ApiError 400."""
    text = str(seconds)
    if anchor != "created_at" or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ApiError(400, "invalid_value", f"`{param}` needs `anchor` created_at and `seconds`.", param=param)
    if not 3600 <= int(text) <= 30 * 86400:
        raise ApiError(400, "invalid_value", f"`{param}.seconds` must be 3600 to 2592000.", param=param)
    return int(text)
