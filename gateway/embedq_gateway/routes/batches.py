"""`/v1/batches`, as OpenAI's API has it."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

import msgspec
from embedq_broker.batches import BatchRecord
from embedq_schemas.run import RunStatus
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from embedq_gateway.batch.lines import ENDPOINT
from embedq_gateway.errors import ApiError
from embedq_gateway.gateway import Gateway
from embedq_gateway.ids import new_id
from embedq_gateway.inputs import decoded
from embedq_gateway.routes.common import Identified, Page, Tenant, TheGateway
from embedq_gateway.spec import BATCH_REQUEST, READS_BODY, STORED, errors, json_body
from embedq_gateway.uploads import checked_expiry

router = APIRouter(prefix="/v1/batches")

_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW_S = 30 * 86400
_MOST_METADATA = 16


class CreateBatch(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class LineProblem(BaseModel):
    code: str
    message: str
    line: int | None
    param: str | None


class Problems(BaseModel):
    object: Literal["list"] = "list"
    data: list[LineProblem]


class Batch(Identified):
    """One batch. Times are Unix times in seconds, counts are lines of the input file."""

    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: Problems | None
    input_file_id: str
    completion_window: str
    status: RunStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> Batch:
        same = {name: getattr(record, name) for name in cls.model_fields if hasattr(record, name) and name != "errors"}
        problems = [LineProblem(code=e.code, message=e.message, line=e.line, param=e.param) for e in record.errors]
        return cls(
            **same,
            errors=Problems(data=problems) if problems else None,
            request_counts=RequestCounts(total=record.total, completed=record.completed, failed=record.failed),
        )


class BatchList(Page[Batch]):
    """A page of batches."""


_decoder = msgspec.json.Decoder(CreateBatch)


@router.post(
    "", response_model=Batch, responses=errors(*READS_BODY, 429, *STORED), openapi_extra=json_body(BATCH_REQUEST)
)
async def create_batch(request: Request, tenant: Tenant, gateway: TheGateway) -> Batch:
    """Start a batch. Once this answers, the batch comes to its end whatever ends meanwhile."""
    gateway.embedder.check_reachable()
    async with gateway.bodies.json(request) as body:
        asked = decoded(_decoder, body)
    record = _checked(asked, tenant)

    def accept() -> None:
        if gateway.batches.file(tenant, asked.input_file_id) is None:
            raise ApiError(
                400, "file_not_found", f"No such file: `{asked.input_file_id[:100]}`.", param="input_file_id"
            )
        if gateway.batches.open_count() >= gateway.settings.max_open_batches:
            raise ApiError(429, "too_many_batches", "Too many batches are open; try again later.", retry_after_s=60)
        gateway.batches.add_batch(record)

    await run_in_threadpool(accept)
    return Batch.of(record)


@router.get("", response_model=BatchList, responses=errors(400, *STORED))
def list_batches(
    tenant: Tenant,
    gateway: TheGateway,
    after: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """The tenant's batches, newest first."""
    gateway.embedder.check_reachable()
    return BatchList.of(map(Batch.of, gateway.batches.batches(tenant, after=after)), limit)


@router.get("/{batch_id}", response_model=Batch, responses=errors(404, *STORED))
def get_batch(batch_id: str, tenant: Tenant, gateway: TheGateway) -> Batch:
    """One batch."""
    return Batch.of(_record(gateway, tenant, batch_id))


@router.post("/{batch_id}/cancel", response_model=Batch, responses=errors(400, 404, *STORED))
def cancel_batch(batch_id: str, tenant: Tenant, gateway: TheGateway) -> Batch:
    """Cancel a batch: what is computed by then is in its output file, the other requests in its error file."""
    _record(gateway, tenant, batch_id)
    now = int(time.time())

    def step(record: BatchRecord) -> BatchRecord:
        if record.status not in (RunStatus.VALIDATING, RunStatus.IN_PROGRESS):
            return record
        return msgspec.structs.replace(record, status=RunStatus.CANCELLING, cancelling_at=now)

    record = gateway.batches.change(batch_id, step)
    if record is None:
        raise _no_such(batch_id)
    if record.status not in (RunStatus.CANCELLING, RunStatus.CANCELLED):
        raise ApiError(400, "not_cancellable", f"The batch is {record.status}.", param="batch_id")
    return Batch.of(record)


def _checked(asked: CreateBatch, tenant: str) -> BatchRecord:
    if asked.endpoint != ENDPOINT:
        raise ApiError(400, "invalid_endpoint", f"`endpoint` must be {ENDPOINT}.", param="endpoint")
    window = _WINDOW.fullmatch(asked.completion_window)
    window_s = int(window[1]) * _SECONDS[window[2]] if window else 0
    if not 0 < window_s <= _LONGEST_WINDOW_S:
        message = "`completion_window` is a number and s, m, h or d, such as 24h; at most 30d."
        raise ApiError(400, "invalid_completion_window", message, param="completion_window")
    metadata = asked.metadata or {}
    if len(metadata) > _MOST_METADATA or any(len(k) > 64 or len(v) > 512 for k, v in metadata.items()):
        message = f"`metadata` holds at most {_MOST_METADATA} pairs, with keys of 64 and values of 512 characters."
        raise ApiError(400, "invalid_metadata", message, param="metadata")
    ttl_s = None
    if (after := asked.output_expires_after) is not None:
        if set(after) - {"anchor", "seconds"}:
            raise ApiError(400, "unknown_field", "`output_expires_after` has an unknown field.")
        ttl_s = checked_expiry(after.get("anchor"), after.get("seconds"), "output_expires_after")
    now = int(time.time())
    return BatchRecord(
        id=new_id("batch_"),
        tenant=tenant,
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        created_at=now,
        expires_at=now + window_s,
        metadata=asked.metadata,
        output_ttl_s=ttl_s,
        output_name=new_id("file-"),
        error_name=new_id("file-"),
    )


def _record(gateway: Gateway, tenant: str, batch_id: str) -> BatchRecord:
    gateway.embedder.check_reachable()
    record = gateway.batches.batch(tenant, batch_id)
    if record is None:
        raise _no_such(batch_id)
    return record


def _no_such(batch_id: str) -> ApiError:
    return ApiError(404, "batch_not_found", f"No such batch: `{batch_id[:100]}`.", param="batch_id")
