"""One Arrow record batch as bytes, and back with nothing trusted.

What comes from Redis or from a file is input: the decoder accepts exactly one record batch of exactly the expected
columns, and validates every offset and every UTF-8 sequence before a caller may slice with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from embedq_schemas.errors import CodecError, UnsupportedVersionError
from embedq_schemas.names import SCHEMA_VERSION

KIND = b"embedq.kind"
VERSION = b"embedq.version"
#: A decoded batch may not exceed this: an entry is a unit of work, not a file.
MAX_BATCH_BYTES = 1 << 30

METADATA_TYPE = pa.string()
"""Type of every kept metadata column in this version."""


def encode(batch: pa.RecordBatch, kind: str, **metadata: str) -> memoryview:
    """`batch` as one Arrow IPC stream whose schema metadata says what it is; the view owns its memory."""
    stamped = {KIND: kind.encode(), VERSION: str(SCHEMA_VERSION).encode()}
    stamped.update({key.encode(): value.encode() for key, value in metadata.items()})
    batch = batch.replace_schema_metadata(stamped)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def decode(
    payload: bytes | memoryview, kind: str, columns: Mapping[str, pa.DataType], *, free: bool = True
) -> pa.RecordBatch:
    """The record batch inside `payload`, fully validated.

    Args:
        payload: an Arrow IPC stream with one record batch.
        kind: the `embedq.kind` its schema must carry.
        columns: required columns, in order, none of whose values may be null.
        free: whether further columns of `METADATA_TYPE` may follow.

    Raises:
        UnsupportedVersionError: a newer major version.
        CodecError: anything else that is not exactly such a batch.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            _check_schema(reader.schema, kind, columns, free)
            batch = reader.read_next_batch()
            try:
                reader.read_next_batch()
            except StopIteration:
                pass
            else:
                raise CodecError(f"{kind}: more than one record batch")
        if batch.nbytes > MAX_BATCH_BYTES:
            raise CodecError(f"{kind}: {batch.nbytes} bytes decoded, above the limit of {MAX_BATCH_BYTES}")
        batch.validate(full=True)
    except StopIteration:
        raise CodecError(f"{kind}: no record batch") from None
    except (pa.ArrowException, ValueError, TypeError, OSError, MemoryError, OverflowError, KeyError) as error:
        raise CodecError(f"{kind}: not a valid Arrow stream: {str(error)[:200]}") from None
    for name in columns:
        if batch.column(name).null_count:
            raise CodecError(f"{kind}: column {name} holds nulls")
    return batch


def _check_schema(schema: pa.Schema, kind: str, columns: Mapping[str, pa.DataType], free: bool) -> None:
    stamped = schema.metadata or {}
    version = stamped.get(VERSION, b"").decode("ascii", "replace")
    if stamped.get(KIND) != kind.encode():
        raise CodecError(f"{kind}: the payload says it is {stamped.get(KIND, b'nothing')!r}")
    if version != str(SCHEMA_VERSION):
        raise UnsupportedVersionError(f"{kind}: version {version[:20]!r}; this build knows {SCHEMA_VERSION}")
    if len(set(schema.names)) != len(schema.names):
        raise CodecError(f"{kind}: a column name occurs twice")
    if schema.names[: len(columns)] != list(columns):
        raise CodecError(f"{kind}: columns {schema.names[: len(columns)]}, expected {list(columns)}")
    for name, expected in columns.items():
        if schema.field(name).type != expected:
            raise CodecError(f"{kind}: column {name} is {schema.field(name).type}, expected {expected}")
    for field in list(schema)[len(columns) :]:
        if not free or field.type != METADATA_TYPE:
            raise CodecError(f"{kind}: unexpected column {field.name} of type {field.type}")
