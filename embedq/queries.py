"""Reading what the queue and datasets say of a run: status, results, errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import msgspec
import pyarrow.parquet as pq
import redis
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats, model_facts
from embedq_broker.outcome import Cursor, look_at
from embedq_broker.registry import Registry
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.errors import OutputError, UsageError
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.sinks.dataset import Dataset, dataset_at
from embedq_worker.sinks.errors import read_errors
from embedq_worker.sinks.store import SUCCESS_NAME
from redis.exceptions import RedisError

from embedq.dataset.export.jsonl import json_lines
from embedq.display import state_json


def status_document(client: redis.Redis, keys: Keys, run: str | None) -> dict[str, Any]:
    """Everything `embedq status` knows, for machines."""
    registry = Registry(client, keys)
    states = [registry.state(run)] if run else registry.runs()
    now = time.time()
    return {
        "queue": keys.queue,
        "model": model_facts(client, keys),
        "backlog_bytes": registry.backlog_bytes(),
        "runs": [state_json(state) for state in states],
        "workers": [msgspec.to_builtins(b) | {"silent_s": now - b.at} for b in heartbeats(client, keys)],
    }


def print_results(
    client: redis.Redis,
    keys: Keys,
    run: str,
    *,
    follow: bool,
    after: str | None,
    stopping: Callable[[], bool],
    out: TextIO,
) -> str | None:
    """Write vectors as JSON lines, in the order of their commits. Returns the cursor of a stream.

    Raises:
        UsageError: `after` is no cursor, or is given for a dataset, which has none.
        OutputError: the run's dataset is not visible here.
    """
    registry = Registry(client, keys)
    state = registry.state(run)
    if state.spec.sink.kind == "parquet":
        if after is not None:
            raise UsageError("--after belongs to results kept in Redis; this run writes a dataset, which has no cursor")
        dataset = dataset_at(state.spec.sink.path)
        if (owner := dataset.run_spec()) is not None and owner.run != run:
            raise OutputError(f"{dataset} holds run {owner.run}, not {run}")
        print_dataset(dataset, over=lambda: _is_over(registry, run, dataset), follow=follow, stopping=stopping, out=out)
        return None
    try:
        cursor = Cursor.parse(after) if after not in (None, "-") else Cursor()
    except UsageError:
        raise UsageError(f"--after {after!r} is not a cursor that an earlier call printed") from None
    while True:
        (look,) = look_at(client, keys, [(run, cursor)], count=16)
        for _, batch in look.batches():
            _print_batch(batch, out)
        cursor = look.cursor(cursor)
        if not look.results and (look.over or not follow or stopping()):
            return None if cursor.results == "0" else cursor.results
        if not look.results:
            out.flush()
            time.sleep(0.1)


def _is_over(registry: Registry, run: str, dataset: Dataset) -> bool:
    """Whether nothing more will be written. The embedded server of `embedq run` ends before we could ask it."""
    try:
        return registry.state(run).status.terminal
    except RedisError:
        if dataset.store.exists(SUCCESS_NAME):
            return True
        raise


def print_dataset(
    dataset: Dataset, *, over: Callable[[], bool], follow: bool, stopping: Callable[[], bool], out: TextIO
) -> None:
    """Write the vectors of `dataset` as JSON lines; with `follow`, until `over`."""
    if dataset.is_directory and not dataset.path.is_dir():
        raise OutputError(f"the dataset {dataset} is not visible on this machine; read it where the workers write it")
    seen: set[str] = set()
    while True:
        last = over()
        fresh = [file for file in dataset.store.files().values() if file.token not in seen]
        for file in fresh:
            seen.add(file.token)
            for batch in pq.ParquetFile(dataset.store.source(file.name)).iter_batches(batch_size=1024):
                _print_batch(VectorBatch(batch), out)
        if not fresh and (last or not follow or stopping()):
            return
        if not fresh:
            out.flush()
            time.sleep(0.2)


def _print_batch(batch: VectorBatch, out: TextIO) -> None:
    out.writelines(json_lines(batch.table.drop_columns(["text_sha256"])))


def errors_of(client: redis.Redis, keys: Keys, run: str) -> Iterator[DeadLetter]:
    """A run's dead letters: those in its dataset, where this machine sees it, then those still in Redis."""
    registry = Registry(client, keys)
    state = registry.state(run)
    if state.spec.sink.kind == "parquet":
        dataset = dataset_at(state.spec.sink.path)
        owner = dataset.run_spec()
        if owner is not None and owner.run == run:
            yield from read_errors(dataset)
    after = "-"
    while page := registry.dead_letters(run, after=after):
        yield from (letter for _, letter in page)
        after = page[-1][0]
