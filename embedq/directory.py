"""What the output of `embedq run` says of its run, and where the run's queue is while it goes on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embedq_broker.embedded import running_server_url
from embedq_schemas.errors import OutputError, RunConflictError, RunNotFoundError
from embedq_schemas.run import RunCounters, RunSpec, RunState, RunStatus
from embedq_worker.sinks.dataset import RUN_NAME, STATE_NAME, Dataset, dataset_at
from embedq_worker.sinks.errors import read_errors
from embedq_worker.sinks.files import storage_errors
from embedq_worker.sinks.s3 import S3Store
from embedq_worker.sinks.store import SUCCESS_NAME

from embedq.options import RunPlaceOptions
from embedq.ownership import Ownership


@dataclass(frozen=True)
class Place:
    """Where a run lives."""

    url: str
    queue: str
    run: str


@dataclass(frozen=True)
class LocalState:
    """What `embedq run` keeps on this machine until a dataset is complete."""

    #: All of it.
    folder: Path
    #: Files of the embedded server.
    server: Path
    #: Folder for documents that wait for known vectors.
    spool: Path
    #: File whose lock keeps out a second `embedq run`.
    lock: Path


def local_state(dataset: Dataset, given: Path | None = None) -> LocalState:
    """Where a run's state is: in its dataset's directory, or, of one on an object store, below `given` or at home."""
    if not isinstance(dataset.place, S3Store):
        path = dataset.path
        return LocalState(path / STATE_NAME, path / STATE_NAME, dataset.staging, path / RUN_NAME)
    if given is None:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        given = Path(home) / "embedq"
    name = hashlib.sha256(f"{dataset.place.endpoint} {dataset}".encode()).hexdigest()[:16]
    folder = given.absolute() / name
    return LocalState(folder, folder / "redis", folder, folder / "lock")


def is_directory_name(run: str) -> bool:
    """Whether `run`, as given on a command line, means a directory or a URL; run names hold no slash."""
    return "/" in run or Path(run).is_dir()


def finished_state(dataset: Dataset, spec: RunSpec) -> RunState | None:
    """The final state of a complete dataset, from its own files; None while it is not complete.

    Raises:
        OutputError: `_SUCCESS` is not what this program wrote.
    """
    try:
        summary = json.loads(dataset.store.read(SUCCESS_NAME))
        counters = RunCounters(**{name: summary[name] for name in RunCounters.__dataclass_fields__})
        files, finished_at = int(summary["files"]), float(summary["finished_at"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{dataset}/{SUCCESS_NAME} cannot be read: {error}") from None
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


def resting_run(run: str, options: RunPlaceOptions) -> RunState | None:
    """What the dataset `run` itself says, where no server has more to say; None where one is to be asked.

    That is a complete dataset, or one of an `embedq run` with a server of its own that is not going on: its state is
    `in_progress` with the outcomes its files prove.
    """
    if not is_directory_name(run):
        return None
    dataset = dataset_at(run)
    spec = dataset.run_spec()
    if spec is None:
        return None
    if (finished := finished_state(dataset, spec)) is not None:
        return finished
    elsewhere = spec.model_fingerprint is None or spec.queue == spec.run or "redis_url" in options.model_fields_set
    if elsewhere or running_server_url(local_state(dataset, options.state).server.resolve()) is not None:
        return None
    stopped = "interrupted" if dataset.is_directory else "not going on on this machine"
    files = list(dataset.store.files().values())
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
        error=f"{stopped}; the embedq run command that made {run} resumes it",
        created_at=spec.created_at,
        updated_at=spec.created_at,
    )


def locate(output: str, redis_url: str, state: Path | None = None) -> Place:
    """The queue of the run in `output`: that of its embedded server, or the one at `redis_url` if it has none.

    Raises:
        RunNotFoundError: there is no run, or its embedded server is not running.
    """
    dataset = dataset_at(output)
    spec = dataset.run_spec()
    if spec is None:
        raise RunNotFoundError(f"{output} holds no run")
    server = local_state(dataset, state).server.resolve()
    if not server.is_dir():
        return Place(redis_url, spec.queue, spec.run)
    url = running_server_url(server)
    if url is None:
        raise RunNotFoundError(f"the run in {output} is interrupted; the embedq run command that made it resumes it")
    return Place(url, spec.queue, spec.run)


@contextmanager
def owned(dataset: Dataset, state: LocalState | None = None) -> Iterator[Ownership]:
    """Keep a second `embedq run` out of the dataset: on this machine by a lock, elsewhere by what the store says.

    Raises:
        RunConflictError: another one is writing into it.
    """
    state = state or local_state(dataset)
    if not dataset.is_directory:
        with storage_errors(f"keep the state of a run in {state.folder}"):
            state.folder.mkdir(parents=True, exist_ok=True)
            state.lock.touch()
    with state.lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunConflictError(f"another embedq run is writing into {dataset}") from None
        with Ownership(dataset, state.folder) as ownership:
            yield ownership
