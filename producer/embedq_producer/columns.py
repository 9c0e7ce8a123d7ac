"""Columns of a table as documents: ids, texts and metadata, and why a row is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from embedq_schemas.errors import DocumentErrorCode, InputError
from embedq_schemas.ipc import METADATA_TYPE
from embedq_schemas.metadata_type import is_metadata_type
from numpy.typing import NDArray

from .blocks import ReadOptions, Reject
from .damage import DamagedFileError
from .lines import is_utf8
from .pieces import Piece, with_content_ids
from .position import Position
from .template import Template

_Reasons = dict[int, tuple[DocumentErrorCode, str]]


class TableParser:
    """Turns rows of one file into pieces."""

    def __init__(self, options: ReadOptions, schema: pa.Schema, *, cells: bool = False) -> None:
        """`cells`: all values are text, as in CSV, where an empty one means null to every column but a string's."""
        self._options = options
        self._cells = cells
        self._id = find(schema, options.id_field)
        texts = options.texts.fields if options.texts else (options.text_field,)
        self._texts = {field: find(schema, field) for field in texts}
        self._metadata = [find(schema, field) for field in options.metadata]

    @property
    def paths(self) -> list[str]:
        """Dotted names of the columns that are read, each once."""
        found = [path for path in (self._id, *self._texts.values(), *self._metadata) if path is not None]
        return list(dict.fromkeys(".".join(path) for path in found))

    def sizes(self, rows: pa.RecordBatch) -> NDArray[np.int64]:
        """Bytes [n] of each row's strings."""
        total = np.zeros(rows.num_rows, dtype=np.int64)
        for path in {path for path in (self._id, *self._texts.values(), *self._metadata) if path is not None}:
            column = _column(rows, path)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if pa.types.is_string_view(column.type):
                column = column.cast(pa.large_string())
            if _is_text(column.type):
                total += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        return total

    def piece(
        self,
        rows: pa.RecordBatch,
        lines: Sequence[int],
        start: Position,
        end: Position,
        rejects: Sequence[Reject],
        nbytes: int,
    ) -> Piece:
        """Rows [n] as a piece.

        Args:
            rows: the columns `paths` name, and perhaps others.
            lines: of every ordinal from `start` to `end`.
            rejects: for the ordinals in between that have no row.
            nbytes: of the input, as blocks are measured.

        Raises:
            DamagedFileError: offsets lead outside their buffers.
        """
        first = start.ordinal
        ordinals = np.arange(first, end.ordinal, dtype=np.int64)
        if rejects:
            ordinals = np.delete(ordinals, [reject.ordinal - first for reject in rejects])
        reasons: _Reasons = {}
        ids = self._ids(rows, reasons)
        texts = self._texts_of(rows, reasons)
        metadata = [
            self._metadata_of(rows, name, path, kind, reasons)
            for name, path, kind in zip(self._options.metadata, self._metadata, self._options.types, strict=True)
        ]
        found = list(rejects)
        if reasons:
            for row, (code, message) in reasons.items():
                ordinal = int(ordinals[row])
                document_id = None if code is DocumentErrorCode.INVALID_ID else ids[row].as_py()
                found.append(Reject(ordinal, int(lines[ordinal - first]), document_id, code, message))
            found.sort(key=lambda reject: reject.ordinal)
            keep = np.ones(rows.num_rows, dtype=np.bool_)
            keep[list(reasons)] = False
            mask = pa.array(keep)
            ordinals, ids, texts = ordinals[keep], ids.filter(mask), texts.filter(mask)
            metadata = [column.filter(mask) for column in metadata]
        ids, made = with_content_ids(ids, texts)
        return Piece(start, end, ids, made, ordinals, lines, texts, metadata, found, nbytes)

    def _ids(self, rows: pa.RecordBatch, reasons: _Reasons) -> pa.StringArray:
        if self._id is None:
            return pa.nulls(rows.num_rows, pa.string())
        column = _column(rows, self._id)
        if pa.types.is_integer(column.type):
            return column.cast(pa.string())
        strings = as_strings(column)
        name = self._options.id_field
        if strings is None:
            message = f"the id field {name!r} must be a string or an integer, found a column of type {column.type}"
            _all(column, reasons, DocumentErrorCode.INVALID_ID, message)
            return pa.nulls(rows.num_rows, pa.string())
        strings = _valid(strings, reasons, name)
        empty = pc.fill_null(pc.equal(pc.binary_length(strings), 0), False)
        if not pc.any(empty).as_py():
            return strings
        if not self._cells:
            for row in np.flatnonzero(empty.to_numpy(zero_copy_only=False)).tolist():
                reasons.setdefault(row, (DocumentErrorCode.INVALID_ID, f"the id field {name!r} is empty"))
        return pc.if_else(empty, pa.scalar(None, pa.string()), strings)

    def _texts_of(self, rows: pa.RecordBatch, reasons: _Reasons) -> pa.StringArray:
        columns: dict[str, pa.StringArray] = {}
        for name, path in self._texts.items():
            column = pa.nulls(rows.num_rows, pa.string()) if path is None else _column(rows, path)
            strings = as_strings(column)
            if strings is None and self._options.texts and _is_plain(column.type):
                strings = column.cast(pa.string())
            if strings is None:
                wanted = "a string, a number or a boolean" if self._options.texts else "a string"
                message = f"the text field {name!r} must be {wanted}, found a column of type {column.type}"
                _all(column, reasons, DocumentErrorCode.INVALID_TEXT, message)
                strings = pa.nulls(rows.num_rows, pa.string())
            columns[name] = _valid(strings, reasons, name)
        template = self._options.texts
        if template is None:
            (name, texts), *_ = columns.items()
            message = f"the text field {name!r} is missing or null"
        else:
            texts = _filled(template, columns)
            message = f"the fields of the template are all missing or null: {', '.join(columns)}"
        if texts.null_count:
            for row in np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False)).tolist():
                reasons.setdefault(row, (DocumentErrorCode.MISSING_TEXT, message))
        return texts

    def _metadata_of(
        self, rows: pa.RecordBatch, name: str, path: tuple[str, ...] | None, kind: pa.DataType, reasons: _Reasons
    ) -> pa.Array:
        if path is None:
            return pa.nulls(rows.num_rows, kind)
        column = _column(rows, path)
        if (strings := as_strings(column)) is not None:
            column = _valid(strings, reasons, name)
            if self._cells and kind != METADATA_TYPE:
                column = pc.if_else(pc.equal(pc.binary_length(column), 0), pa.scalar(None, pa.string()), column)
        else:
            column = plain(column)
        converted, unfit = convert(column, kind)
        for row in unfit:
            message = f"the metadata field {name!r} is of type {kind} in this run, found {str(column[row])[:40]!r}"
            reasons.setdefault(row, (DocumentErrorCode.INVALID_METADATA, message))
        return converted


def find(schema: pa.Schema, name: str) -> tuple[str, ...] | None:
    """The path to the column of that very name, else to the one its dots lead to inside structs; None without one."""
    if name in schema.names:
        return (name,)
    path = name.split(".")
    if path[0] not in schema.names:
        return None
    kind = schema.field(path[0]).type
    for step in path[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(step) < 0:
            return None
        kind = kind.field(step).type
    return tuple(path)


def type_at(schema: pa.Schema, path: tuple[str, ...]) -> pa.DataType:
    """The type of the column at `path`."""
    kind = schema.field(path[0]).type
    for step in path[1:]:
        kind = kind.field(step).type
    return kind


def require_columns(options: ReadOptions, schema: pa.Schema, name: str) -> None:
    """Raise InputError where the first file of a corpus lacks a column that was asked for: surely a misspelt name."""
    texts = options.texts.fields if options.texts else (options.text_field,)
    wanted = [*texts, *options.metadata]
    if options.id_field != ReadOptions.id_field:
        wanted.append(options.id_field)
    for field in wanted:
        if find(schema, field) is None:
            columns = ", ".join(schema.names[:20]) + (", ..." if len(schema.names) > 20 else "")
            raise InputError(f"The corpus {name} has no column {field!r}; it has: {columns or 'none'}.")


def metadata_type_of(kind: pa.DataType) -> pa.DataType:
    """The type in which a column of type `kind` is kept: its own where possible, else text (JSON for structs)."""
    kind = _plain_type(kind)
    return kind if is_metadata_type(kind) else METADATA_TYPE


def as_strings(column: pa.Array) -> pa.StringArray | None:
    """Any column of strings as a plain one; None for other types."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return as_strings(column.dictionary_decode()) if _is_text(kind.value_type) else None
    if kind == pa.string():
        return column
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    return column.cast(pa.string()) if _is_text(kind) else None


def plain(column: pa.Array) -> pa.Array:
    """`column` without dictionaries, views and 64-bit offsets."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    wanted = _plain_type(column.type)
    return column if column.type == wanted else column.cast(wanted)


def convert(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """`column` as type `kind`, null where a value does not fit; and the rows where it does not."""
    if column.type == kind:
        return column, []
    if kind == METADATA_TYPE and not _is_plain(column.type):
        return pa.array([None if value is None else _json(value) for value in column.to_pylist()], kind), []
    try:
        return column.cast(kind), []
    except (pa.ArrowException, ValueError):
        pass
    kept: list[Any] = []
    unfit = []
    for row in range(len(column)):
        try:
            kept.append(column.slice(row, 1).cast(kind))
        except (pa.ArrowException, ValueError):
            kept.append(pa.nulls(1, kind))
            unfit.append(row)
    return pa.concat_arrays(kept) if kept else pa.nulls(0, kind), unfit


def _column(rows: pa.RecordBatch, path: tuple[str, ...]) -> pa.Array:
    column = rows.column(path[0])
    return pc.struct_field(column, list(path[1:])) if len(path) > 1 else column


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if _is_text(kind):
        return pa.string()
    if pa.types.is_null(kind):
        return METADATA_TYPE
    if pa.types.is_date64(kind):
        return pa.timestamp("ms")
    if any(is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        return pa.list_(pa.field("item", _plain_type(kind.value_type)))
    return kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(_is_text(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)) or bool(
        types.is_decimal(kind) or types.is_temporal(kind)
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _all(column: pa.Array, reasons: _Reasons, code: DocumentErrorCode, message: str) -> None:
    """Every row that has a value is refused; one without is what it is in any column."""
    for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)).tolist():
        reasons.setdefault(row, (code, message))


def _valid(strings: pa.StringArray, reasons: _Reasons, name: str) -> pa.StringArray:
    """`strings` with null where a value is not UTF-8."""
    try:
        strings.validate(full=True)
        return strings
    except pa.ArrowInvalid:
        pass
    try:
        raw = strings.view(pa.binary())
        raw.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DamagedFileError(f"column {name!r}: {' '.join(str(error).split())[:150]}") from None
    values = raw.to_pylist()
    for row, value in enumerate(values):
        if value is not None and not is_utf8(value):
            reasons.setdefault(row, (DocumentErrorCode.INVALID_UTF8, f"the field {name!r} is not UTF-8"))
            values[row] = None
    return pa.array(values, pa.binary()).cast(pa.string())


def _filled(template: Template, columns: dict[str, pa.StringArray]) -> pa.StringArray:
    parts: list[Any] = []
    for literal, field in template.parts:
        parts.append(pa.scalar(literal))
        if field is not None:
            parts.append(columns[field])
    texts = pc.binary_join_element_wise(*parts, pa.scalar(""), null_handling="replace", null_replacement="")
    given = None
    for column in columns.values():
        valid = column.is_valid()
        given = valid if given is None else pc.or_(given, valid)
    return pc.if_else(given, texts, pa.scalar(None, pa.string()))
