"""A job: up to N documents of one run, as Arrow IPC; JSON is accepted from producers in other languages.

Columns: `id` string, `ordinal` int64 (position in the run's input), `text` string, then metadata columns (string).
A job of documents that are tokenized already has `input_ids` list<uint32> in the place of `text`; one job holds either.
JSON form: `{"v": 1, "documents": [{"id": "a", "ordinal": 0, "text": "...", "metadata": {"lang": "en"}}, ...]}`;
`id` and `text` are required strings, `ordinal` (from 0) defaults to the position in the list, `metadata` values are
strings or null; `input_ids`, a list of integers from 0, stands in the place of `text` in all documents or in none.

The ids of a document are the model's input as they are: no prompt, no special token is added. Whether they are inside
the vocabulary is for the tokenizer stage to say, which knows it.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import accumulate
from typing import Annotated

import msgspec
import numpy as np
import pyarrow as pa

from embedq_schemas import ipc
from embedq_schemas.errors import CodecError, UnsupportedVersionError
from embedq_schemas.names import MAX_METADATA_COLUMNS, RESERVED_COLUMNS, SCHEMA_VERSION
from embedq_schemas.versions import refuse_other_version

KIND = "job"
#: Values of all metadata columns of one job: a few sparse documents must not unfold into a table that fills memory.
MAX_METADATA_VALUES = 1 << 24
INPUT_IDS_TYPE = pa.list_(pa.field("item", pa.uint32()))
COLUMNS = {"id": pa.string(), "ordinal": pa.int64(), "text": pa.string()}
ID_COLUMNS = {"id": pa.string(), "ordinal": pa.int64(), "input_ids": INPUT_IDS_TYPE}


class Codec(StrEnum):
    """How an entry's payload is written."""

    ARROW = "arrow"
    JSON = "json"


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class _JsonDocument(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    text: str | None = None
    input_ids: list[_TokenId] | None = None
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
        documents = ipc.decode(payload, KIND, COLUMNS, ID_COLUMNS)
        _check_metadata_names(documents.schema.names[len(COLUMNS) :])
        if holds_ids(documents) and documents.column("input_ids").flatten().null_count:
            raise CodecError("job: input_ids holds nulls")
    elif codec == Codec.JSON:
        documents = _decode_json(payload)
    else:
        raise UnsupportedVersionError(f"job codec {codec[:40]!r}; this build knows arrow and json")
    if documents.num_rows == 0:
        raise CodecError("job: no documents")
    if documents.column("ordinal").to_numpy().min() < 0:
        raise CodecError("job: a negative ordinal")
    return documents


def holds_ids(documents: pa.RecordBatch) -> bool:
    """Whether the documents of a job are token ids rather than texts."""
    return bool(documents.schema.names[2] == "input_ids")


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
            _values(job.documents),
            *(pa.array([d.metadata.get(name) for d in job.documents], ipc.METADATA_TYPE) for name in names),
        ]
        columns = COLUMNS if arrays[2].type == COLUMNS["text"] else ID_COLUMNS
        return pa.RecordBatch.from_arrays(arrays, names=[*columns, *names])
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise CodecError(f"job: a value does not fit its column: {str(error)[:200]}") from None


def _values(documents: list[_JsonDocument]) -> pa.Array:
    """The `text` or the `input_ids` column."""
    for row, document in enumerate(documents):
        if (document.text is None) == (document.input_ids is None):
            raise CodecError(f"job: document {row} needs either a text or input_ids")
    texts = [d.text for d in documents if d.text is not None]
    if len(texts) == len(documents):
        return pa.array(texts, pa.string())
    lists = [d.input_ids for d in documents if d.input_ids is not None]
    if texts:
        raise CodecError("job: some documents are texts and some are token ids; send them in jobs of their own")
    offsets = np.fromiter(accumulate(map(len, lists), initial=0), np.int64, len(lists) + 1)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise CodecError(f"job: {offsets[-1]} token ids in one job")
    ids = np.fromiter((token for tokens in lists for token in tokens), np.uint32, int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids), type=INPUT_IDS_TYPE)


def _check_metadata_names(names: list[str]) -> None:
    if len(names) > MAX_METADATA_COLUMNS:
        raise CodecError(f"job: {len(names)} metadata columns, the most is {MAX_METADATA_COLUMNS}")
    if clash := RESERVED_COLUMNS.intersection(names):
        raise CodecError(f"job: metadata columns may not be named {', '.join(sorted(clash))}")
