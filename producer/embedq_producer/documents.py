"""One line of JSON to one document, and many documents to columns.

A line is decoded straight into a struct of the wanted fields. Where that fails the line is looked at again without
haste, to say which of its parts is wrong; so the slow road never accepts what the fast one refuses, except ids too long
for the fast one and fields that appear twice (the last one counts, as in Python's json).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import msgspec
import pyarrow as pa
from embedq_schemas.errors import DocumentErrorCode

from .lines import is_utf8

_CONTENT_ID_DIGITS = 32
_NULL = msgspec.Raw(b"null")
_INTEGER = re.compile(rb"-?[0-9]+")
_KINDS = {b'"': "a string", b"{": "an object", b"[": "a list", b"t": "a boolean", b"f": "a boolean", b"n": "null"}
_decode_string = msgspec.json.Decoder(str).decode


class BadLineError(Exception):
    """A line that gives no document: the code, one clause without a full stop, and the id where it is known."""

    def __init__(self, code: DocumentErrorCode, message: str, *, document_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.document_id = document_id


class DocumentParser:
    """Decodes lines into rows: `id` (str, int or None), `text` (str) and one msgspec.Raw per metadata field."""

    def __init__(self, id_field: str, text_field: str, metadata: Sequence[str]) -> None:
        self.id_field = id_field
        self.text_field = text_field
        self.metadata = tuple(metadata)
        self._attributes = tuple(f"metadata_{index}" for index in range(len(metadata)))
        rename = {"id": id_field, "text": text_field, **dict(zip(self._attributes, metadata, strict=True))}
        extra = [(attribute, msgspec.Raw, _NULL) for attribute in self._attributes]
        given_id = Annotated[str, msgspec.Meta(min_length=1)] | int | None
        # gc=False: a row holds no containers, so there is nothing in it for the collector to find.
        self._row = msgspec.defstruct("Row", [("text", str), ("id", given_id, None), *extra], rename=rename, gc=False)
        raw_fields = [("text", msgspec.Raw, _NULL), ("id", msgspec.Raw, _NULL), *extra]
        raw_row = msgspec.defstruct("RawRow", raw_fields, rename=rename, gc=False)
        self.decode = msgspec.json.Decoder(self._row).decode
        """The fast road: line (bytes) to row; raises msgspec.DecodeError or RecursionError."""
        self._decode_raw = msgspec.json.Decoder(raw_row).decode

    def examine(self, line: bytes) -> Any:
        """The slow road, for a line that `decode` refused: a row, or BadLineError with the reason."""
        try:
            raw: Any = self._decode_raw(line)
        except RecursionError:
            raise BadLineError(DocumentErrorCode.INVALID_JSON, "the line is nested too deeply") from None
        except msgspec.ValidationError:
            raise BadLineError(DocumentErrorCode.INVALID_JSON, "the line is not a JSON object") from None
        except msgspec.DecodeError as error:
            if _escapes_lone_surrogate(line):
                message = "the line escapes a lone surrogate, which is no character"
                raise BadLineError(DocumentErrorCode.INVALID_UTF8, message) from None
            reason = str(error).removeprefix("JSON is malformed: ").lower()
            raise BadLineError(DocumentErrorCode.INVALID_JSON, f"the line is not valid JSON: {reason}") from None
        document_id = self._id(bytes(raw.id))
        text = self._text(bytes(raw.text), document_id)
        metadata = {attribute: getattr(raw, attribute) for attribute in self._attributes}
        return self._row(text=text, id=document_id, **metadata)

    def _id(self, source: bytes) -> str | None:
        if source == b"null":
            return None
        if source.startswith(b'"'):
            if document_id := _decode_string(source):
                return document_id
            raise BadLineError(DocumentErrorCode.INVALID_ID, f"the id field {self.id_field!r} is empty")
        # Digits are kept as they are: an integer of any size is exact, and Python limits how long a one it converts.
        if _INTEGER.fullmatch(source):
            return "0" if source == b"-0" else source.decode()
        message = f"the id field {self.id_field!r} must be a string or an integer, found {_kind(source)}"
        raise BadLineError(DocumentErrorCode.INVALID_ID, message)

    def _text(self, source: bytes, document_id: str | None) -> str:
        if source.startswith(b'"'):
            return _decode_string(source)
        if source == b"null":
            code, message = DocumentErrorCode.MISSING_TEXT, f"the text field {self.text_field!r} is missing or null"
        else:
            message = f"the text field {self.text_field!r} must be a string, found {_kind(source)}"
            code = DocumentErrorCode.INVALID_TEXT
        raise BadLineError(code, message, document_id=document_id)

    def metadata_columns(self, rows: Sequence[Any]) -> list[pa.StringArray]:
        """One string column [n] per metadata field: strings as they are, null and missing as null, else JSON source."""
        return [
            pa.array([_metadata_value(getattr(row, attribute)) for row in rows], pa.string())
            for attribute in self._attributes
        ]


def document_ids(rows: Sequence[Any]) -> tuple[pa.StringArray, set[int]]:
    """The ids [n] of rows [n], and the indices of the rows that had none and got one made from their text."""
    ids = [row.id for row in rows]
    made: set[int] = set()
    if set(map(type, ids)) != {str}:
        for index, document_id in enumerate(ids):
            if document_id is None:
                made.add(index)
                ids[index] = content_id(rows[index].text)
            elif type(document_id) is int:
                ids[index] = str(document_id)
    return pa.array(ids, pa.string()), made


def content_id(text: str) -> str:
    """The id of a document that brings none: the first 32 hex digits of the SHA-256 of its UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()[:_CONTENT_ID_DIGITS]


def check_utf8(line: bytes) -> None:
    """Raise BadLineError if the line is not UTF-8."""
    if is_utf8(line):
        return
    try:
        line.decode()
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}"
        raise BadLineError(DocumentErrorCode.INVALID_UTF8, message) from None


def _metadata_value(raw: msgspec.Raw) -> str | None:
    source = bytes(raw)
    if source.startswith(b'"'):
        return _decode_string(source)
    return None if source == b"null" else source.decode()


def _kind(source: bytes) -> str:
    return _KINDS.get(source[:1], "a number with a fraction or exponent" if _is_fraction(source) else "a number")


def _is_fraction(source: bytes) -> bool:
    return any(mark in source for mark in b".eE")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _escapes_lone_surrogate(line: bytes) -> bool:
    # Python's json takes lone surrogates and is otherwise as strict as msgspec once NaN is refused and numbers stay
    # text: what it accepts and msgspec does not is a lone surrogate.
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant, parse_int=str, parse_float=str)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False
