"""Telling a damaged file, which is an error row, from a read that failed, which the same command repeats."""

from __future__ import annotations

import re
import zlib

import pyarrow as pa

try:
    from lzma import LZMAError
except ImportError:  # a Python built without liblzma
    LZMAError = EOFError  # type: ignore[assignment,misc]

# More than any machine has was never wanted: the size itself is damaged.
_IMPOSSIBLE = re.compile(r"size \d{14}")
#: What the libraries that read files raise.
READ_ERRORS = (OSError, EOFError, zlib.error, LZMAError, pa.ArrowException)


class DamagedFileError(Exception):
    """The rest of a file cannot be read, now or later. One clause without a full stop."""


def damage(error: BaseException) -> DamagedFileError | None:
    """`error`, one of READ_ERRORS, as damage of the file's content; None where the system refused the read."""
    if isinstance(error, OSError) and error.errno is not None:
        return None
    if isinstance(error, MemoryError) and not _IMPOSSIBLE.search(str(error)):
        return None
    return DamagedFileError(" ".join(str(error).split())[:200].rstrip(".") or type(error).__name__)
