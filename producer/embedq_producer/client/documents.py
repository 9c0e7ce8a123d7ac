"""What callers pass in as texts, cut into jobs: Arrow batches of bounded size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from embedq_schemas.errors import UsageError
from embedq_schemas.ipc import METADATA_TYPE
from embedq_schemas.job import INPUT_IDS_TYPE

Texts = Sequence[str] | Sequence[Sequence[int]] | Iterable[Mapping[str, Any]]

JOB_DOCUMENTS = 1024
"""Most documents in one job."""
JOB_CHARACTERS = 1 << 20
"""Most characters, or token ids, in one job, unless a single document has more."""

_Kind = Literal["text", "input_ids"]


class _Job:
    """A job under construction. All its documents are texts, or all are token ids."""

    def __init__(self, kind: _Kind, start: int, metadata: Sequence[str]) -> None:
        self.kind = kind
        self._start = start
        self._ids: list[str] = []
        self._values: list[Any] = []
        self._metadata: dict[str, list[str | None]] = {name: [] for name in metadata}
        self._size = 0

    @property
    def full(self) -> bool:
        return len(self._ids) >= JOB_DOCUMENTS or self._size >= JOB_CHARACTERS

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, document_id: str, value: Any, fields: Mapping[str, Any]) -> None:
        self._ids.append(document_id)
        self._values.append(value)
        self._size += len(value)
        for name, values in self._metadata.items():
            try:
                values.append(_metadata_value(fields.get(name)))
            except (TypeError, ValueError, RecursionError) as error:
                where = f"{name} of document {self._start + len(values)}"
                raise UsageError(f"{where} cannot be written as JSON: {error}") from None

    def build(self) -> pa.RecordBatch:
        count = len(self._ids)
        try:
            columns = {
                "id": pa.array(self._ids, pa.string()),
                "ordinal": pa.array(np.arange(self._start, self._start + count), pa.int64()),
                self.kind: self._value_column(),
                **{name: pa.array(values, METADATA_TYPE) for name, values in self._metadata.items()},
            }
        except UnicodeEncodeError as error:
            first, last = self._start, self._start + count - 1
            span = f"documents {first} to {last}" if count > 1 else f"document {first}"
            raise UsageError(f"a string in {span} is not valid Unicode: {error.reason}") from None
        return pa.RecordBatch.from_pydict(columns)

    def _value_column(self) -> pa.Array:
        if self.kind == "text":
            return pa.array(self._values, pa.string())
        offsets = np.zeros(len(self._values) + 1, np.int32)
        np.cumsum([len(ids) for ids in self._values], out=offsets[1:])
        ids = np.concatenate(self._values).astype(np.uint32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids), type=INPUT_IDS_TYPE)


def jobs(
    texts: Texts, *, ids: Sequence[str] | None = None, metadata: Sequence[str] = ()
) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Cut `texts` into jobs: batches with columns `id`, `ordinal`, `text` or `input_ids`, then `metadata`; and whether
    each is the last.

    Args:
        texts: strings, lists of token ids, or mappings with `text` or `input_ids`, and perhaps an `id` and the
            metadata fields. Read once, in order.
        ids: one per text; without them, and without `id` fields, a document's id is its position.

    Raises:
        UsageError: a value of another type, or not as many ids as texts.
    """
    check_texts(texts)
    job: _Job | None = None
    given = None if ids is None else iter(ids)
    index = -1
    for index, item in enumerate(texts):
        fields: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
        kind, value = _value(item, index)
        document_id = _id(fields, given, index)
        if job is not None and (job.full or job.kind != kind):
            yield job.build(), False
            job = None
        if job is None:
            job = _Job(kind, index, metadata)
        job.add(document_id, value, fields)
    if given is not None and next(given, None) is not None:
        raise UsageError(f"there are more ids than the {index + 1} texts")
    if job is not None:
        yield job.build(), True


def check_texts(texts: Any) -> None:
    """Raise UsageError for what is no list of texts as a whole."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        raise UsageError("texts must be a list of texts; put a single one in a list")


def _value(item: Any, index: int) -> tuple[_Kind, Any]:
    if isinstance(item, str):
        return "text", item
    if isinstance(item, Mapping):
        if ("text" in item) == ("input_ids" in item):
            raise UsageError(f"document {index} needs either a text or input_ids")
        if "text" in item:
            if not isinstance(item["text"], str):
                raise UsageError(f"the text of document {index} is of type {type(item['text']).__name__}, not a string")
            return "text", item["text"]
        item = item["input_ids"]
    return "input_ids", _token_ids(item, index)


def _token_ids(item: Any, index: int) -> np.ndarray[Any, Any]:
    if isinstance(item, str | bytes) or not isinstance(item, Sequence | np.ndarray):
        raise UsageError(f"document {index} is of type {type(item).__name__}, not a string or a list of token ids")
    try:
        ids = np.asarray(item)
    except (ValueError, OverflowError):
        ids = np.zeros(0, np.object_)
    if len(item) == 0:
        return np.zeros(0, np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 1 << 32:
        raise UsageError(f"document {index} is not a list of token ids: integers from 0 to {(1 << 32) - 1}")
    return ids


def _id(fields: Mapping[str, Any], given: Iterator[str] | None, index: int) -> str:
    own = fields.get("id")
    if given is None:
        document_id = str(index) if own is None else own
    elif own is not None:
        raise UsageError(f"document {index} has an id of its own, and ids were given besides")
    else:
        document_id = next(given, None)
        if document_id is None:
            raise UsageError(f"there are only {index} ids for more texts")
    if not isinstance(document_id, str):
        raise UsageError(f"the id of document {index} is of type {type(document_id).__name__}, not a string")
    return document_id


def _metadata_value(value: Any) -> str | None:
    """As the corpus readers keep it: strings as they are, all else as JSON."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class InputDigest:
    """A digest of all documents so far, the same however they are cut into jobs: the identity of an input's prefix."""

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {}
        self.documents = 0

    def update(self, job: pa.RecordBatch) -> None:
        """Take in the documents of a job as `jobs` made it, not a slice of one."""
        kind = job.schema.names[2]
        for name in job.schema.names:
            array = job.column(name)
            if name == "ordinal":
                self._add(f"{kind}/{name}", array.to_numpy())
                continue
            offsets = np.frombuffer(array.buffers()[1], np.int32)[: len(array) + 1]
            lengths = np.diff(offsets)
            if array.null_count:
                lengths[array.is_null().to_numpy(zero_copy_only=False)] = -1
            data = array.values.to_numpy() if name == "input_ids" else array.buffers()[2] or b""
            self._add(f"{name}/lengths", lengths)
            self._add(name, memoryview(data)[: int(offsets[-1])])
        self.documents += job.num_rows

    @property
    def position(self) -> str:
        """The number of documents and 32 hexadecimal digits."""
        total = hashlib.sha256()
        for name in sorted(self._columns):
            total.update(name.encode() + b"\0" + self._columns[name].digest())
        return f"{self.documents}:{total.hexdigest()[:32]}"

    def copy(self) -> InputDigest:
        """An independent digest of the same documents."""
        twin = InputDigest()
        twin.documents = self.documents
        twin._columns = {name: column.copy() for name, column in self._columns.items()}
        return twin

    def _add(self, column: str, data: Any) -> None:
        self._columns.setdefault(column, hashlib.sha256()).update(data)
