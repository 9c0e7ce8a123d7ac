"""A batch's plan: which line belongs to which run, and where its documents stand in it. Made once, then fixed.

Lines whose options are equal share a run. The plan is stored with the work under way, so that a gateway that goes on
with another's batch, perhaps under other settings, numbers its documents in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from embedq_broker.batches import BatchError
from embedq_schemas.encoding import EncodingOptions
from embedq_worker.sinks.files import create_durably, storage_errors
from numpy.typing import NDArray

from embedq_gateway.batch.lines import LineError, decode_line, read_lines
from embedq_gateway.errors import ApiError
from embedq_gateway.inputs import Limits, embeddings_request, read_request
from embedq_gateway.watch import ServedModel

REFUSED = -1
_MOST_ERRORS = 100
_MOST_RUNS = 128
_PLAN_NAME = "plan.msgpack"


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold."""

    max_requests: int
    max_inputs: int
    max_line_bytes: int
    request: Limits
    aliases: tuple[str, ...]


class _Stored(msgspec.Struct):
    offsets: bytes
    runs: bytes
    first: bytes
    counts: bytes
    encodings: list[bytes]
    refusals: dict[int, tuple[int, dict[str, Any]]]
    dimension: int
    max_length: int
    fingerprint: str
    model: str


@dataclass(frozen=True)
class Plan:
    """The plan of n lines."""

    #: int64 [n]: where each line begins in the input file.
    offsets: NDArray[np.int64]
    #: int32 [n]: index into `encodings`, REFUSED for a line that asks for what cannot be given.
    runs: NDArray[np.int32]
    #: int64 [n]: ordinal of the line's first document in its run.
    first: NDArray[np.int64]
    #: int32 [n]: documents of the line; 0 for a refused one.
    counts: NDArray[np.int32]
    #: One per run.
    encodings: tuple[EncodingOptions, ...]
    #: Line index to status and body of the answer to a refused line.
    refusals: dict[int, tuple[int, dict[str, Any]]]
    dimension: int
    max_length: int
    fingerprint: str
    model: str

    def documents(self, run: int) -> int:
        """Documents of a run."""
        return int(self.counts[self.runs == run].sum())

    def lines(self, run: int) -> NDArray[np.int64]:
        """int64: indexes of a run's lines."""
        return np.flatnonzero(self.runs == run)

    def components(self, run: int) -> int:
        """Components of the run's vectors."""
        return self.encodings[run].dimensions or self.dimension

    def save(self, folder: Path) -> Plan:
        """Store the plan durably, or return the one that was stored before; raises StorageError."""
        stored = _Stored(
            offsets=self.offsets.tobytes(),
            runs=self.runs.tobytes(),
            first=self.first.tobytes(),
            counts=self.counts.tobytes(),
            encodings=[encoding.model_dump_json().encode() for encoding in self.encodings],
            refusals=self.refusals,
            dimension=self.dimension,
            max_length=self.max_length,
            fingerprint=self.fingerprint,
            model=self.model,
        )
        with storage_errors(f"write to {folder}"):
            try:
                create_durably(folder / _PLAN_NAME, msgspec.msgpack.encode(stored))
            except FileExistsError:
                return self.load(folder) or self
        return self

    @classmethod
    def load(cls, folder: Path) -> Plan | None:
        """The stored plan, None if there is none."""
        try:
            stored = msgspec.msgpack.decode((folder / _PLAN_NAME).read_bytes(), type=_Stored)
        except FileNotFoundError:
            return None
        return cls(
            offsets=np.frombuffer(stored.offsets, np.int64),
            runs=np.frombuffer(stored.runs, np.int32),
            first=np.frombuffer(stored.first, np.int64),
            counts=np.frombuffer(stored.counts, np.int32),
            encodings=tuple(EncodingOptions.model_validate_json(encoding) for encoding in stored.encodings),
            refusals=stored.refusals,
            dimension=stored.dimension,
            max_length=stored.max_length,
            fingerprint=stored.fingerprint,
            model=stored.model,
        )


class InvalidBatchError(Exception):
    """The file as a whole is not a batch."""

    def __init__(self, errors: Sequence[BatchError]) -> None:
        super().__init__(errors[0].message)
        self.errors = tuple(errors)


def make_plan(source: Path, model: ServedModel, limits: BatchLimits) -> Plan:
    """Read the whole file once; raises InvalidBatchError, StorageError."""
    errors: list[BatchError] = []
    offsets: list[int] = []
    runs: list[int] = []
    first: list[int] = []
    counts: list[int] = []
    refusals: dict[int, tuple[int, dict[str, Any]]] = {}
    found: dict[EncodingOptions, int] = {}
    documents: list[int] = []
    seen: set[str] = set()
    with storage_errors(f"read {source}"), source.open("rb") as file:
        for number, offset, line in read_lines(file, limits.max_line_bytes):
            if len(errors) >= _MOST_ERRORS:
                break
            if len(offsets) >= limits.max_requests:
                message = f"The file holds more than {limits.max_requests:,} requests."
                raise InvalidBatchError([BatchError(code="too_many_requests", message=message, line=number)])
            try:
                request = decode_line(line, limits.max_line_bytes)
                if request.custom_id in seen:
                    raise LineError(
                        "duplicate_custom_id",
                        f"The `custom_id` {request.custom_id!r} occurs a second time.",
                        "custom_id",
                    )
            except LineError as error:
                errors.append(BatchError(code=error.code, message=error.message, line=number, param=error.param))
                continue
            seen.add(request.custom_id)
            run, count = REFUSED, 0
            try:
                body = embeddings_request(memoryview(request.body))
                inputs, encoding = read_request(body, model, limits.request, limits.aliases)
                count, run = len(inputs), found.setdefault(encoding, len(found))
            except ApiError as error:
                refusals[len(offsets)] = (error.status, error.body)
            if run == len(documents):
                documents.append(0)
            offsets.append(offset)
            runs.append(run)
            first.append(documents[run] if run != REFUSED else 0)
            counts.append(count)
            if run != REFUSED:
                documents[run] += count
            if sum(documents) > limits.max_inputs:
                message = f"The lines together hold more than {limits.max_inputs:,} texts."
                raise InvalidBatchError([BatchError(code="too_many_inputs", message=message, line=number)])
            if len(found) > _MOST_RUNS:
                message = f"The lines ask for more than {_MOST_RUNS} different combinations of options."
                raise InvalidBatchError([BatchError(code="too_many_options", message=message, line=number)])
    if not errors and not offsets:
        errors.append(BatchError(code="empty_file", message="The file holds no requests."))
    if errors:
        raise InvalidBatchError(errors)
    return Plan(
        offsets=np.array(offsets, np.int64),
        runs=np.array(runs, np.int32),
        first=np.array(first, np.int64),
        counts=np.array(counts, np.int32),
        encodings=tuple(found),
        refusals=refusals,
        dimension=model.dimension,
        max_length=model.max_length,
        fingerprint=model.fingerprint,
        model=model.id,
    )
