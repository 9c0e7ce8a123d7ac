"""The thread that brings batches to their end, whichever gateway took them in."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial

import msgspec
import redis
from embedq_broker.batches import BatchError, BatchRecord, BatchRegistry, FileRecord
from embedq_broker.keys import Keys
from embedq_broker.settings import BrokerSettings
from embedq_schemas.errors import StorageError
from embedq_schemas.run import RunStatus
from redis.exceptions import RedisError

from embedq_gateway.batch.output import write_output, write_unstarted
from embedq_gateway.batch.plan import BatchLimits, InvalidBatchError, Plan, make_plan
from embedq_gateway.batch.work import BatchWork
from embedq_gateway.errors import ApiError
from embedq_gateway.files import Draft, FileStore
from embedq_gateway.watch import QueueWatch

log = logging.getLogger(__name__)

_INPUT_NAME = "input.jsonl"
_LEASE_MS = 10_000
_RENEW_S = 2.5
_POLL_S = 0.2
_LONGEST_PAUSE_S = 5.0
_CANCEL_WAIT_S = 5.0
"""How long a batch that ends early waits for what is being computed at that moment."""
_SWEEP_S = 600.0
_FAILING_S = 60.0
"""A batch whose step has failed for this long, for no reason that could pass, is ended."""
_UNFINISHED = {
    RunStatus.COMPLETED: ("result_lost", "The queue's server lost this request's result; send it again."),
    RunStatus.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    RunStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was executed."),
}
_ENDED_AT = {
    RunStatus.COMPLETED: "completed_at",
    RunStatus.EXPIRED: "expired_at",
    RunStatus.CANCELLED: "cancelled_at",
}


class BatchRunner:
    """Works on the open batches of one store, a step at a time, those of all tenants in turn."""

    def __init__(
        self,
        client: redis.Redis,
        settings: BrokerSettings,
        registry: BatchRegistry,
        store: FileStore,
        watch: QueueWatch,
        limits: BatchLimits,
    ) -> None:
        self._client = client
        self._settings = settings
        self._keys = Keys(settings.queue)
        self._registry = registry
        self._store = store
        self._watch = watch
        self._limits = limits
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._works: dict[str, BatchWork] = {}
        self._held: set[str] = set()
        self._failing_since: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._renewer = threading.Thread(target=self._renew, name="batch-leases", daemon=True)
        self._next_sweep = time.monotonic() + _RENEW_S

    def start(self) -> None:
        self._thread.start()
        self._renewer.start()

    def stop(self, timeout_s: float) -> None:
        """Finish the step under way and give the leases back, so that another gateway goes on at once."""
        self._stop.set()
        self._thread.join(timeout_s)
        self._renewer.join(timeout_s)
        try:
            for batch_id in tuple(self._held):
                self._release(batch_id)
        except RedisError as error:
            log.warning("leases on batches run out by themselves: %s", error)

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._stop.is_set():
            try:
                busy = self._round()
                pause_s = 0.0 if busy else _POLL_S
            except RedisError as error:
                pause_s = min(max(2 * pause_s, _POLL_S), _LONGEST_PAUSE_S)
                log.warning("batches wait for the queue's server: %s", error)
            except Exception:
                pause_s = _LONGEST_PAUSE_S
                log.exception("batches wait")
            self._stop.wait(pause_s)

    def _round(self) -> bool:
        """One step on each open batch that is ours or nobody's. Returns whether any moved."""
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + _SWEEP_S
            self._store.sweep(self._registry.file_exists)
        busy = False
        records = self._registry.open_batches()
        for gone in self._held - {record.id for record in records}:
            self._release(gone)
        for record in records:
            if self._stop.is_set():
                break
            if self._take(record.id):
                self._held.add(record.id)
                busy = self._guarded_step(record) or busy
            else:
                self._release(record.id)
        return busy

    def _take(self, batch_id: str) -> bool:
        if self._registry.hold(batch_id, self._holder, ttl_ms=_LEASE_MS):
            return True
        holder = self._registry.holder(batch_id)
        if holder is None or not _is_dead(holder):
            return False
        # Killed on this machine: there is nothing to wait for.
        self._registry.let_go(batch_id, holder)
        return self._registry.hold(batch_id, self._holder, ttl_ms=_LEASE_MS)

    def _release(self, batch_id: str) -> None:
        self._works.pop(batch_id, None)
        self._held.discard(batch_id)
        self._failing_since.pop(batch_id, None)
        self._registry.let_go(batch_id, self._holder)

    def _guarded_step(self, record: BatchRecord) -> bool:
        """A step whose failure holds up no other batch."""
        try:
            moved = self._step(record)
        except RedisError:
            raise
        except (StorageError, OSError) as error:
            log.warning("batch %s waits: %s", record.id, error)
            return False
        except Exception:
            self._works.pop(record.id, None)
            log.exception("batch %s: its step failed", record.id)
            if time.monotonic() - self._failing_since.setdefault(record.id, time.monotonic()) > _FAILING_S:
                self._fail(record.id, [BatchError(code="internal", message="The gateway failed; its log says why.")])
            return False
        self._failing_since.pop(record.id, None)
        return moved

    def _step(self, record: BatchRecord) -> bool:
        expired = time.time() >= record.expires_at
        if record.status is RunStatus.FINALIZING:
            return self._finish(record, RunStatus.COMPLETED)
        if record.status is RunStatus.CANCELLING:
            return self._end_early(record, RunStatus.CANCELLED, since=record.cancelling_at or record.created_at)
        if expired:
            return self._end_early(record, RunStatus.EXPIRED, since=record.expires_at)
        if record.status is RunStatus.VALIDATING:
            return self._validate(record)
        return self._advance(record)

    def _validate(self, record: BatchRecord) -> bool:
        model = self._watch.state.model
        if model is None:
            return False
        source = self._store.path(record.input_file_id)
        try:
            if not source.exists():
                message = "The input file was deleted before it was read."
                raise InvalidBatchError([BatchError(code="file_not_found", message=message)])
            plan = make_plan(source, model, self._limits)
        except InvalidBatchError as error:
            self._fail(record.id, error.errors)
            return True
        folder = self._store.workspace(record.id)
        # The file may be deleted from here on; the batch keeps it.
        self._store.keep(record.input_file_id, folder / _INPUT_NAME)
        plan = plan.save(folder)
        self._change(
            record.id,
            (RunStatus.VALIDATING,),
            RunStatus.IN_PROGRESS,
            in_progress_at=int(time.time()),
            model=model.id,
            total=len(plan.offsets),
            failed=len(plan.refusals),
        )
        return True

    def _advance(self, record: BatchRecord) -> bool:
        work = self._work(record)
        if work is None:
            # Its directory was lost; the plan is made again from the input file.
            self._change(record.id, (RunStatus.IN_PROGRESS,), RunStatus.VALIDATING)
            return True
        moved = work.feed(self._settings.max_backlog_bytes)
        moved = work.gather() or moved
        completed, failed = work.counts()
        if work.over:
            self._change(
                record.id,
                (RunStatus.IN_PROGRESS,),
                RunStatus.FINALIZING,
                finalizing_at=int(time.time()),
                completed=completed,
                failed=failed,
            )
            return True
        if (completed, failed) != (record.completed, record.failed):
            self._change(record.id, (RunStatus.IN_PROGRESS,), completed=completed, failed=failed)
        return moved

    def _end_early(self, record: BatchRecord, status: RunStatus, *, since: int) -> bool:
        work = self._work(record)
        if work is None:
            source = self._store.path(record.input_file_id)
            write = partial(write_unstarted, record, source, _unfinished(status), self._limits.max_line_bytes)
            self._publish(record, status, write)
            return True
        work.cancel()
        moved = work.gather()
        if not work.over and time.time() < since + _CANCEL_WAIT_S:
            return moved
        return self._finish(record, status)

    def _finish(self, record: BatchRecord, status: RunStatus) -> bool:
        work = self._work(record)
        if work is None:
            self._fail(record.id, [BatchError(code="internal", message="The batch's directory was lost.")])
            return True
        while work.gather():
            pass
        self._publish(record, status, partial(write_output, record, work, _unfinished(status)))
        work.forget()
        return True

    def _publish(
        self, record: BatchRecord, status: RunStatus, write: Callable[[Draft, Draft], tuple[int, int]]
    ) -> None:
        """Have `write` fill the output and the error file, make them known, and end the batch."""
        now = int(time.time())
        expires_at = now + record.output_ttl_s if record.output_ttl_s else None
        with self._store.writing() as output, self._store.writing() as errors:
            completed, failed = write(output, errors)
            for draft, file_id, name in (
                (output, record.output_name, f"{record.id}_output.jsonl"),
                (errors, record.error_name, f"{record.id}_error.jsonl"),
            ):
                if draft.size:
                    self._store.publish(draft, file_id)
                    self._registry.add_file(
                        FileRecord(
                            id=file_id,
                            tenant=record.tenant,
                            filename=name,
                            purpose="batch_output",
                            bytes=draft.size,
                            created_at=now,
                            expires_at=expires_at,
                        )
                    )
            self._change(
                record.id,
                (record.status,),
                status,
                **{_ENDED_AT[status]: now},
                total=completed + failed,
                completed=completed,
                failed=failed,
                output_file_id=record.output_name if output.size else None,
                error_file_id=record.error_name if errors.size else None,
            )
        log.info("batch %s is %s: %d completed, %d failed", record.id, status, completed, failed)
        self._clean_up(record.id)

    def _work(self, record: BatchRecord) -> BatchWork | None:
        """The batch's work, opened again after a restart; None without a plan."""
        if record.id not in self._works:
            folder = self._store.workspace(record.id)
            plan = Plan.load(folder)
            if plan is None or not (folder / _INPUT_NAME).exists():
                return None
            self._works[record.id] = BatchWork(
                self._client,
                self._keys,
                record,
                plan,
                folder / _INPUT_NAME,
                folder,
                lambda: self._registry.is_open(record.id),
            )
        return self._works[record.id]

    def _fail(self, batch_id: str, errors: list[BatchError] | tuple[BatchError, ...]) -> None:
        every = tuple(status for status in RunStatus if not status.terminal)
        self._change(batch_id, every, RunStatus.FAILED, failed_at=int(time.time()), errors=tuple(errors))
        self._clean_up(batch_id)

    def _clean_up(self, batch_id: str) -> None:
        self._works.pop(batch_id, None)
        self._store.drop_workspace(batch_id)

    def _change(
        self, batch_id: str, allowed: tuple[RunStatus, ...], status: RunStatus | None = None, **fields: object
    ) -> None:
        """Move the batch on, unless somebody moved it elsewhere meanwhile."""

        def step(record: BatchRecord) -> BatchRecord:
            if record.status not in allowed:
                return record
            return msgspec.structs.replace(record, status=status or record.status, **fields)

        self._registry.change(batch_id, step)

    def _renew(self) -> None:
        """Keep the leases during steps that take long."""
        while not self._stop.wait(_RENEW_S):
            try:
                for batch_id in tuple(self._held):
                    self._registry.hold(batch_id, self._holder, ttl_ms=_LEASE_MS)
            except RedisError as error:
                log.warning("cannot renew leases on batches: %s", error)


def _unfinished(status: RunStatus) -> ApiError:
    """What requests without an outcome get in a batch that ends with `status`."""
    code, message = _UNFINISHED[status]
    return ApiError(500, code, message)


def _is_dead(holder: str) -> bool:
    """Whether the gateway of this name ran on this machine, and its process is gone."""
    host, pid, _ = holder.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    if int(pid) == os.getpid():
        # A container that was started again: the same process id is ours now.
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
