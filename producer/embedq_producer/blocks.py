"""What a corpus reader is told and what it gives: options, blocks, rejects."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa
from embedq_schemas.errors import DocumentErrorCode, UsageError

from .position import Position

# A string array has 32-bit offsets. JSON is never shorter than what it encodes, so a bound on the source bounds both.
_MAX_BYTES = 1 << 30
# What the JSON decoder cannot match as the name of a field.
_UNUSABLE = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_COLUMNS = ("id", "ordinal", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a corpus. Raises UsageError for values that cannot work."""

    id_field: str = "id"
    text_field: str = "text"
    metadata: tuple[str, ...] = ()
    """Fields kept as string columns: strings as they are, null and missing as null, all else as its JSON source."""
    block_bytes: int = 1 << 20
    """Most bytes of JSON in one block, unless a single line is longer. 1 to 2**30."""
    block_documents: int = 1024
    """Most non-blank lines in one block. 1 to 2**30."""
    max_line_bytes: int = 64 << 20
    """Longest line read, without its newline. 1 to 2**30."""
    strict: bool = False
    """Raise InputError on the first bad line instead of rejecting it."""

    def __post_init__(self) -> None:
        for name in ("block_bytes", "block_documents", "max_line_bytes"):
            if not 1 <= getattr(self, name) <= _MAX_BYTES:
                raise UsageError(f"{name} must be from 1 to {_MAX_BYTES}, found {getattr(self, name)}.")
        fields = (self.id_field, self.text_field, *self.metadata)
        if unusable := [field for field in fields if _UNUSABLE.search(field)]:
            raise UsageError(f"The field name {unusable[0]!r} holds a quote, a backslash or a control character.")
        if repeated := [field for index, field in enumerate(fields) if field in fields[:index]]:
            raise UsageError(f"The field {repeated[0]!r} is used twice among id, text and metadata.")
        if taken := [field for field in self.metadata if field in _COLUMNS]:
            raise UsageError(f"The metadata field {taken[0]!r} has the name of a column that every document has.")


@dataclass(frozen=True, slots=True)
class Reject:
    """A non-blank line that gave no document."""

    ordinal: int
    line: int
    """1-based number of the physical line."""
    id: str | None
    code: DocumentErrorCode
    message: str
    """One clause without a full stop."""


@dataclass(frozen=True, slots=True)
class CorpusBlock:
    """Consecutive lines of the input: `documents` + `rejects` + `duplicates` are its non-blank lines, each once."""

    documents: pa.RecordBatch
    """`document_schema(options)`, ordinals ascending; may have no rows."""
    rejects: tuple[Reject, ...]
    """Ordinals ascending."""
    start: Position
    end: Position
    """The next block's start; reading on from here gives exactly the remaining blocks."""
    duplicates: int
    """Documents without an id of their own whose text an earlier document has; they are skipped."""


def document_schema(options: ReadOptions) -> pa.Schema:
    """Columns of `CorpusBlock.documents`: id, ordinal, text, then the metadata fields in the order asked for."""
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("ordinal", pa.int64(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            *(pa.field(name, pa.string()) for name in options.metadata),
        ]
    )
