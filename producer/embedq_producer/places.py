"""Where a file's bytes come from: a disk, standard input, or whatever fsspec reaches."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, cast

import pyarrow as pa
import pyarrow.fs
from embedq_schemas.errors import InputError, UsageError

SAMPLE_BYTES = 64 * 1024
PEEK_BYTES = 1 << 20
"""How much of a stream that cannot be read twice is looked at before it is read."""

_MARKS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "created")
"""What file systems call the thing that changes with a file's content."""
_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s]*@")
_QUERY_VALUE = re.compile(r"((?<=[?&])[^\s=&?]+=)[^\s&'\"]+")
_ARROW_SCHEMES = {"gcs": "gs", "s3a": "s3", "az": "abfs"}


class Place(Protocol):
    """One file's bytes."""

    @property
    def name(self) -> str:
        """As a person calls it."""

    @property
    def path(self) -> Path | None:
        """Its path, where this machine's own functions can open it."""

    @property
    def repeatable(self) -> bool:
        """It can be read from its beginning again, and from anywhere else."""

    def open(self) -> BinaryIO:
        """From the beginning; raises InputError if that is impossible."""

    def stamp(self) -> tuple[int | None, str]:
        """Size in bytes where it is known, and what changes with the content; raises InputError."""

    def identity(self) -> str:
        """Equal for equal content, other for another, as far as a constant cost allows; raises InputError."""

    def peek(self) -> BinaryIO:
        """The beginning or all of it, to look at; what is read here is not taken from what `open` gives."""


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine."""

    path: Path
    repeatable: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return str(self.path)

    def open(self) -> BinaryIO:
        return open_file(self.path)

    peek = open

    def stamp(self) -> tuple[int | None, str]:
        with _reading(self.name):
            found = self.path.stat()
        # Asked before opening, because opening a pipe waits for its writer.
        if stat.S_ISFIFO(found.st_mode):
            raise InputError(f"The corpus {self.path} is a pipe, which cannot be read twice; pipe it into - instead.")
        return found.st_size, str(found.st_mtime_ns)

    def identity(self) -> str:
        """`<size in bytes>-<SHA-256 of the first and the last 64 KiB, hex>`.

        It does not see an edit that keeps the size and lies outside both samples.
        """
        # Asked before opening, because opening a pipe waits for its writer.
        if self.path.is_fifo():
            raise InputError(
                f"The corpus {self.path} is a pipe, so a run over it could not be resumed; pipe it into - instead."
            )
        with self.open() as stream, _reading(self.name):
            size = os.fstat(stream.fileno()).st_size
            digest = hashlib.sha256(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
        return f"{size}-{digest.hexdigest()}"


@dataclass(frozen=True)
class RemoteFile:
    """A file that fsspec reaches."""

    filesystem: Any
    key: str
    """Its path inside the file system."""
    name: str
    """Its URL, without secrets."""
    path: ClassVar[None] = None
    repeatable: ClassVar[bool] = True

    def open(self) -> BinaryIO:
        with _reading(self.name):
            return cast(BinaryIO, _Guarded(self.filesystem.open(self.key, "rb"), self.name))

    peek = open

    def stamp(self) -> tuple[int | None, str]:
        with _reading(self.name):
            # A listing that was kept would never show a change.
            self.filesystem.invalidate_cache(self.filesystem._parent(self.key))
            info = self.filesystem.info(self.key)
        marks = (
            info.get(key) for key in ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "created")
        )
        return info.get("size"), str(next((mark for mark in marks if mark is not None), ""))

    def identity(self) -> str:
        size, mark = self.stamp()
        if mark and size is not None:
            return f"{size}-{hashlib.sha256(mark.encode()).hexdigest()}"
        with self.open() as stream, _reading(self.name):
            return f"{size}-{hashlib.sha256(stream.read(SAMPLE_BYTES)).hexdigest()}"


class Stream:
    """A stream that is read once, as it comes. Recognised by its beginning."""

    path = None
    repeatable = False

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.name = name
        self._stream = stream
        self._head: bytes | None = None
        self._opened = False

    def open(self) -> BinaryIO:
        if self._opened:
            raise InputError(f"The corpus {self.name} is a stream, which can be read only once; start again.")
        self._opened = True
        return cast(BinaryIO, Prefixed(self._head or b"", self._stream))

    def peek(self) -> BinaryIO:
        return io.BytesIO(self._beginning())

    def stamp(self) -> tuple[int | None, str]:
        return None, ""

    def identity(self) -> str:
        return f"stream-{hashlib.sha256(self._beginning()[:SAMPLE_BYTES]).hexdigest()}"

    def _beginning(self) -> bytes:
        if self._head is None:
            parts, missing = [], PEEK_BYTES
            with _reading(self.name):
                while missing and (part := self._stream.read(missing)):
                    parts.append(part)
                    missing -= len(part)
            self._head = b"".join(parts)
        return self._head


def standard_input() -> Stream:
    """What is piped into this process."""
    return Stream(sys.stdin.buffer, "standard input")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes; raises InputError with one sentence if that is impossible."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise InputError(f"The corpus {path} does not exist.") from error
    except PermissionError as error:
        raise InputError(f"The corpus {path} may not be read by this user (permission denied).") from error
    except IsADirectoryError as error:
        raise InputError(f"The corpus {path} is a directory.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"The corpus {str(path)!r} cannot be opened: {describe_os_error(error)}.") from error


def describe_os_error(error: Exception) -> str:
    """The system's own words without errno and path, to be put into a sentence."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return without_secrets(" ".join(text.split()))[:300].rstrip(".").lower()


def without_secrets(text: str) -> str:
    """`text` without what opens doors in the URLs in it: passwords, and values of queries, which may be signatures."""
    return _QUERY_VALUE.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def remote_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path inside it.

    Arrow's own file systems serve where the package that fsspec would use is not installed. Raises UsageError where
    nothing does, InputError where the URL leads nowhere.
    """
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.arrow import ArrowFSWrapper
    except ImportError:
        raise UsageError(f"{scheme}:// needs fsspec: pip install 'embedq[remote]'") from None
    try:
        return cast(tuple[Any, str], url_to_fs(url))
    except ImportError as error:
        try:
            filesystem, path = pa.fs.FileSystem.from_uri(_ARROW_SCHEMES.get(scheme, scheme) + url[len(scheme) :])
            return ArrowFSWrapper(filesystem), path
        except (pa.ArrowException, ValueError, OSError):
            raise UsageError(f"{scheme}:// needs another package: {describe_os_error(error)}") from None
    except ValueError as error:
        raise UsageError(f"{without_secrets(url)} cannot be read: {describe_os_error(error)}") from None
    except Exception as error:  # the libraries behind fsspec each have exceptions of their own
        raise InputError(f"The corpus {without_secrets(url)} cannot be reached: {describe_os_error(error)}.") from error


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Whatever the code behind a place raises, as InputError."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"The corpus {name} does not exist.") from error
    except PermissionError as error:
        raise InputError(f"The corpus {name} may not be read by this user (permission denied).") from error
    # The libraries behind fsspec each have exceptions of their own.
    except Exception as error:
        raise InputError(f"The corpus {name} cannot be read: {describe_os_error(error)}.") from error


class _Guarded(io.RawIOBase):
    """A remote file whose failures are InputErrors."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def read(self, size: int = -1) -> bytes:
        with _reading(self._name):
            return bytes(self._file.read(size))

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _reading(self._name):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class Prefixed(io.RawIOBase):
    """Bytes that were read ahead, then the stream they came from, which stays open."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = io.BytesIO(head), stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._head.read(size) or self._stream.read(size)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
