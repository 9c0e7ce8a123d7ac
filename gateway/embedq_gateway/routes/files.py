"""`/v1/files`, as OpenAI's API has it. Redis and disk are asked in threads: these routes are plain functions."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from embedq_broker.batches import FileRecord
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse

from embedq_gateway.errors import ApiError
from embedq_gateway.gateway import Gateway
from embedq_gateway.ids import new_id
from embedq_gateway.routes.common import Identified, Page, Tenant, TheGateway
from embedq_gateway.spec import READS_BODY, STORED, UPLOAD, errors
from embedq_gateway.uploads import expiry, receive_upload

router = APIRouter(prefix="/v1/files")

_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


class File(Identified):
    """One file."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, record: FileRecord) -> File:
        return cls(
            id=record.id,
            bytes=record.bytes,
            created_at=record.created_at,
            expires_at=record.expires_at,
            filename=record.filename,
            purpose=record.purpose,
        )


class FileList(Page[File]):
    """A page of files."""


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post("", response_model=File, responses=errors(*READS_BODY, *STORED), openapi_extra=UPLOAD)
async def upload_file(request: Request, tenant: Tenant, gateway: TheGateway) -> File:
    """Upload a batch's input file. It is on disk, and known, when this answers."""
    gateway.embedder.check_reachable()
    settings = gateway.settings
    with gateway.store.writing() as draft:
        form = await receive_upload(
            request, draft, max_file_bytes=settings.max_file_bytes, timeout_s=settings.upload_timeout_s
        )
        if unknown := sorted(set(form.fields) - _FIELDS):
            raise ApiError(400, "unknown_field", f"Unrecognized field: `{unknown[0][:100]}`.", param=unknown[0][:100])
        if form.fields.get("purpose") != "batch":
            raise ApiError(400, "invalid_purpose", "`purpose` must be batch.", param="purpose")
        now = int(time.time())
        seconds = expiry(form.fields)
        record = FileRecord(
            id=new_id("file-"),
            tenant=tenant,
            filename=form.filename or "file",
            purpose="batch",
            bytes=draft.size,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
        )

        def keep() -> None:
            gateway.store.publish(draft, record.id)
            gateway.batches.add_file(record)

        await run_in_threadpool(keep)
    return File.of(record)


@router.get("", response_model=FileList, responses=errors(400, *STORED))
def list_files(
    tenant: Tenant,
    gateway: TheGateway,
    after: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=200)] = None,
) -> FileList:
    """The tenant's files, newest first unless `order` says otherwise."""
    gateway.embedder.check_reachable()
    records = gateway.batches.files(tenant, after=after, newest_first=order == "desc")
    wanted = (record for record in records if purpose is None or record.purpose == purpose)
    return FileList.of(map(File.of, wanted), limit)


@router.get("/{file_id}", response_model=File, responses=errors(404, *STORED))
def get_file(file_id: str, tenant: Tenant, gateway: TheGateway) -> File:
    """One file's facts."""
    return File.of(_record(gateway, tenant, file_id))


@router.get(
    "/{file_id}/content",
    response_class=FileResponse,
    responses={
        **errors(400, 404, 416, *STORED),
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The range that was asked for."},
    },
)
def get_content(file_id: str, tenant: Tenant, gateway: TheGateway) -> FileResponse:
    """One file's bytes."""
    record = _record(gateway, tenant, file_id)
    path = gateway.store.path(record.id)
    if not path.is_file():
        raise ApiError(404, "file_not_found", f"The content of file `{record.id}` is gone.", param="file_id")
    return FileResponse(path, media_type="application/octet-stream", filename=record.filename)


@router.delete("/{file_id}", response_model=FileDeleted, responses=errors(404, *STORED))
def delete_file(file_id: str, tenant: Tenant, gateway: TheGateway) -> FileDeleted:
    """Delete a file. A batch that has begun keeps what it needs of it."""
    record = _record(gateway, tenant, file_id)
    # The record goes first: content without a record is swept away, a record without content would be a lie.
    gateway.batches.drop_file(tenant, record.id)
    gateway.store.remove(record.id)
    return FileDeleted(id=record.id)


def _record(gateway: Gateway, tenant: str, file_id: str) -> FileRecord:
    gateway.embedder.check_reachable()
    record = gateway.batches.file(tenant, file_id)
    if record is None:
        raise ApiError(404, "file_not_found", f"No such file: `{file_id[:100]}`.", param="file_id")
    return record
