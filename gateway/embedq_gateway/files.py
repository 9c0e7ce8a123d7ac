"""Files on disk: uploads and batch results, each whole or not there."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from embedq_schemas.errors import StorageError
from embedq_worker.sinks.files import create_durably, fsync_directory, storage_errors, write_durably

log = logging.getLogger(__name__)

_STORE_NAME = "store-id"
_ORPHAN_S = 24 * 3600
"""Age after which a file that no record names was left by a gateway that was killed."""


class FileStore:
    """The data directory: `files/<file id>`, `batches/<batch id>/` for work under way, `tmp/` for what is not whole."""

    def __init__(self, root: Path) -> None:
        """Open the directory, or make it; raises StorageError."""
        self.root = root
        with storage_errors(f"use the data directory {root}"):
            for folder in (root, self._files, self._batches, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                create_durably(root / _STORE_NAME, secrets.token_hex(8).encode())
            #: Names the records of this directory's files in Redis.
            self.id = (root / _STORE_NAME).read_text("ascii").strip()
        if not self.id.isalnum():
            raise StorageError(f"{root / _STORE_NAME} does not hold the id of a store")

    @property
    def _files(self) -> Path:
        return self.root / "files"

    @property
    def _batches(self) -> Path:
        return self.root / "batches"

    @property
    def _tmp(self) -> Path:
        return self.root / "tmp"

    def path(self, file_id: str) -> Path:
        """Where a file lies. `file_id` must come from a record: it becomes part of a path."""
        return self._files / file_id

    def workspace(self, batch_id: str) -> Path:
        """A directory for a batch under way; it exists."""
        folder = self._batches / batch_id
        with storage_errors(f"write to {folder}"):
            folder.mkdir(exist_ok=True)
        return folder

    def keep(self, file_id: str, path: Path) -> None:
        """Have the file at `path` too, so that it outlives its deletion; raises StorageError."""
        with storage_errors(f"write to {path.parent}"):
            try:
                os.link(self.path(file_id), path)
            except FileExistsError:
                return
            except OSError:
                # Some file systems have no hard links.
                write_durably(path, self.path(file_id).read_bytes())

    def drop_workspace(self, batch_id: str) -> None:
        shutil.rmtree(self._batches / batch_id, ignore_errors=True)

    @contextmanager
    def writing(self) -> Iterator[Draft]:
        """A file being written; it is gone after the block unless it was published."""
        path = self._tmp / secrets.token_hex(12)
        with storage_errors(f"write to {self._tmp}"):
            file = path.open("xb", buffering=1 << 20)
        draft = Draft(file, path)
        try:
            yield draft
        finally:
            with suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)

    def publish(self, draft: Draft, file_id: str) -> None:
        """Give a written file its name, durably; one of that name is replaced. Raises StorageError."""
        with storage_errors(f"write to {self._files}"):
            draft.file.flush()
            os.fsync(draft.file.fileno())
            draft.path.replace(self.path(file_id))
            fsync_directory(self._files)

    def remove(self, file_id: str) -> None:
        """Delete a file, if it is there; raises StorageError."""
        with storage_errors(f"remove a file of {self._files}"):
            self.path(file_id).unlink(missing_ok=True)

    def sweep(self, known: Callable[[str], bool]) -> None:
        """Delete old files without a record: their record expired, or their upload never ended."""
        old = time.time() - _ORPHAN_S
        for folder in (self._tmp, self._files):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if entry.stat().st_mtime < old and (folder is self._tmp or not known(entry.name)):
                        os.unlink(entry.path)
                        log.info("removed %s, which no record names", entry.path)


class Draft:
    """A file that nobody else sees yet."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append; raises StorageError."""
        with storage_errors(f"write to {self.path.parent}"):
            self.file.write(data)
        self.size += len(data)
