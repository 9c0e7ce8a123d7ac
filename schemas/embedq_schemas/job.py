"""A job: up to N documents of one run, as Arrow IPC; JSON is accepted from producers in other languages.

Columns: `id` string, `ordinal` int64 (position in the run's input), `text` string, then metadata columns (string).
JSON form: `{"v": 1, "documents": [{"id": "a", "ordinal": 0, "text": "...", "metadata": {"lang": "en"}}, ...]}`;
`id` and `text` are required strings, `ordinal` (from 0) defaults to the position in the list, `metadata` values are
strings or null.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import pyarrow as pa

from embedq_schemas import ipc
from embedq_schemas.errors import CodecError, UnsupportedVersionError
from embedq_schemas.names import MAX_METADATA_COLUMNS, RESERVED_COLUMNS, SCHEMA_VERSION
from embedq_schemas.versions import refuse_other_version

KIND = "job"
#: Values of all metadata columns of one job: a few sparse documents must not unfold into a table that fills memory.
MAX_METADATA_VALUES = 1 << 24
COLUMNS = {"id": pa.string(), "ordinal": pa.int64(), "text": pa.string()}


class Codec(StrEnum):
    """How an entry's payload is written."""

    ARROW = "arrow"
    JSON = "json"


class _JsonDocument(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    text: str
    ordinal: int | None = None
    metadata: dict[str, str | None] = {}


class _JsonJob(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    documents: list[_JsonDocument]


_json_decoder = msgspec.json.Decoder(_JsonJob)


def encode_job(documents: pa.RecordBatch) -> memoryview:
    """`documents` (columns as in the module docstring) as an Arrow job payload."""
    return ipc.encode(documents, KIND)


def decode_job(payload: bytes | memoryview, codec: str) -> pa.RecordBatch:
    """The documents of a job payload, validated.

    Raises:
        UnsupportedVersionError: a codec or major version this build does not know.
        CodecError: the payload is not a job, or is empty.
    """
    if codec == Codec.ARROW:
        documents = ipc.decode(payload, KIND, COLUMNS)
        _check_metadata_names(documents.schema.names[len(COLUMNS) :])
    elif codec == Codec.JSON:
        documents = _decode_json(payload)
    else:
        raise UnsupportedVersionError(f"job codec {codec[:40]!r}; this build knows arrow and json")
    if documents.num_rows == 0:
        raise CodecError("job: no documents")
    if documents.column("ordinal").to_numpy().min() < 0:
        raise CodecError("job: a negative ordinal")
    return documents


def _decode_json(payload: bytes | memoryview) -> pa.RecordBatch:
    try:
        job = _json_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refuse_other_version(payload, "v", "job")
        raise CodecError(f"job: not a JSON job: {str(error)[:200]}") from None
    if job.v != SCHEMA_VERSION:
        raise UnsupportedVersionError(f"job: version {job.v}; this build knows {SCHEMA_VERSION}")
    names = list(dict.fromkeys(name for document in job.documents for name in document.metadata))
    _check_metadata_names(names)
    if len(names) * len(job.documents) > MAX_METADATA_VALUES:
        raise CodecError(f"job: {len(names)} metadata columns for {len(job.documents)} documents are too many values")
    ordinals = [i if d.ordinal is None else d.ordinal for i, d in enumerate(job.documents)]
    try:
        arrays = [
            pa.array([d.id for d in job.documents], pa.string()),
            pa.array(ordinals, pa.int64()),
            pa.array([d.text for d in job.documents], pa.string()),
            *(pa.array([d.metadata.get(name) for d in job.documents], ipc.METADATA_TYPE) for name in names),
        ]
        return pa.RecordBatch.from_arrays(arrays, names=[*COLUMNS, *names])
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise CodecError(f"job: a value does not fit its column: {str(error)[:200]}") from None


def _check_metadata_names(names: list[str]) -> None:
    if len(names) > MAX_METADATA_COLUMNS:
        raise CodecError(f"job: {len(names)} metadata columns, the most is {MAX_METADATA_COLUMNS}")
    if clash := RESERVED_COLUMNS.intersection(names):
        raise CodecError(f"job: metadata columns may not be named {', '.join(sorted(clash))}")
