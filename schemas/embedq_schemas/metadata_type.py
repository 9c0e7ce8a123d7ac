"""Types a metadata column may have, and their names, as a run's specification and `--metadata NAME:TYPE` write them.

A name is what Arrow calls the type: `int64`, `double`, `bool`, `string`, `date32[day]`, `timestamp[us, tz=UTC]`,
`decimal128(10, 2)`, `list<item: string>`. Lists may hold lists.
"""

from __future__ import annotations

import re

import pyarrow as pa

_MAX_DEPTH = 8
_MAX_NAME = 200
_UNITS = ("s", "ms", "us", "ns")
_SIMPLE = {
    str(kind): kind
    for kind in (
        pa.string(),
        pa.bool_(),
        *(pa.type_for_alias(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.date32(),
        *(pa.timestamp(unit) for unit in _UNITS),
    )
}
_ALIASES = {"float32": pa.float32(), "float64": pa.float64(), "float16": pa.float16(), "date32": pa.date32()}
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns), tz=([A-Za-z0-9_+:/-]{1,64})\]")
_DECIMAL = re.compile(r"decimal128\((\d{1,2}), ?(\d{1,2})\)")
_LIST = re.compile(r"list<(?:item: )?(.+)>")


def parse_metadata_type(name: str) -> pa.DataType:
    """The type of that name; raises ValueError where metadata columns cannot have it."""
    if len(name) <= _MAX_NAME:
        found = _parse(name.strip(), _MAX_DEPTH)
        if found is not None:
            return found
    raise ValueError(f"{name[:_MAX_NAME]!r} is no type a metadata column can have")


def _parse(name: str, depth: int) -> pa.DataType | None:
    if (simple := _SIMPLE.get(name) or _ALIASES.get(name)) is not None:
        return simple
    if match := _ZONED.fullmatch(name):
        return pa.timestamp(match[1], tz=match[2])
    if match := _DECIMAL.fullmatch(name):
        precision, scale = int(match[1]), int(match[2])
        return pa.decimal128(precision, scale) if 1 <= precision <= 38 and scale <= precision else None
    if depth and (match := _LIST.fullmatch(name)):
        item = _parse(match[1], depth - 1)
        return None if item is None else pa.list_(pa.field("item", item))
    return None


def is_metadata_type(kind: pa.DataType) -> bool:
    """Whether a metadata column may have exactly this type."""
    try:
        return bool(parse_metadata_type(str(kind)) == kind)
    except ValueError:
        return False
