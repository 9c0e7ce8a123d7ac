"""A run: one submission of documents with its options and one sink, and the counters that prove it complete."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import CodecError, UnsupportedVersionError
from embedq_schemas.ipc import METADATA_TYPE
from embedq_schemas.metadata_type import parse_metadata_type
from embedq_schemas.names import (
    MAX_METADATA_COLUMNS,
    RESERVED_COLUMNS,
    S3_PATTERN,
    SCHEMA_VERSION,
    Lane,
    QueueName,
    RunId,
)
from embedq_schemas.versions import refuse_other_version


class RunStatus(StrEnum):
    """Lifecycle of a run, with the names of the OpenAI Batch API."""

    VALIDATING = "validating"  # created; its producer has not sent a job yet
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # every document has its outcome; files are being published
    COMPLETED = "completed"
    FAILED = "failed"  # the run as a whole could not go on; `error` says why
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """No process will change this run any more."""
        return self in _TERMINAL


_TERMINAL = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.EXPIRED, RunStatus.CANCELLED})


class Durability(StrEnum):
    """When a commit counts as done."""

    PROCESS = "process"  # the server holds it (and its append-only file, where on): survives a server process's death
    FSYNC = "fsync"  # WAITAOF: the server's disk holds it
    REPLICA = "replica"  # WAIT: one replica holds it


class ParquetSink(BaseModel):
    """Vectors go to a Parquet dataset: a directory, or a prefix of an object store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["parquet"] = "parquet"
    #: Absolute path of the dataset directory, or `s3://bucket/prefix`.
    path: str = Field(min_length=1, max_length=4096)
    #: A worker closes its file at about this many bytes of vectors. Also what it holds in memory before a commit.
    file_bytes: int = Field(default=64 << 20, ge=1 << 16, le=1 << 30)

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        local = path.startswith("/") and "\0" not in path and ".." not in path.split("/")
        if not local and not re.match(S3_PATTERN, path):
            raise ValueError("the dataset path must be absolute, without '..' or NUL, or s3://bucket/prefix")
        return path


class StreamSink(BaseModel):
    """Vectors go to a result stream in Redis, readable more than once until the TTL ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["stream"] = "stream"
    #: Seconds the results stay after the last one was written.
    ttl_s: int = Field(default=3600, ge=1, le=30 * 86400)


Sink = Annotated[ParquetSink | StreamSink, Field(discriminator="kind")]


class RunSpec(BaseModel):
    """What was asked for; fixed at creation and stored with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = SCHEMA_VERSION
    run: RunId
    queue: QueueName
    #: None: whatever model the queue is bound to when the first worker reads the run.
    model_fingerprint: str | None = Field(default=None, max_length=128)
    encoding: EncodingOptions = EncodingOptions()
    sink: Sink
    lane: Lane = Lane.BULK
    durability: Durability = Durability.PROCESS
    #: Metadata columns kept into the output, in order.
    metadata: tuple[str, ...] = Field(default=(), max_length=MAX_METADATA_COLUMNS)
    #: Their types, one each, as `metadata_type` names them; none: all are strings.
    metadata_types: tuple[str, ...] = Field(default=(), max_length=MAX_METADATA_COLUMNS)
    keep_text: bool = False
    #: Unix time in seconds.
    created_at: float = Field(allow_inf_nan=False)
    #: Identity of the input, so that a resumed producer refuses another corpus.
    corpus: str | None = Field(default=None, max_length=1024)

    @field_validator("metadata")
    @classmethod
    def _metadata_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if clash := RESERVED_COLUMNS.intersection(names):
            raise ValueError(
                f"metadata columns may not be named {', '.join(sorted(clash))}: the dataset has these already"
            )
        if len(set(names)) != len(names):
            raise ValueError("a metadata column is named twice")
        return names

    @field_validator("metadata_types")
    @classmethod
    def _metadata_types(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_metadata_type(name)) for name in names)

    @model_validator(mode="after")
    def _one_type_each(self) -> Self:
        if self.metadata_types and len(self.metadata_types) != len(self.metadata):
            raise ValueError(f"{len(self.metadata_types)} metadata types for {len(self.metadata)} columns")
        return self

    @model_validator(mode="after")
    def _ranges_known(self) -> Self:
        if self.encoding.vector_type.ranged and self.encoding.vector_ranges is None and self.sink.kind == "stream":
            raise ValueError(
                f"{self.encoding.vector_type} results kept in Redis need vector_ranges; "
                "only the workers of a dataset find them themselves"
            )
        return self

    @property
    def metadata_fields(self) -> dict[str, pa.DataType]:
        """Metadata columns kept into the output, in order, with their types."""
        if not self.metadata_types:
            return dict.fromkeys(self.metadata, METADATA_TYPE)
        return dict(zip(self.metadata, map(parse_metadata_type, self.metadata_types), strict=True))

    def encode(self) -> bytes:
        """JSON, as stored in the run registry and in `_run.json`."""
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, data: bytes) -> RunSpec:
        """Inverse of `encode`; raises CodecError, or UnsupportedVersionError for a newer major version."""
        try:
            spec = cls.model_validate_json(data)
        except ValidationError as error:
            refuse_other_version(data, "version", "run specification")
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CodecError(f"not a run specification: {where}: {first['msg']}") from None
        if spec.version != SCHEMA_VERSION:
            raise UnsupportedVersionError(
                f"run specification version {spec.version}; this build knows {SCHEMA_VERSION}"
            )
        return spec

    def same_request(self, other: RunSpec) -> bool:
        """Whether both ask for the same result, so that one may resume the other."""
        volatile = {"run", "queue", "created_at", "durability", "lane"}
        return self.model_dump(exclude=volatile) == other.model_dump(exclude=volatile)


@dataclass(frozen=True)
class RunCounters:
    """Exact counts in documents. A run may complete only when `succeeded + failed + skipped == input`."""

    input: int = 0  # documents taken from the input so far, bad ones included
    succeeded: int = 0  # rows committed
    failed: int = 0  # dead letters
    skipped: int = 0  # not computed on purpose: duplicates made from content ids, documents of a cancelled run
    tokens: int = 0  # tokens the model was given for succeeded documents, after truncation

    @property
    def settled(self) -> int:
        """Documents that have their outcome."""
        return self.succeeded + self.failed + self.skipped


@dataclass(frozen=True)
class RunState:
    """One run as the registry knows it at one moment."""

    spec: RunSpec
    status: RunStatus
    counters: RunCounters
    #: The producer has sent everything: `counters.input` is final.
    input_closed: bool
    #: Opaque position of the producer in its input; None before the first job.
    position: str | None
    committed_files: int
    published_files: int
    dead_letters: int  # not yet written to the dataset's errors
    error: str | None
    created_at: float
    updated_at: float

    @property
    def settled(self) -> bool:
        """Every document has its outcome and none can come any more."""
        return self.input_closed and self.counters.settled == self.counters.input
