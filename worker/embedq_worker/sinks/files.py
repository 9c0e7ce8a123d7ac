"""Durable file operations: what exists after a crash is either whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedq_schemas.errors import StorageError


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn an OSError into a StorageError that says what could not be done and why."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {what}: {reason}") from error


def fsync_directory(path: Path) -> None:
    """Make renames and creations inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Make the file's content durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, atomically and durably."""
    with _durable_temporary(path, data) as temporary:
        temporary.replace(path)
    fsync_directory(path.parent)


def create_durably(path: Path, data: bytes) -> None:
    """Create `path` with `data`, atomically and durably; raises FileExistsError if it exists."""
    with _durable_temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:
            # Some network file systems have no hard links; this leaves a window that they leave open anyway.
            if path.exists():
                raise FileExistsError(path) from None
            temporary.replace(path)
    fsync_directory(path.parent)


@contextmanager
def _durable_temporary(path: Path, data: bytes) -> Iterator[Path]:
    # Process ids repeat between containers that share a file system, and threads share one.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Append one line durably. A torn last line, left by a crash, is ended first so that it stays alone."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):
            # Another process's line may be half visible; without the lock it would look torn.
            fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + line + b"\n"
        # One write call: appends of several processes do not interleave on a local file system.
        if os.write(fd, data) != len(data):
            raise OSError(28, "short write")
        os.fsync(fd)
    finally:
        os.close(fd)
