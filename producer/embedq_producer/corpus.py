"""Opening a corpus, and telling one corpus from another."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from embedq_schemas.errors import InputError

_SAMPLE_BYTES = 64 * 1024
#: No JSON line starts like these; every line of such a file would become an error row.
_OTHER_FORMATS = {
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
    b"ARROW1": "an Arrow file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


def open_corpus(path: Path) -> BinaryIO:
    """Open a corpus for reading bytes; raises InputError with one sentence if that is impossible."""
    try:
        if path.is_dir():
            raise InputError(f"The corpus {path} is a directory; name one JSONL file.")
        return path.open("rb")
    except FileNotFoundError as error:
        raise InputError(f"The corpus {path} does not exist.") from error
    except PermissionError as error:
        raise InputError(f"The corpus {path} may not be read by this user (permission denied).") from error
    except (OSError, ValueError) as error:
        raise InputError(f"The corpus {str(path)!r} cannot be opened: {describe_os_error(error)}.") from error


def read_some(stream: BinaryIO, size: int, name: str) -> bytes:
    """At most `size` bytes, none at the end only; raises InputError if the read fails or would have to wait."""
    try:
        data: bytes | None = stream.read(size)
    except OSError as error:
        raise InputError(f"The corpus {name} cannot be read: {describe_os_error(error)}.") from error
    if data is None:
        # To take this for the end would lose the rest of the corpus without a word.
        raise InputError(f"The corpus {name} is a non-blocking stream; open it in blocking mode.")
    return data


def describe_os_error(error: OSError | ValueError) -> str:
    """The system's own words without errno and path, to be put into a sentence."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def corpus_identity(path: Path) -> str:
    """A stable name for the content of a corpus file, to refuse resuming a run with another input.

    `<size in bytes>-<SHA-256 of the first and the last 64 KiB, hex>`: constant cost for any size. It does not see an
    edit that keeps the size and lies outside both samples. Raises InputError if the file cannot be read or is a pipe.
    """
    # Asked before opening, because opening a pipe waits for its writer.
    if path.is_fifo():
        raise InputError(f"The corpus {path} is a pipe, so a run over it could not be resumed.")
    with open_corpus(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        head = read_some(stream, _SAMPLE_BYTES, str(path))
        digest = hashlib.sha256(head)
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(read_some(stream, _SAMPLE_BYTES, str(path)))
    for magic, kind in _OTHER_FORMATS.items():
        if head.startswith(magic):
            raise InputError(f"The corpus {path} is {kind}, not JSON lines in UTF-8; convert it first.")
    return f"{size}-{digest.hexdigest()}"
