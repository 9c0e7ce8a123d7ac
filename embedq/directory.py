"""What the output directory of `embedq run` says of its run, and where the run's queue is while it goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from embedq_broker.embedded import running_server_url
from embedq_schemas.errors import OutputError, RunNotFoundError
from embedq_schemas.manifest import read_manifest
from embedq_schemas.run import RunCounters, RunSpec, RunState, RunStatus
from embedq_worker.sinks.dataset import STATE_NAME, Dataset


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


def finished_run(run: str) -> RunState | None:
    """The state of the complete dataset that `run` names, if it names one."""
    if not is_directory_name(run):
        return None
    dataset = Dataset(Path(run))
    spec = dataset.run_spec()
    return None if spec is None else finished_state(dataset, spec)


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
        rows = sum(file.rows for file in read_manifest(output).values())
        raise RunNotFoundError(
            f"the run in {output} is not going on; it has written {rows:,} vectors so far, and the command that "
            "started it resumes it"
        )
    return Place(url, spec.queue, spec.run)
