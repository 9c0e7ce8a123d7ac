"""Finishing: what is committed gets published, what failed gets written down, and a run that adds up is completed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import redis
from embedq_broker.commit import unpublished
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys
from embedq_broker.liveness import exclusive
from embedq_broker.registry import Registry
from embedq_schemas.errors import CodecError, EmbedqError, RunNotFoundError
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.run import RunState, RunStatus

from embedq_worker.sinks.dataset import Dataset, open_dataset
from embedq_worker.sinks.errors import drain, keep_one_error_each
from embedq_worker.sinks.files import storage_errors
from embedq_worker.sinks.publish import publish
from embedq_worker.sinks.store import SUCCESS_NAME, CommittedFileError

log = logging.getLogger(__name__)

_GONE_LEASES = 10
_LOCK_MS = 3_000
"""A process killed while it finishes a run delays the next one by this much."""


def finish_run(client: redis.Redis, keys: Keys, run: str, roots: Sequence[str | Path]) -> bool:
    """Bring a run on towards its end, as far as it can go now. Returns whether it is over.

    Raises:
        OutputError: the run's dataset is not below `roots`.
        StorageError: the disk refused.
    """
    registry = Registry(client, keys)
    with exclusive(client, keys, f"finish:{run}", ttl_ms=_LOCK_MS) as held:
        if not held:
            return False
        state = registry.state(run)
        if state.status.terminal:
            return True
        if state.spec.sink.kind != "parquet":
            return False
        dataset = open_dataset(state.spec.sink.path, roots)
        settling = state.status is RunStatus.FINALIZING or (state.status is RunStatus.CANCELLING and state.settled)
        while state.dead_letters and (settling or state.dead_letters > 1000):
            if not drain(client, registry, keys, dataset, run):
                break
            state = registry.state(run)
        if not settling:
            return False
        for record in registry.unpublished(run):
            publish(client, keys, dataset, record, replay=True)
        state = registry.state(run)
        if state.committed_files != state.published_files or state.dead_letters:
            return False
        return _complete(client, keys, registry, dataset, state)


def _complete(client: redis.Redis, keys: Keys, registry: Registry, dataset: Dataset, state: RunState) -> bool:
    run, counters = state.spec.run, state.counters
    files = [file for file in dataset.store.files().values() if file.run == run]
    rows = sum(file.rows for file in files)
    if rows > counters.succeeded:
        files = _withdraw_strangers(client, keys, dataset, files, counters.succeeded)
        rows = sum(file.rows for file in files)
    present = dataset.store.sizes()
    missing = [file.name for file in files if file.name not in present]
    if rows != counters.succeeded or missing:
        error = (
            f"{dataset} lost files: {', '.join(missing[:3])} of its manifest do not exist"
            if missing
            else f"{dataset} holds {rows} rows, {counters.succeeded} were committed"
        )
        log.error("run %s failed: %s", run, error)
        registry.transition(run, RunStatus.FAILED, [state.status], error=error)
        return True
    fault_point("finish.begun")
    done = RunStatus.CANCELLED if state.status is RunStatus.CANCELLING else RunStatus.COMPLETED
    with storage_errors(f"finish {dataset}"):
        dataset.prepare(state.spec)
        # A server that lost the end of its history may have had letters written down twice.
        keep_one_error_each(dataset, counters.failed)
        listed = {file.name for file in files}
        dataset.store.delete(name for name in present if fnmatch(name, "part-*.parquet") and name not in listed)
        # Every commit of this run is published: what is staged here was never committed.
        dataset.store.discard_staged()
        if done is RunStatus.COMPLETED:
            summary = {
                "run": run,
                "input": counters.input,
                "succeeded": counters.succeeded,
                "failed": counters.failed,
                "skipped": counters.skipped,
                "tokens": counters.tokens,
                "copied": sum(file.rows for file in files if file.copied),
                "files": len(files),
                "finished_at": time.time(),
            }
            dataset.store.replace(SUCCESS_NAME, json.dumps(summary).encode() + b"\n")
    fault_point("finish.marked")
    registry.transition(run, done, [state.status])
    fault_point("finish.done")
    log.info("run %s %s: rows %d, files %d", run, done, rows, len(files))
    return True


def _withdraw_strangers(
    client: redis.Redis, keys: Keys, dataset: Dataset, files: list[PublishedFile], succeeded: int
) -> list[PublishedFile]:
    """Take out files of commits the server has lost, if without them the rows are exactly those it counted.

    A server that lost acknowledged work (its append-only file was cut, a lagging replica took over) had their documents
    computed again; both copies are the same rows.
    """
    strangers = [file for file in files if not client.exists(keys.token(file.token))]
    kept = [file for file in files if file not in strangers]
    if not strangers or sum(file.rows for file in kept) != succeeded:
        return files
    log.warning("%d files of %s belong to commits the server lost; they are withdrawn", len(strangers), dataset)
    dataset.withdraw({file.token for file in strangers})
    return kept


def _fail(registry: Registry, run: str, error: str) -> None:
    with suppress(RunNotFoundError):
        moved, _ = registry.transition(run, RunStatus.FAILED, [s for s in RunStatus if not s.terminal], error=error)
        if moved:
            log.error("run %s failed: %s", run, error)


def stranded(documents: int) -> str:
    """Why a run fails whose queue holds nothing, although so many documents have no outcome."""
    return f"{documents} documents are in no stream any more: removed by hand, or lost by the server"


def _fail_stranded(registry: Registry) -> None:
    """Say so where documents got lost outside of the protocol: such a run would wait for ever."""
    if not registry.streams_empty():
        return
    states = {state.spec.run: state for state in registry.runs()}
    for run in registry.open_datasets():
        # Services make so many runs that a dataset's is soon not among the newest.
        if run not in states:
            with suppress(RunNotFoundError, CodecError):
                states[run] = registry.state(run)
    for state in states.values():
        if state.status.terminal or not state.input_closed or state.settled:
            continue
        if missing := registry.missing(state.spec.run):
            _fail(registry, state.spec.run, stranded(missing))


def sweep_runs(client: redis.Redis, keys: Keys, roots: Sequence[str | Path], *, older_than_ms: int) -> None:
    """Housekeeping of all runs of the queue: publish what dead workers left, finish what is settled."""
    registry = Registry(client, keys)
    registry.forget_expired()
    seconds, micros = client.time()
    now_ms = seconds * 1000 + micros // 1000
    for record in unpublished(client, keys):
        if now_ms - record.age_base_ms > older_than_ms:
            try:
                publish(client, keys, open_dataset(record.dataset, roots), record, replay=True)
            except EmbedqError as error:
                log.warning("cannot publish a file of run %s: %s", record.file.run, error)
                # Another machine may see the directory late; what is still gone much later is gone.
                if isinstance(error, CommittedFileError) and now_ms - record.age_base_ms > _GONE_LEASES * older_than_ms:
                    _fail(registry, record.file.run, str(error))
    _fail_stranded(registry)
    for run in registry.open_datasets():
        try:
            finish_run(client, keys, run, roots)
        except EmbedqError as error:
            log.warning("cannot finish run %s: %s", run, error)
