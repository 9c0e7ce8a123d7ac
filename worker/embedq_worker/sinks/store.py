"""What a place must be able to do to hold a dataset, and how a directory does it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from embedq_broker.faults import fault_point
from embedq_schemas.errors import OutputError, StorageError
from embedq_schemas.manifest import MANIFEST_NAME, PublishedFile, Upload, read_manifest
from msgspec import UNSET, UnsetType

from embedq_worker.sinks.files import (
    append_line,
    create_durably,
    fsync_directory,
    fsync_file,
    storage_errors,
    write_durably,
)
from embedq_worker.sinks.verify import verify_content

ERRORS_NAME = "_errors"
SUCCESS_NAME = "_SUCCESS"
STAGING_NAME = "_staging"


class CommittedFileError(StorageError):
    """A committed file is gone or damaged: its rows are lost unless they are computed again."""


@dataclass(frozen=True)
class Staged:
    """A file that waits for its commit."""

    size_bytes: int
    upload: Upload | UnsetType = UNSET


class Store(Protocol):
    """The place of one dataset: files by name, each of which is whole or not there.

    Names are relative to the dataset and have at most one slash. A directory raises OSError where nothing else is said
    (see `storage_errors`), an object store StorageError or OutputError; both a FileNotFoundError for what is not there.
    """

    @property
    def location(self) -> str:
        """As a person calls the place."""

    def prepare(self) -> None:
        """Make room for what a run writes, in a place that it has claimed."""

    def is_empty(self) -> bool:
        """Whether there is nothing, or nothing yet. Raises OutputError where the place cannot be looked at."""

    def probe(self) -> None:
        """Do what writing will need, and leave nothing; raises StorageError or OutputError."""

    def read(self, name: str) -> bytes:
        """The whole file."""

    def lines(self, name: str) -> BinaryIO:
        """The file, to be read line by line."""

    def source(self, name: str) -> Path | BinaryIO:
        """The file, for Arrow to read parts of it."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of the files directly in `folder`, by their names in it; empty where there is none."""

    def modified(self, name: str) -> float:
        """Unix time in seconds since when the file has its name."""

    def create(self, name: str, data: bytes) -> None:
        """Write a file that is not there yet; raises FileExistsError. Of several that try, one succeeds."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a file, over an older one if there is one."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is no error."""

    def stage(
        self, token: str, write: Callable[[Path], None], check: Callable[[Path], None], moved: Callable[[], None]
    ) -> Staged:
        """Hold a file durably that nobody sees before it is published.

        Args:
            token: of the commit that will name it.
            write: writes it to a path.
            check: raises StorageError unless it reads back from there.
            moved: called again and again while it is sent somewhere, from any thread.
        """

    def is_staged(self, file: PublishedFile) -> bool:
        """Whether `file` waits there to be published, with the size that was committed."""

    def discard(self, file: PublishedFile) -> None:
        """Drop a staged file whose commit came to nothing."""

    def discard_staged(self) -> None:
        """Drop every staged file. For a run all of whose commits are published."""

    def publish(self, file: PublishedFile, *, thoroughly: bool) -> None:
        """Give a committed file its name; once more, and it stays as it is.

        Args:
            thoroughly: another process staged it: look at all of it.

        Raises:
            CommittedFileError: it is gone or damaged.
        """

    def files(self) -> dict[str, PublishedFile]:
        """Published files by token, in the order of their publication. Raises CodecError on a bad manifest."""

    def enlist(self, file: PublishedFile, *, replay: bool) -> None:
        """Put a published file into the manifest, where it may be already if this is a `replay`."""

    def withdraw(self, tokens: Collection[str]) -> None:
        """Take files out of the manifest, then remove them; a repeated call goes on where one ended."""


@dataclass(frozen=True)
class DirectoryStore:
    """A directory of a file system. What it did is on the disk."""

    path: Path

    @property
    def location(self) -> str:
        return str(self.path)

    def prepare(self) -> None:
        (self.path / STAGING_NAME).mkdir(exist_ok=True)
        (self.path / ERRORS_NAME).mkdir(exist_ok=True)
        fsync_directory(self.path.parent)

    def is_empty(self) -> bool:
        try:
            return not os.listdir(self.path)
        except FileNotFoundError:
            return True
        except NotADirectoryError:
            raise OutputError(f"{self.path} is a file; give a directory") from None
        except OSError as error:
            raise OutputError(f"{self.path} cannot be read: {error.strerror}") from None

    def probe(self) -> None:
        probe = self.path / f".probe-{os.getpid()}"
        with storage_errors(f"write into {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(b"embedq")
            finally:
                probe.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def lines(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb")

    def source(self, name: str) -> Path:
        return self.path / name

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def sizes(self, folder: str = "") -> dict[str, int]:
        found = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                # Temporary files may go while we look.
                with suppress(FileNotFoundError):
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def modified(self, name: str) -> float:
        return (self.path / name).stat().st_ctime

    def create(self, name: str, data: bytes) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        create_durably(self.path / name, data)

    def replace(self, name: str, data: bytes) -> None:
        path = self.path / name
        if path.parent != self.path:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)

    def delete(self, names: Iterable[str]) -> None:
        changed = set()
        for path in (self.path / name for name in names):
            with suppress(FileNotFoundError):
                path.unlink()
                changed.add(path.parent)
        for folder in changed:
            fsync_directory(folder)

    def stage(
        self, token: str, write: Callable[[Path], None], check: Callable[[Path], None], moved: Callable[[], None]
    ) -> Staged:
        path = self.path / STAGING_NAME / f"{token}.tmp"
        with storage_errors(f"write {path}"):
            try:
                write(path)
                fault_point("stage.written")
                fsync_file(path)
                fsync_directory(path.parent)
                fault_point("stage.fsynced")
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            size = path.stat().st_size
        check(path)
        fault_point("stage.verified")
        return Staged(size)

    def is_staged(self, file: PublishedFile) -> bool:
        try:
            return (self.path / file.staging_name).stat().st_size == file.size_bytes
        except OSError:
            return False

    def discard(self, file: PublishedFile) -> None:
        (self.path / file.staging_name).unlink(missing_ok=True)

    def discard_staged(self) -> None:
        for leftover in (self.path / STAGING_NAME).glob("*.tmp"):
            leftover.unlink(missing_ok=True)

    def publish(self, file: PublishedFile, *, thoroughly: bool) -> None:
        staging, final = self.path / file.staging_name, self.path / file.name
        _check(final if final.exists() else staging, file, thoroughly=thoroughly)
        if final.exists():
            staging.unlink(missing_ok=True)
        else:
            try:
                # The name holds a token of its own, so nothing can be overwritten by it.
                staging.rename(final)
            except FileNotFoundError:
                # Between our look and the rename another process may have published it.
                if not final.exists():
                    raise CommittedFileError(
                        f"{final} was committed, but neither it nor {staging} exists: something removed it"
                    ) from None
        fault_point("publish.renamed")
        fsync_directory(self.path)
        fault_point("publish.synced")

    def files(self) -> dict[str, PublishedFile]:
        return read_manifest(self.path)

    def enlist(self, file: PublishedFile, *, replay: bool) -> None:
        if not (replay and file.token in self.files()):
            append_line(self.path / MANIFEST_NAME, file.encode())

    def withdraw(self, tokens: Collection[str]) -> None:
        kept = [file.encode() + b"\n" for token, file in self.files().items() if token not in tokens]
        write_durably(self.path / MANIFEST_NAME, b"".join(kept))
        self.delete(f"part-{token}.parquet" for token in tokens)


def _check(path: Path, file: PublishedFile, *, thoroughly: bool) -> None:
    """What was staged is what gets published. One that another process staged is read whole."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    if size != file.size_bytes:
        raise CommittedFileError(f"{path} holds {size} bytes, {file.size_bytes} were committed")
    if thoroughly:
        try:
            verify_content(path, file.rows)
        except StorageError as error:
            if path.exists():
                raise CommittedFileError(str(error)) from None
