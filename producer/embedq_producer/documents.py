"""One line of JSON to one document, and many documents to columns.

A line is decoded straight into a struct of the wanted fields. Where that fails the line is looked at again without
haste, to say which of its parts is wrong; so the slow road never accepts what the fast one refuses, except ids too long
for the fast one and fields that appear twice (the last one counts, as in Python's json).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import msgspec
import pyarrow as pa
from embedq_schemas.errors import DocumentErrorCode

from .blocks import ReadOptions
from .json_values import json_column
from .lines import is_utf8

_CONTENT_ID_DIGITS = 32
_NULL = msgspec.Raw(b"null")
_INTEGER = re.compile(rb"-?[0-9]+")
_KINDS = {b'"': "a string", b"{": "an object", b"[": "a list", b"t": "a boolean", b"f": "a boolean", b"n": "null"}
_decode_string = msgspec.json.Decoder(str).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BadLineError(Exception):
    """A line that gives no document: the code, one clause without a full stop, and the id where it is known."""

    def __init__(self, code: DocumentErrorCode, message: str, *, document_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.document_id = document_id


class DocumentParser:
    """Decodes lines into rows: `id` (str, int or None), `text` (str) and one msgspec.Raw per metadata field."""

    def __init__(self, options: ReadOptions) -> None:
        self.id_field = options.id_field
        self.text_field = options.text_field
        self._template = options.texts
        self._metadata = tuple(zip(options.metadata, options.types, strict=True))
        self.attributes = tuple(f"metadata_{index}" for index in range(len(options.metadata)))
        extra = [(attribute, msgspec.Raw, _NULL) for attribute in self.attributes]
        rename = dict(zip(self.attributes, options.metadata, strict=True))
        texts = self._template.fields if self._template else (options.text_field,)
        fields = (options.id_field, *texts, *options.metadata)
        if self._template is None and not any("." in field for field in fields):
            rename |= {"id": options.id_field, "text": options.text_field}
            raw_fields = [("text", msgspec.Raw, _NULL), ("id", msgspec.Raw, _NULL), *extra]
            raw_row = msgspec.defstruct("RawRow", raw_fields, rename=rename, gc=False)
            self._decode_raw: Callable[[bytes], Any] = msgspec.json.Decoder(raw_row).decode
            self._fields: tuple[str, ...] = ()
        else:
            rename = {}
            self._decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
            self._fields = fields
        given_id = Annotated[str, msgspec.Meta(min_length=1)] | int | None
        # gc=False: a row holds no containers, so there is nothing in it for the collector to find.
        self._row = msgspec.defstruct("Row", [("text", str), ("id", given_id, None), *extra], rename=rename, gc=False)
        self.decode = self.examine if self._fields else msgspec.json.Decoder(self._row).decode
        """The fast road: line (bytes) to row; raises msgspec.DecodeError, RecursionError or BadLineError."""

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
        if self._fields:
            values = {field: bytes(_find(raw, field)) for field in self._fields}
            metadata = [msgspec.Raw(values[name]) for name, _ in self._metadata]
            document_id = self._id(values[self.id_field])
            text = (
                self._made_text(values, document_id)
                if self._template
                else self._text(values[self.text_field], document_id)
            )
        else:
            metadata = [getattr(raw, attribute) for attribute in self.attributes]
            document_id = self._id(bytes(raw.id))
            text = self._text(bytes(raw.text), document_id)
        return self._row(text=text, id=document_id, **dict(zip(self.attributes, metadata, strict=True)))

    def _made_text(self, values: Mapping[str, bytes], document_id: str | None) -> str:
        assert self._template is not None
        if all(values[field] == b"null" for field in self._template.fields):
            message = f"the fields of the template are all missing or null: {', '.join(self._template.fields)}"
            raise BadLineError(DocumentErrorCode.MISSING_TEXT, message, document_id=document_id)
        parts = []
        for literal, field in self._template.parts:
            parts.append(literal)
            source = values[field] if field is not None else b"null"
            if source[:1] in (b"{", b"["):
                message = f"the text field {field!r} must be a string, a number or a boolean, found {_kind(source)}"
                raise BadLineError(DocumentErrorCode.INVALID_TEXT, message, document_id=document_id)
            parts.append(_metadata_value(msgspec.Raw(source)) or "")
        return "".join(parts)

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

    def metadata_columns(self, rows: Sequence[Any]) -> tuple[list[pa.Array], dict[int, str]]:
        """One column [n] per metadata field, null where a value is null, missing or unfit; and by row what is unfit."""
        columns: list[pa.Array] = []
        unfit: dict[int, str] = {}
        for attribute, (name, kind) in zip(self.attributes, self._metadata, strict=True):
            raws = [getattr(row, attribute) for row in rows]
            if kind == pa.string():
                columns.append(pa.array([_metadata_value(raw) for raw in raws], kind))
                continue
            column, bad = json_column(raws, kind)
            columns.append(column)
            for row in bad:
                found = _kind(bytes(raws[row]))
                unfit.setdefault(row, f"the metadata field {name!r} is of type {kind} in this run, found {found}")
        return columns, unfit


class LineParser:
    """Takes a line as a text, without an id."""

    class _Row(msgspec.Struct, gc=False):
        text: str
        id: None = None

    def __init__(self, options: ReadOptions) -> None:
        self._types = options.types

    def decode(self, line: bytes) -> Any:
        """Line (UTF-8) to row."""
        if not line or line.isspace():
            # No document, but no line to refuse either: whoever asked looks at it by itself.
            raise BadLineError(DocumentErrorCode.MISSING_TEXT, "the line is blank")
        return self._Row(line.removesuffix(b"\r").decode())

    examine = decode

    def metadata_columns(self, rows: Sequence[Any]) -> tuple[list[pa.Array], dict[int, str]]:
        """All null: a line has no fields."""
        return [pa.nulls(len(rows), kind) for kind in self._types], {}


Parser = DocumentParser | LineParser


def _find(fields: Mapping[str, msgspec.Raw], name: str) -> msgspec.Raw:
    """The value of a field of that very name, else of the path that its dots make; null where there is none."""
    if (found := fields.get(name)) is not None:
        return found
    head, dot, rest = name.partition(".")
    while dot:
        inner = fields.get(head)
        if inner is not None and bytes(inner)[:1] == b"{":
            return _find(_decode_object(inner), rest)
        # A name with dots of its own may lead into an object too.
        more, dot, rest = rest.partition(".")
        head = f"{head}.{more}"
    return _NULL


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
