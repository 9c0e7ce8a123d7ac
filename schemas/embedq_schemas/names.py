"""Names that travel: queues, runs and lanes, and the columns a dataset reserves.

Names become parts of Redis keys and of file paths, so they are restricted here, once, for every reader of
outside input.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import StringConstraints

#: First character alphanumeric, so a name can be neither `..` nor an option; no `/`, `{`, `}`, `,` or white space.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

QueueName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
RunId = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]

#: Place of a dataset on an object store: `s3://bucket/prefix`, without a slash at its end. No empty component, and no
#: character that globs, queries or terminals take for something else.
S3_PATTERN = r"^s3://([A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9])((?:/(?!\.{1,2}(?:/|\Z))[^/?#*\x00-\x1f\x7f]+)*)\Z"

SCHEMA_VERSION = 1
"""Major version of every wire format here; an entry with a greater one is refused, never guessed at."""


class Lane(StrEnum):
    """Two lanes per stage: interactive work never waits behind a bulk corpus for more than one token batch."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


#: In the order in which they are read.
LANES: tuple[Lane, ...] = (Lane.INTERACTIVE, Lane.BULK)

MAX_METADATA_COLUMNS = 1000
"""Metadata columns a run may keep and a job may carry."""

RESERVED_COLUMNS = frozenset({"id", "ordinal", "vector", "n_tokens", "truncated", "text_sha256", "text", "input_ids"})
"""Column names that metadata may not take."""
