"""Which run a directory may take: it is free, holds this run already, or nothing that counts."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from embedq_producer.corpus import Corpus
from embedq_schemas.errors import OutputError, StorageError
from embedq_schemas.run import RunSpec
from embedq_worker.sinks.dataset import (
    ERRORS_NAME,
    RUN_NAME,
    STAGING_NAME,
    STATE_NAME,
    Dataset,
    require_free,
    require_writable,
)

from embedq.directory import owned

_LEFT_BY_A_FAILED_START = frozenset({STATE_NAME, STAGING_NAME, ERRORS_NAME})


def check_output(dataset: Dataset) -> None:
    """Refuse a path that can be no directory; raises OutputError."""
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
    for path in corpus.local_paths:
        source = Path(os.path.realpath(path))
        if dataset.path in source.parents and source.name.startswith(("_", "part-")):
            raise OutputError(f"the corpus {path} would be overwritten by the dataset {dataset.path}")
    for given in sources:
        folder = Path(os.path.realpath(given))
        if folder.is_dir() and (folder == dataset.path or folder in dataset.path.parents):
            raise OutputError(f"the output {dataset.path} lies inside the corpus {given}; give a directory elsewhere")


def claim(dataset: Dataset, wanted: RunSpec) -> RunSpec:
    """The run the directory holds, if it is this request; else `wanted`, once the directory is known to be free."""
    owner = dataset.run_spec()
    if owner is not None and not owner.same_request(wanted):
        refuse_other_run(dataset, owner, wanted)
        with owned(dataset):
            shutil.rmtree(dataset.path / STATE_NAME, ignore_errors=True)
            (dataset.path / RUN_NAME).unlink()
        owner = None
    elif owner is None and (not dataset.path.is_dir() or set(os.listdir(dataset.path)) - _LEFT_BY_A_FAILED_START):
        require_free(dataset)
    _require_writable(dataset)
    if owner is None:
        dataset.prepare(wanted)
        return wanted
    return owner


def refuse_other_run(dataset: Dataset, owner: RunSpec, wanted: RunSpec) -> None:
    """Raise OutputError, saying in what both differ, unless nothing was written for `owner`."""
    if not holds_nothing(dataset):
        raise OutputError(
            f"{dataset.path} holds run {owner.run}, made with other options ({_differences(owner, wanted)}); "
            "give another directory, repeat the command that made it, or bring it up to date with --incremental"
        )


def holds_nothing(dataset: Dataset) -> bool:
    """Whether an `embedq run` with its own server ended here before it wrote anything: another may take its place.

    Without such a server the run lives elsewhere, and workers may be about to write.
    """
    names = {path.name for path in dataset.path.iterdir()}
    if STATE_NAME not in names or names - _LEFT_BY_A_FAILED_START - {RUN_NAME}:
        return False
    return not any(any(folder.iterdir()) for folder in (dataset.staging, dataset.errors) if folder.is_dir())


def _require_writable(dataset: Dataset) -> None:
    """Raise now what writing would raise after the first hour: OutputError, or StorageError where space is short."""
    try:
        require_writable(dataset)
    except StorageError as error:
        if getattr(error.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
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
