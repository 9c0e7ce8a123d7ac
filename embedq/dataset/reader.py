"""Reading a dataset: only the files its manifest names count.

A glob over `part-*.parquet` finds the same rows in a directory at rest; the manifest is what stays right while files
are being published, compacted or withdrawn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from embedq_schemas.encoding import OnLong
from embedq_schemas.errors import CodecError, OutputError, RunIncompleteError, RunNotFoundError, UsageError
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.quantize import VectorType, decode_ranges, dequantize
from embedq_schemas.run import RunSpec
from embedq_schemas.vector_batch import TYPE_KEY, VectorBatch, described
from embedq_worker.sinks.dataset import Dataset, dataset_at
from embedq_worker.sinks.store import SUCCESS_NAME
from numpy.typing import NDArray

SUPERSEDED_NAME = "_superseded"
"""Folder of files that a compaction replaced: kept for a while for readers that opened the manifest before it. They end
in `.old`, so that no recursive glob finds them."""

BATCH_BYTES = 16 << 20
_METADATA_PREFIX = b"embedq."
Order = Literal["file", "input"]


@dataclass(frozen=True)
class VectorFacts:
    """How a dataset's vectors were made, as its files say.

    `dimensions` is the length of a vector. `normalized`: every vector had an L2 norm of 1 before it was stored. `dtype`
    is what the model computed in, `vector_type` what vectors are stored as. `prompt` was put before every document.
    `version` is embedq's.
    """

    model_id: str
    revision: str
    fingerprint: str
    pooling: str
    normalized: bool
    dimensions: int
    dtype: str
    prompt: str
    version: str
    vector_type: VectorType = VectorType.FLOAT32


@dataclass(frozen=True)
class DatasetReader:
    """An opened dataset. `files` are those that counted at that moment, in the order of their publication."""

    dataset: Dataset
    spec: RunSpec
    files: tuple[PublishedFile, ...]
    #: Every document of the run's input has its row here or among the errors.
    complete: bool
    #: What `_SUCCESS` says: the run's counters; empty while the run is not complete.
    summary: dict[str, Any]

    @property
    def path(self) -> Path:
        """The dataset's directory; raises UsageError where it has none."""
        return self.dataset.path

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(file.rows for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def chunked(self) -> bool:
        """Whether long texts were cut: then a row is a chunk, and `id` and `chunk_index` together are its key."""
        return self.spec.encoding.on_long is OnLong.CHUNK

    @property
    def key(self) -> list[str]:
        """The columns that tell rows apart."""
        return ["id", "chunk_index"] if self.chunked else ["id"]

    def locate(self, file: PublishedFile) -> Path:
        """Where the file lies now in a directory; a compaction may have moved it since the dataset was opened."""
        path = self.path / file.name
        moved = self.path / SUPERSEDED_NAME / f"{file.name}.old"
        return path if path.exists() or not moved.exists() else moved

    @contextmanager
    def opened(self, file: PublishedFile) -> Iterator[pq.ParquetFile]:
        """The open file; what goes wrong with it inside the block is raised as OutputError."""
        try:
            with self._open(file) as handle:
                yield handle
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"{self.dataset}/{file.name} cannot be read: {str(error)[:200]}") from None

    def _open(self, file: PublishedFile) -> pq.ParquetFile:
        if not self.dataset.is_directory:
            # A request takes longer than what it asks for, so pages that lie side by side are asked for at once.
            return pq.ParquetFile(self.dataset.store.source(file.name), pre_buffer=True)
        try:
            return pq.ParquetFile(self.locate(file))
        except FileNotFoundError:
            # Moved since we looked.
            return pq.ParquetFile(self.locate(file))

    @cached_property
    def schema(self) -> pa.Schema:
        """Columns of every file: `id, ordinal, vector, n_tokens, truncated, text_sha256`, metadata, perhaps `text`.

        Its metadata hold the facts of the first file. Raises OutputError where there is no file, or its vectors are
        of a type this version does not read.
        """
        if not self.files:
            raise OutputError(f"{self.dataset} holds no vectors")
        with self.opened(self.files[0]) as file:
            schema: pa.Schema = file.schema_arrow
        try:
            kind, _ = described(schema.field("vector"))
            ranges = _ranges_in(schema)
        except (CodecError, ValueError) as error:
            raise OutputError(f"{self.dataset} holds vectors that this version does not read: {error}") from None
        if kind.ranged and ranges is None:
            raise OutputError(f"{self.dataset} holds {kind} vectors whose ranges are missing")
        return schema

    @cached_property
    def facts(self) -> VectorFacts:
        """How the vectors were made. Raises OutputError as `schema` does."""
        texts = facts_in(self.schema)
        return VectorFacts(
            model_id=texts.get("model_id", ""),
            revision=texts.get("revision", ""),
            fingerprint=texts.get("fingerprint", self.spec.model_fingerprint or ""),
            pooling=texts.get("pooling", ""),
            normalized=texts.get("normalized") == "true",
            dimensions=self.dimensions,
            dtype=texts.get("dtype", ""),
            prompt=texts.get("prompt", ""),
            version=texts.get("version", ""),
            vector_type=self.vector_type,
        )

    @property
    def dimensions(self) -> int:
        """Components of a vector."""
        return described(self.schema.field("vector"))[1]

    @property
    def vector_type(self) -> VectorType:
        """What vectors are stored as."""
        return described(self.schema.field("vector"))[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored vector."""
        return self.vector_type.row_bytes(self.dimensions)

    @property
    def ranges(self) -> NDArray[np.float32] | None:
        """Of int8 and uint8 vectors: smallest and largest value of each dimension, float32 [2, dimensions]."""
        return _ranges_in(self.schema)

    def as_float32(self, batch: pa.RecordBatch | VectorBatch) -> NDArray[np.float32]:
        """What the stored vectors of `batch` stand for, float32 [n, dimensions]; see `dequantize`."""
        batch = batch if isinstance(batch, VectorBatch) else VectorBatch(batch)
        return dequantize(batch.vectors, self.vector_type, self.ranges)

    @property
    def batch_rows(self) -> int:
        """Rows whose vectors take about 16 MB as float32."""
        return max(1, BATCH_BYTES // (4 * self.dimensions))

    def batches(
        self, columns: Sequence[str] | None = None, *, order: Order = "file", batch_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows as record batches, in bounded memory.

        `VectorBatch(batch).vectors` is a view of their vectors as they are stored; `as_float32(batch)` is what those
        stand for.

        Args:
            columns: names of the columns wanted, in the dataset's order; None means all.
            order: `file` is the fastest and follows the manifest; `input` follows `ordinal`, the documents' order in
                the run's input, and gives a document whose row is doubled once, with the newest row.
            batch_rows: most rows of a batch; None means about 16 MB of vectors.

        Raises:
            UsageError: there is no such column.
            OutputError: a file is gone, damaged, or not of the dataset's columns.
            StorageError: the temporary directory is full, which input order may need.
        """
        schema = self.select(columns)
        rows = batch_rows or self.batch_rows
        if order == "input":
            from embedq.dataset.input_order import in_input_order

            return in_input_order(self, schema, rows)
        return self._in_file_order(schema, rows)

    def _in_file_order(self, schema: pa.Schema, batch_rows: int) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            yield from self.file_batches(file, schema, batch_rows)

    def file_batches(
        self, file: PublishedFile, schema: pa.Schema, batch_rows: int, *, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one file, columns as in `schema`, from all or some row groups; raises OutputError."""
        where = f"{self.dataset}/{file.name}"
        with self.opened(file) as opened:
            _check_columns(where, opened.schema_arrow, schema)
            if "vector" in schema.names:
                _check_vectors(where, opened.schema_arrow, self.schema)
            # Over several row groups Arrow keeps what it has read until the last.
            for group in range(opened.num_row_groups) if groups is None else groups:
                for batch in opened.iter_batches(batch_size=batch_rows, row_groups=[group], columns=schema.names):
                    yield batch.select(schema.names)

    def select(self, columns: Sequence[str] | None) -> pa.Schema:
        """The schema of `columns`, in the dataset's order; raises UsageError where there is no such column."""
        if columns is None:
            return self.schema
        if missing := [name for name in columns if name not in self.schema.names]:
            there = ", ".join(self.schema.names)
            raise UsageError(f"{self.dataset} has no column {', '.join(missing)}; it has: {there}")
        return pa.schema([field for field in self.schema if field.name in columns], self.schema.metadata)


def open_dataset(path: str | Path, *, partial: bool = False) -> DatasetReader:
    """Open the dataset that a run wrote.

    Args:
        path: its directory, or `s3://bucket/prefix`.
        partial: also open a dataset that is not complete, with the rows it has at this moment.

    Raises:
        RunNotFoundError: there is no run.
        RunIncompleteError: it is not complete, and `partial` is not asked for.
        OutputError: a file of the manifest is gone or has another size, or a file of ours does not decode.
    """
    dataset = dataset_at(path)
    spec = dataset.run_spec()
    if spec is None:
        raise RunNotFoundError(f"{path} holds no run")
    while True:
        reader = _look(dataset, spec)
        if not (reader.complete or partial):
            raise RunIncompleteError(
                f"{path} is not complete, it holds {reader.rows:,} vectors so far; finish its run, or add --partial"
            )
        try:
            _check_files(reader)
        except OutputError:
            if _look(dataset, spec) == reader:
                raise
            # A compaction went on while we looked.
            continue
        return reader


def _look(dataset: Dataset, spec: RunSpec) -> DatasetReader:
    # The mark first: files published between the two looks belong to a run that was not complete.
    summary = _summary(dataset)
    files = tuple(dataset.store.files().values())
    return DatasetReader(dataset, spec, files, complete=summary is not None, summary=summary or {})


def _summary(dataset: Dataset) -> dict[str, Any] | None:
    try:
        found = json.loads(dataset.store.read(SUCCESS_NAME))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(f"{dataset}/{SUCCESS_NAME} cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("succeeded"), int):
        raise OutputError(f"{dataset}/{SUCCESS_NAME} is not what a run writes")
    return found


def _check_files(reader: DatasetReader) -> None:
    listed = None if reader.dataset.is_directory else reader.dataset.store.sizes()
    for file in reader.files:
        path = f"{reader.dataset}/{file.name}" if listed is not None else str(reader.locate(file))
        try:
            size = os.stat(path).st_size if listed is None else listed[file.name]
        except (OSError, KeyError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it does not exist"
            raise OutputError(f"{path} is in the manifest and cannot be read: {reason}") from None
        if size != file.size_bytes:
            raise OutputError(f"{path} holds {size} bytes, its manifest says {file.size_bytes}")
    succeeded = reader.summary.get("succeeded")
    if not reader.complete:
        return
    # What a compaction will drop, and how many rows a new generation replaces, is written down before it happens.
    if reader.rows not in (succeeded, succeeded - reader.summary.get("superseded", 0), reader.summary.get("replaces")):
        raise OutputError(f"{reader.dataset} holds {reader.rows} rows, its run had {succeeded}")


def facts_in(schema: pa.Schema) -> dict[str, str]:
    """embedq's own entries of a file's metadata, by name."""
    return {
        key.removeprefix(_METADATA_PREFIX).decode(): value.decode()
        for key, value in (schema.metadata or {}).items()
        if key.startswith(_METADATA_PREFIX)
    }


def _ranges_in(schema: pa.Schema) -> NDArray[np.float32] | None:
    text = facts_in(schema).get("ranges")
    return None if text is None else decode_ranges(text)


def _check_vectors(path: str, found: pa.Schema, wanted: pa.Schema) -> None:
    """Vectors of one dataset must compare."""
    kind, _ = described(wanted.field("vector"))
    if (found.field("vector").metadata or {}).get(TYPE_KEY) != (wanted.field("vector").metadata or {}).get(TYPE_KEY):
        raise OutputError(f"{path}: its vectors are not {kind} as elsewhere")
    if facts_in(found).get("ranges") != facts_in(wanted).get("ranges"):
        raise OutputError(f"{path}: its {kind} vectors have other ranges than those elsewhere")


def _check_columns(path: str, found: pa.Schema, wanted: pa.Schema) -> None:
    for field in wanted:
        index = found.get_field_index(field.name)
        if index < 0 or found.field(index).type != field.type:
            kind = "is missing" if index < 0 else f"is {found.field(index).type}, not {field.type} as elsewhere"
            raise OutputError(f"{path}: column {field.name} {kind}")
