"""Files and batches of the HTTP gateway: their records in Redis, and the only steps that change them.

A store is one data directory: file contents lie there, records here. Its id is part of every key, so gateways that
share a queue but no directory never see a file that they cannot read. A tenant is the owner of an API key; it sees its
own records alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import redis
from embedq_schemas.errors import CodecError
from embedq_schemas.run import RunStatus

from embedq_broker import scripts
from embedq_broker.keys import Keys
from embedq_broker.once import warn_once
from embedq_broker.scripts import text

log = logging.getLogger(__name__)

KEEP_BATCH_S = 30 * 86400
"""How long a batch is remembered after its end."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a tenant. Times are Unix times in seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch was refused as a whole."""

    code: str
    message: str
    #: 1-based line of the input file.
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. Statuses are those of a run; counts are in lines of the input file; times in Unix seconds."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: RunStatus = RunStatus.VALIDATING
    metadata: dict[str, str] | None = None
    #: Seconds its output files are kept; None for good.
    output_ttl_s: int | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    #: Names of the files that its results will have, fixed from the beginning: whoever writes them writes the same.
    output_name: str
    error_name: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchError, ...] = ()


_Record = TypeVar("_Record", FileRecord, BatchRecord)


class BatchRegistry:
    """Records of one store. Holds no state of its own: every call reads or writes Redis."""

    def __init__(self, client: redis.Redis, keys: Keys, store: str) -> None:
        self._client = client
        self._keys = keys
        self._store = store

    def add_file(self, record: FileRecord) -> None:
        """Make a file known; the same record again changes nothing."""
        key = self._key("file", record.id)
        with self._client.pipeline(transaction=True) as pipe:
            pipe.set(key, msgspec.json.encode(record), exat=record.expires_at)
            pipe.zadd(self._key("files", record.tenant), {record.id: 0})
            pipe.execute()

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """The tenant's file, None if it has none of that id; raises CodecError."""
        return self._record(FileRecord, tenant, file_id)

    def file_exists(self, file_id: str) -> bool:
        """Whether any tenant has this file."""
        return bool(self._client.exists(self._key("file", file_id)))

    def drop_file(self, tenant: str, file_id: str) -> bool:
        """Forget a file; False if the tenant has none of that id. Raises CodecError."""
        if self.file(tenant, file_id) is None:
            return False
        self._client.zrem(self._key("files", tenant), file_id)
        return bool(self._client.delete(self._key("file", file_id)))

    def files(self, tenant: str, *, after: str | None, newest_first: bool) -> Iterator[FileRecord]:
        """The tenant's files behind `after`, in the order of their creation; unreadable ones are left out."""
        return self._listed(FileRecord, tenant, after, newest_first)

    def add_batch(self, record: BatchRecord) -> None:
        """Accept a batch: from here on it comes to its end whatever ends meanwhile."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._key("batch", record.id), msgspec.json.encode(record), nx=True)
            pipe.zadd(self._key("batches", record.tenant), {record.id: 0})
            pipe.sadd(self._key("open"), record.id)
            pipe.execute()

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """The tenant's batch, None if it has none of that id; raises CodecError."""
        return self._record(BatchRecord, tenant, batch_id)

    def batches(self, tenant: str, *, after: str | None) -> Iterator[BatchRecord]:
        """The tenant's batches behind `after`, newest first; unreadable ones are left out."""
        return self._listed(BatchRecord, tenant, after, True)

    def open_batches(self) -> list[BatchRecord]:
        """Batches of all tenants that are not over, oldest first; forgets those that are."""
        members: Any = self._client.smembers(self._key("open"))
        records = []
        for batch_id in sorted(map(text, members)):
            data: Any = self._client.get(self._key("batch", batch_id))
            try:
                record = None if data is None else msgspec.json.decode(data, type=BatchRecord)
            except msgspec.DecodeError as error:
                # Of another version, which may be running beside this one.
                warn_once(log, f"batch {batch_id} is left alone: {error}")
                continue
            if record is None or record.status.terminal:
                self._client.srem(self._key("open"), batch_id)
            else:
                records.append(record)
        return records

    def open_count(self) -> int:
        """How many batches are not over."""
        return int(self._client.scard(self._key("open")))

    def is_open(self, batch_id: str) -> bool:
        """Whether the batch is not over."""
        return bool(self._client.sismember(self._key("open"), batch_id))

    def change(self, batch_id: str, step: Callable[[BatchRecord], BatchRecord]) -> BatchRecord | None:
        """Apply `step` to the batch as it is at that moment; None if the batch is gone.

        `step` returns its argument where nothing is to be done, and may be called again when another process changed
        the record in between.
        """
        key = self._key("batch", batch_id)
        while True:
            data: Any = self._client.get(key)
            if data is None:
                return None
            record = msgspec.json.decode(data, type=BatchRecord)
            changed = step(record)
            if changed == record:
                return record
            ttl_ms = KEEP_BATCH_S * 1000 if changed.status.terminal else 0
            args = [data, msgspec.json.encode(changed), ttl_ms]
            if scripts.call(self._client, "swap", [key], args, allow_oom=True) == 1:
                return changed

    def hold(self, batch_id: str, holder: str, *, ttl_ms: int) -> bool:
        """Take or renew the lease on a batch; False while another holder has it.

        It saves work and protects nothing: every step on a batch may be repeated by two processes at once.
        """
        lock = self._keys.lock(f"batch:{batch_id}")
        return bool(scripts.call(self._client, "hold", [lock], [holder, ttl_ms], allow_oom=True))

    def holder(self, batch_id: str) -> str | None:
        """Who has the lease on a batch."""
        value: Any = self._client.get(self._keys.lock(f"batch:{batch_id}"))
        return None if value is None else text(value)

    def let_go(self, batch_id: str, holder: str) -> None:
        """Give the lease back."""
        scripts.call(self._client, "unlock", [self._keys.lock(f"batch:{batch_id}")], [holder], allow_oom=True)

    def _key(self, *parts: str) -> str:
        return self._keys.store(self._store, *parts)

    def _record(self, kind: type[_Record], tenant: str, record_id: str) -> _Record | None:
        name = "file" if kind is FileRecord else "batch"
        data: Any = self._client.get(self._key(name, record_id))
        try:
            return _decoded(kind, tenant, data)
        except msgspec.DecodeError as error:
            raise CodecError(f"the record of {name} {record_id} cannot be read: {error}") from None

    def _listed(self, kind: type[_Record], tenant: str, after: str | None, newest_first: bool) -> Iterator[_Record]:
        # Ids begin with their time, so their order in the index is that of their creation.
        name, plural = ("file", "files") if kind is FileRecord else ("batch", "batches")
        index = self._key(plural, tenant)
        page = 128
        while True:
            bound = f"({after}" if after is not None else None
            ids: Any
            if newest_first:
                ids = self._client.zrevrangebylex(index, bound or "+", "-", start=0, num=page)
            else:
                ids = self._client.zrangebylex(index, bound or "-", "+", start=0, num=page)
            keys = [self._key(name, text(record_id)) for record_id in ids]
            values: Any = self._client.mget(keys) if keys else []
            for record_id, data in zip(map(text, ids), values, strict=True):
                after = record_id
                try:
                    record = _decoded(kind, tenant, data)
                except msgspec.DecodeError as error:
                    warn_once(log, f"{name} {record_id} is left out of lists: {error}")
                    continue
                if record is None:
                    self._client.zrem(index, record_id)  # it expired
                else:
                    yield record
            if len(ids) < page:
                return


def _decoded(kind: type[_Record], tenant: str, data: bytes | None) -> _Record | None:
    if data is None:
        return None
    record = msgspec.json.decode(data, type=kind)
    return record if record.tenant == tenant else None


def drop_results(client: redis.Redis, keys: Keys, run: str, entries: list[tuple[str, int]]) -> None:
    """Delete results (entry id, payload bytes) that their reader has stored, which makes room in the backlog."""
    results = keys.results(run)
    flat: list[str | int] = [part for entry in entries for part in entry]
    names = [results, keys.bytes, keys.held]
    scripts.call(client, "drop_results", names, [keys.suffix(results), *flat], allow_oom=True)
