"""One Arrow record batch as bytes, and back with nothing trusted.

What comes from Redis or from a file is input: the decoder accepts exactly one record batch of exactly the expected
columns, and validates every offset and every UTF-8 sequence before a caller may slice with them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import pyarrow as pa

from embedq_schemas.errors import CodecError, UnsupportedVersionError
from embedq_schemas.metadata_type import is_metadata_type
from embedq_schemas.names import SCHEMA_VERSION

KIND = b"embedq.kind"
VERSION = b"embedq.version"
#: A decoded batch may not exceed this: an entry is a unit of work, not a file.
MAX_BATCH_BYTES = 1 << 30

_INVALID = (pa.ArrowException, ValueError, TypeError, OSError, MemoryError, OverflowError, KeyError, struct.error)

METADATA_TYPE = pa.string()
"""Type of a metadata column where the run names no other."""


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
    payload: bytes | memoryview, kind: str, *alternatives: Mapping[str, pa.DataType], free: bool = True
) -> pa.RecordBatch:
    """The record batch inside `payload`, fully validated.

    Args:
        payload: an Arrow IPC stream with one record batch.
        kind: the `embedq.kind` its schema must carry.
        alternatives: required columns, in order, none of whose values may be null; the first set whose names match.
        free: whether metadata columns may follow, of types that `is_metadata_type` allows.

    Raises:
        UnsupportedVersionError: a newer major version.
        CodecError: anything else that is not exactly such a batch.
    """
    try:
        buffer = pa.py_buffer(payload)
        _check_messages(buffer, kind)
        with pa.ipc.open_stream(buffer) as reader:
            columns = _choose(reader.schema, alternatives)
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
    except _INVALID as error:
        raise CodecError(f"{kind}: not a valid Arrow stream: {str(error)[:200]}") from None
    for name in columns:
        if batch.column(name).null_count:
            raise CodecError(f"{kind}: column {name} holds nulls")
    return batch


def _check_messages(buffer: pa.Buffer, kind: str) -> None:
    """Refuse compressed bodies before anything is decompressed: a few kilobytes of zstd can claim gigabytes."""
    for message in pa.ipc.MessageReader.open_stream(buffer):
        if message.type == "record batch" and _is_compressed(memoryview(message.metadata)):
            raise CodecError(f"{kind}: the body is compressed; send it uncompressed")
        if message.type not in ("schema", "record batch"):
            raise CodecError(f"{kind}: unexpected {message.type} message")


def _is_compressed(metadata: memoryview) -> bool:
    """Whether a record batch message's flatbuffer has `RecordBatch.compression` (Arrow format, Message.fbs)."""
    root: int = struct.unpack_from("<I", metadata, 0)[0]
    header = _field(metadata, root, 2)
    if not header:
        return False
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _field(metadata, batch, 3) != 0


def _field(flatbuffer: memoryview, table: int, index: int) -> int:
    """Position of a table's field in a flatbuffer; 0 where it is absent."""
    vtable = table - struct.unpack_from("<i", flatbuffer, table)[0]
    slot = 4 + 2 * index
    if slot + 2 > struct.unpack_from("<H", flatbuffer, vtable)[0]:
        return 0
    offset: int = struct.unpack_from("<H", flatbuffer, vtable + slot)[0]
    return table + offset if offset else 0


def _choose(schema: pa.Schema, alternatives: Sequence[Mapping[str, pa.DataType]]) -> Mapping[str, pa.DataType]:
    matching = (columns for columns in alternatives if schema.names[: len(columns)] == list(columns))
    return next(matching, alternatives[0])


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
        if not free or not is_metadata_type(field.type):
            raise CodecError(f"{kind}: unexpected column {field.name} of type {field.type}")
