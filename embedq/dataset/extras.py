"""Libraries that only some commands need: imported when asked for, with a message that names what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from embedq_schemas.errors import UsageError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn an ImportError inside the block into a UsageError that names the extra to install."""
    try:
        yield
    except ImportError as error:
        missing = error.name or str(error)
        raise UsageError(f"{missing} is not installed; `pip install 'embedq[{name}]'` adds it") from None
