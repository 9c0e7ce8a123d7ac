"""What the output directory of `embedq run` says of its run, and where the run's queue is while it goes on."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embedq_broker.embedded import running_server_url
from embedq_schemas.errors import OutputError, RunConflictError, RunNotFoundError
from embedq_schemas.manifest import read_manifest
from embedq_schemas.run import RunCounters, RunSpec, RunState, RunStatus
from embedq_worker.sinks.dataset import RUN_NAME, STATE_NAME, Dataset
from embedq_worker.sinks.errors import read_errors

from embedq.options import ConnectOptions


@dataclass(frozen=True)
class Place:
    """Where a run lives."""

    url: str
    queue: str
    run: str


def is_directory_name(run: str) -> bool:
    """Whether `run`, as given on a command line, means a directory; run names hold no slash."""
    return "/" in run or Path(run).is_dir()


def finished_state(dataset: Dataset, spec: RunSpec) -> RunState | None:
    """The final state of a complete dataset, from its own files; None while it is not complete.

    Raises:
        OutputError: `_SUCCESS` is not what this program wrote.
    """
    try:
        summary = json.loads(dataset.success.read_bytes())
        counters = RunCounters(**{name: summary[name] for name in RunCounters.__dataclass_fields__})
        files, finished_at = int(summary["files"]), float(summary["finished_at"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{dataset.success} cannot be read: {error}") from None
    return RunState(
        spec=spec,
        status=RunStatus.COMPLETED,
        counters=counters,
        input_closed=True,
        position=None,
        committed_files=files,
        published_files=files,
        dead_letters=0,
        error=None,
        created_at=spec.created_at,
        updated_at=finished_at,
    )


def resting_run(run: str, options: ConnectOptions) -> RunState | None:
    """What the directory `run` itself says, where no server has more to say; None where one is to be asked.

    That is a complete dataset, or one of an `embedq run` with a server of its own that is not going on: its state is
    `in_progress` with the outcomes its files prove.
    """
    if not is_directory_name(run):
        return None
    dataset = Dataset(Path(run))
    spec = dataset.run_spec()
    if spec is None:
        return None
    if (finished := finished_state(dataset, spec)) is not None:
        return finished
    elsewhere = spec.model_fingerprint is None or spec.queue == spec.run or "redis_url" in options.model_fields_set
    if elsewhere or running_server_url((dataset.path / STATE_NAME).resolve()) is not None:
        return None
    files = list(read_manifest(dataset.path).values())
    failed = sum(1 for _ in read_errors(dataset))
    rows = sum(file.rows for file in files)
    tokens = sum(file.tokens for file in files if not file.copied)
    counters = RunCounters(input=rows + failed, succeeded=rows, failed=failed, tokens=tokens)
    return RunState(
        spec=spec,
        status=RunStatus.IN_PROGRESS,
        counters=counters,
        input_closed=False,
        position=None,
        committed_files=len(files),
        published_files=len(files),
        dead_letters=0,
        error=f"interrupted; the embedq run command that made {run} resumes it",
        created_at=spec.created_at,
        updated_at=spec.created_at,
    )


def locate(output: Path, redis_url: str) -> Place:
    """The queue of the run in `output`: that of its embedded server, or the one at `redis_url` if it has none.

    Raises:
        RunNotFoundError: there is no run, or its embedded server is not running.
    """
    dataset = Dataset(output)
    spec = dataset.run_spec()
    if spec is None:
        raise RunNotFoundError(f"{output} holds no run")
    state = (output / STATE_NAME).resolve()
    if not state.is_dir():
        return Place(redis_url, spec.queue, spec.run)
    url = running_server_url(state)
    if url is None:
        raise RunNotFoundError(f"the run in {output} is interrupted; the embedq run command that made it resumes it")
    return Place(url, spec.queue, spec.run)


@contextmanager
def owned(dataset: Dataset) -> Iterator[None]:
    """Keep a second `embedq run` out of the directory."""
    with (dataset.path / RUN_NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunConflictError(f"another embedq run is writing into {dataset.path}") from None
        yield
