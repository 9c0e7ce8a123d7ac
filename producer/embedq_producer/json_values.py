"""JSON values of one field as a column of a fixed type, and the type that suits the values of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from types import GenericAlias
from typing import Any

import msgspec
import pyarrow as pa
from embedq_schemas.ipc import METADATA_TYPE

_UNFIT = (msgspec.DecodeError, pa.ArrowException, OverflowError, ValueError, TypeError, RecursionError)
_NULL = b"null"
_decode_any = msgspec.json.Decoder().decode
_INT64 = range(-(1 << 63), 1 << 63)


def json_column(raws: Sequence[msgspec.Raw], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """A column of type `kind` [n], null where a value is null or does not fit; and the rows that do not fit."""
    wanted = _python_type(kind)
    try:
        values = msgspec.json.decode(b"[" + b",".join(raws) + b"]", type=list[wanted | None])  # type: ignore[valid-type]
        return pa.array(values, kind), []
    except _UNFIT:
        pass
    decode = msgspec.json.Decoder(wanted | None).decode
    kept: list[Any] = []
    unfit = []
    for row, raw in enumerate(raws):
        try:
            value = decode(raw)
            pa.array([value], kind)
        except _UNFIT:
            value = None
            unfit.append(row)
        kept.append(value)
    return pa.array(kept, kind), unfit


def infer_type(raws: Sequence[msgspec.Raw]) -> pa.DataType | None:
    """int64, double, bool, string, or a list of one of them, where all values are that; else string, as JSON source.

    None where there is no value.
    """
    try:
        values = [_decode_any(raw) for raw in raws if bytes(raw) != _NULL]
    except (msgspec.DecodeError, RecursionError):
        return METADATA_TYPE
    return _infer(values) or METADATA_TYPE if values else None


def _infer(values: Sequence[Any]) -> pa.DataType | None:
    kinds = set(map(type, values))
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int} and all(value in _INT64 for value in values):
        return pa.int64()
    if kinds in ({float}, {int, float}):
        return pa.float64()
    if kinds == {str}:
        return pa.string()
    if kinds == {list}:
        items = [item for value in values for item in value if item is not None]
        item_type = _infer(items)
        return None if item_type is None else pa.list_(pa.field("item", item_type))
    return None


def _python_type(kind: pa.DataType) -> Any:
    """What msgspec decodes a JSON value to that fits a column of type `kind`."""
    if pa.types.is_boolean(kind):
        return bool
    if pa.types.is_integer(kind):
        return int
    if pa.types.is_floating(kind):
        return float
    if pa.types.is_timestamp(kind):
        return datetime
    if pa.types.is_date(kind):
        return date
    if pa.types.is_decimal(kind):
        return Decimal
    if pa.types.is_list(kind):
        item: Any = _python_type(kind.value_type) | None
        return GenericAlias(list, item)
    return str
