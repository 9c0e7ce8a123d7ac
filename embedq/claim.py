"""Which run a directory or prefix may take: it is free, holds this run already, or nothing that counts."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from embedq_producer.corpus import Corpus
from embedq_schemas.errors import OutputError, StorageError
from embedq_schemas.run import RunSpec
from embedq_worker.sinks.dataset import RUN_NAME, STATE_NAME, Dataset, require_free, require_writable
from embedq_worker.sinks.s3 import LINES_NAME
from embedq_worker.sinks.store import ERRORS_NAME, STAGING_NAME

from embedq.directory import LocalState, owned

_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_LEFT_BY_A_FAILED_START = frozenset({STATE_NAME, STAGING_NAME, ERRORS_NAME})


def check_output(dataset: Dataset) -> None:
    """Refuse a path that can be no directory; raises OutputError. An object store is asked soon anyway."""
    if not dataset.is_directory:
        return
    try:
        dataset.path.lstat()
        dataset.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise OutputError(f"{dataset.path} cannot be used: {error.strerror}; give another directory") from None
    for place in (dataset.path, *dataset.path.parents):
        if place.is_file():
            raise OutputError(f"{place} is a file, so {dataset.path} cannot be a directory; give another one")


def check_apart(sources: Sequence[str | Path], corpus: Corpus, dataset: Dataset) -> None:
    """What is written must not be taken for what is read, nor overwrite it; raises OutputError."""
    if not dataset.is_directory:
        for url in map(str, sources):
            if "*" not in url and f"{dataset}/".startswith(url.rstrip("/") + "/"):
                raise OutputError(f"the output {dataset} lies inside the corpus {url}; give a prefix elsewhere")
            if url.startswith(f"{dataset}/") and url.rpartition("/")[2].startswith(("_", "part-")):
                raise OutputError(f"the corpus {url} would be overwritten by the dataset {dataset}")
        return
    for path in corpus.local_paths:
        source = Path(os.path.realpath(path))
        if dataset.path in source.parents and source.name.startswith(("_", "part-")):
            raise OutputError(f"the corpus {path} would be overwritten by the dataset {dataset.path}")
    for given in sources:
        folder = Path(os.path.realpath(given))
        if folder.is_dir() and (folder == dataset.path or folder in dataset.path.parents):
            raise OutputError(f"the output {dataset.path} lies inside the corpus {given}; give a directory elsewhere")


def claim(dataset: Dataset, wanted: RunSpec, state: LocalState) -> RunSpec:
    """The run the dataset's place holds, if it is this request; else `wanted`, once the place is known to be free.

    Raises:
        OutputError: it holds another run, or cannot be written.
    """
    owner = dataset.run_spec()
    if owner is not None and not owner.same_request(wanted):
        refuse_other_run(dataset, owner, wanted, state)
        with owned(dataset, state):
            shutil.rmtree(state.server, ignore_errors=True)
            dataset.store.delete([RUN_NAME])
        owner = None
    elif owner is None and not _holds_a_failed_start(dataset):
        require_free(dataset)
    _require_writable(dataset)
    if owner is None:
        dataset.prepare(wanted)
        return wanted
    return owner


def _holds_a_failed_start(dataset: Dataset) -> bool:
    if not dataset.is_directory or not dataset.path.is_dir():
        return False
    return not set(os.listdir(dataset.path)) - _LEFT_BY_A_FAILED_START


def refuse_other_run(dataset: Dataset, owner: RunSpec, wanted: RunSpec, state: LocalState) -> None:
    """Raise OutputError, saying in what both differ, unless nothing was written for `owner`."""
    if not holds_nothing(dataset, state):
        ways = (
            "give another directory, repeat the command that made it, or bring it up to date with --incremental"
            if dataset.is_directory
            else "give another prefix, or repeat the command that made it"
        )
        raise OutputError(
            f"{dataset} holds run {owner.run}, made with other options ({_differences(owner, wanted)}); {ways}"
        )


def holds_nothing(dataset: Dataset, state: LocalState) -> bool:
    """Whether an `embedq run` with its own server ended here before it wrote anything: another may take its place.

    Without such a server the run lives elsewhere, and workers may be about to write.
    """
    if not dataset.is_directory:
        written = any(dataset.store.sizes(folder) for folder in (LINES_NAME, ERRORS_NAME))
        return state.server.is_dir() and not written and set(dataset.store.sizes()) == {RUN_NAME}
    names = {path.name for path in dataset.path.iterdir()}
    if STATE_NAME not in names or names - _LEFT_BY_A_FAILED_START - {RUN_NAME}:
        return False
    return not any(any(folder.iterdir()) for folder in (dataset.staging, dataset.errors) if folder.is_dir())


def _require_writable(dataset: Dataset) -> None:
    """Raise now what writing would raise after the first hour: OutputError, or StorageError where space is short."""
    try:
        require_writable(dataset)
    except StorageError as error:
        if not dataset.is_directory or getattr(error.__cause__, "errno", None) in _PASSING:
            raise
        raise OutputError(f"{error}; give another directory") from None


def _differences(owner: RunSpec, wanted: RunSpec) -> str:
    mine, theirs = wanted.model_dump(mode="json"), owner.model_dump(mode="json")
    names = [name for name in mine if name not in ("run", "queue", "created_at", "durability", "lane")]
    found = [name for name in names if mine[name] != theirs[name]]
    for group in {"encoding", "sink"} & set(found):
        at = found.index(group)
        found[at : at + 1] = [name for name in mine[group] if mine[group][name] != theirs[group].get(name)]
    # A directory that was moved, or is seen through another mount, can be gone on with only where it was made.
    words = {"model_fingerprint": "model", "path": f"made as {theirs['sink'].get('path')}"}
    return ", ".join(words.get(name, name) for name in found)
