"""Reading what the queue and datasets say of a run: status, results, errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec
import pyarrow.parquet as pq
import redis
from embedq_broker.connect import broker_errors
from embedq_broker.embedded import running_server_url
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats, model_facts
from embedq_broker.registry import Registry
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.errors import OutputError, RunNotFoundError
from embedq_schemas.manifest import read_manifest
from embedq_schemas.run import RunState
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.sinks.dataset import STATE_NAME, Dataset
from embedq_worker.sinks.errors import read_errors

from embedq.display import state_json
from embedq.options import ErrorsOptions

Locate = Callable[[str | None, ErrorsOptions], tuple[redis.Redis, Keys, str | None]]


def locate(output: Path) -> tuple[str, str, str]:
    """(server URL, queue, run) of the `embedq run` that is going on in `output`; raises RunNotFoundError."""
    spec = Dataset(output).run_spec()
    if spec is None:
        raise RunNotFoundError(f"{output} holds no run")
    url = running_server_url((output / STATE_NAME).resolve())
    if url is None:
        ended = "it is complete" if Dataset(output).success.exists() else "start its command again to resume it"
        raise RunNotFoundError(f"no embedq run is going on in {output}; {ended}")
    return url, spec.queue, spec.run


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
    """Write vectors as JSON lines, in the order of their commits. Returns the cursor of a stream."""
    registry = Registry(client, keys)
    state = registry.state(run)
    if state.spec.sink.kind == "parquet":
        _print_dataset(registry, state, follow=follow, stopping=stopping, out=out)
        return None
    cursor = after or "-"
    while True:
        # The state is read first: what is in the stream afterwards is all there will be once the run is over.
        over = registry.state(run).status.terminal
        start = cursor if cursor == "-" else f"({cursor}"
        entries: Any = client.xrange(keys.results(run), start, "+", count=16)
        for entry_id, fields in entries:
            _print_batch(VectorBatch.decode(fields[b"payload"]), out)
            cursor = entry_id.decode()
        if not entries and (over or not follow or stopping()):
            return None if cursor == "-" else cursor
        if not entries:
            time.sleep(0.1)


def _print_dataset(
    registry: Registry, state: RunState, *, follow: bool, stopping: Callable[[], bool], out: TextIO
) -> None:
    path = Path(state.spec.sink.path)  # type: ignore[union-attr]
    if not path.is_dir():
        raise OutputError(f"the dataset {path} is not visible on this machine; read it where the workers write it")
    seen: set[str] = set()
    while True:
        over = registry.state(state.spec.run).status.terminal
        fresh = [file for file in read_manifest(path).values() if file.token not in seen]
        for file in fresh:
            seen.add(file.token)
            for batch in pq.ParquetFile(path / file.name).iter_batches(batch_size=1024):
                _print_batch(VectorBatch(batch), out)
        if not fresh and (over or not follow or stopping()):
            return
        if not fresh:
            time.sleep(0.2)


def _print_batch(batch: VectorBatch, out: TextIO) -> None:
    for row in batch.table.drop_columns(["text_sha256"]).to_pylist():
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def errors_of(run: str, options: ErrorsOptions, connect_to: Locate) -> Iterator[DeadLetter]:
    """A run's dead letters: those in its dataset, where this machine sees it, then those still in Redis."""
    directory = Path(run)
    if directory.is_dir() and Dataset(directory).success.exists():
        yield from read_errors(Dataset(directory))
        return
    client, keys, name = connect_to(run, options)
    with broker_errors(options.redis_url):
        registry = Registry(client, keys)
        state = registry.state(str(name))
        if state.spec.sink.kind == "parquet":
            yield from read_errors(Dataset(Path(state.spec.sink.path)))
        after = "-"
        while page := registry.dead_letters(str(name), after=after):
            yield from (letter for _, letter in page)
            after = page[-1][0]
