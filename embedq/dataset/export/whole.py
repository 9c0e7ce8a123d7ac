"""Files and directories that appear under their name only when they are whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedq_schemas.errors import OutputError
from embedq_worker.sinks.files import fsync_directory, fsync_file, storage_errors


@contextmanager
def whole(target: Path, *, replace: bool, directory: bool) -> Iterator[Path]:
    """A temporary file or directory beside `target`, made durable and renamed to it when the block is over.

    One that a killed process left beside it is removed. A directory that is replaced is away for the moment between two
    renames; a file is not.

    Raises:
        OutputError: `target` exists and `replace` is not asked for.
        StorageError: the disk refused.
    """
    if os.path.lexists(target) and not replace:
        raise OutputError(f"{target} exists; give another place, or add --replace")
    with storage_errors(f"write {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        if directory:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)
        lock = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                # Tells a later export that this one is alive. Where nothing can be locked, nothing is cleared away.
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
            _make_durable(temporary)
            _take_place(temporary, target, replace=replace)
            fsync_directory(target.parent)
        finally:
            os.close(lock)
            _remove(temporary)


def _remove_abandoned(target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        with suppress(OSError):
            lock = os.open(leftover, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(leftover)
            finally:
                os.close(lock)


def _make_durable(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _make_durable(child)
        fsync_directory(path)
    else:
        fsync_file(path)


def _take_place(temporary: Path, target: Path, *, replace: bool) -> None:
    if os.path.lexists(target):
        if not replace:
            raise OutputError(f"{target} exists by now; give another place, or add --replace")
        if target.is_dir() and not target.is_symlink():
            old = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
            target.rename(old)
            temporary.rename(target)
            _remove(old)
            return
    temporary.replace(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
