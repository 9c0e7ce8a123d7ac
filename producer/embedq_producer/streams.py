"""A file's bytes, decompressed, with its beginning to look at."""

from __future__ import annotations

import bz2
import gzip
from typing import Any, BinaryIO

import pyarrow as pa
from embedq_schemas.errors import InputError

from .damage import READ_ERRORS, damage
from .formats import Compression, packed_with
from .places import Prefixed, describe_os_error

_MAGIC_BYTES = 16


class ByteStream:
    """Bytes of one file, read forward. `compression` says whether they were packed."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        self.name = name
        self.raw = raw
        self._stream: Any = raw
        self._head = b""
        self.compression: Compression | None = None
        self.compression = packed_with(self.head(_MAGIC_BYTES))
        if self.compression is not None:
            self._stream = _unpacked(Prefixed(self._head, raw), self.compression, name)
            self._head = b""

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end only.

        Raises:
            DamagedFileError: the file's content is damaged here.
            InputError: the read failed, or would have to wait.
        """
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        try:
            found: bytes | None = self._stream.read(size)
        except READ_ERRORS as error:
            if self.compression is not None and (damaged := damage(error)) is not None:
                raise damaged from error
            raise InputError(f"The corpus {self.name} cannot be read: {describe_os_error(error)}.") from error
        if found is None:
            # To take this for the end would lose the rest of the corpus without a word.
            raise InputError(f"The corpus {self.name} is a non-blocking stream; open it in blocking mode.")
        return found

    def head(self, size: int) -> bytes:
        """The next `size` bytes, or all there are, which `read` gives again."""
        parts = [self._head]
        missing = size - len(self._head)
        self._head = b""
        while missing > 0 and (part := self.read(missing)):
            parts.append(part)
            missing -= len(part)
        self._head = b"".join(parts)
        return self._head[:size]


def _unpacked(packed: Any, compression: Compression, name: str) -> Any:
    match compression:
        case Compression.GZIP:
            return gzip.GzipFile(fileobj=packed, mode="rb")
        case Compression.BZ2:
            return bz2.BZ2File(packed)
        case Compression.XZ:
            try:
                import lzma
            except ImportError:
                raise InputError(f"The corpus {name} is compressed with xz, which this Python cannot read.") from None
            return lzma.LZMAFile(packed)
        case Compression.ZSTD:
            return pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd")
