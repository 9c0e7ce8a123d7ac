"""What a corpus reader is told and what it gives: options, blocks, rejects."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
from embedq_schemas.chunks import CHUNK_COLUMNS, Chunks
from embedq_schemas.errors import DocumentErrorCode, UsageError
from embedq_schemas.ipc import METADATA_TYPE

from .position import Position
from .template import Template

# A string array has 32-bit offsets. JSON is never shorter than what it encodes, so a bound on the source bounds both.
_MAX_BYTES = 1 << 30
# What the JSON decoder cannot match as the name of a field.
_UNUSABLE = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_COLUMNS = ("id", "ordinal", "text")

Splitter = Callable[[pa.StringArray], Chunks]
"""Cuts texts [n] into chunks. What it makes of a text depends on that text and its own settings alone."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read a corpus. A dot in a field's name leads into an object. Raises UsageError for unusable values."""

    id_field: str = "id"
    text_field: str = "text"
    template: str | None = None
    """Makes the text of several fields; `text_field` is not read then."""
    metadata: tuple[str, ...] = ()
    """Fields kept as columns."""
    metadata_types: tuple[pa.DataType, ...] = ()
    """Types of these columns. None given: all strings."""
    block_bytes: int = 1 << 20
    """Most bytes of input in one block, unless a single document is longer. 1 to 2**30."""
    block_documents: int = 1024
    """Most documents in one block. 1 to 2**30."""
    max_line_bytes: int = 64 << 20
    """Longest line, row or whole file that is a document, without its newline. 1 to 2**30."""
    strict: bool = False
    """Raise InputError on the first bad document instead of rejecting it."""
    splitter: Splitter | None = None
    """Makes several documents of a long one, each with its own ordinal, as if the corpus held them so."""

    def __post_init__(self) -> None:
        for name in ("block_bytes", "block_documents", "max_line_bytes"):
            if not 1 <= getattr(self, name) <= _MAX_BYTES:
                raise UsageError(f"{name} must be from 1 to {_MAX_BYTES}, found {getattr(self, name)}.")
        texts = self.texts.fields if self.texts else (self.text_field,)
        if unusable := [field for field in (self.id_field, *texts, *self.metadata) if _UNUSABLE.search(field)]:
            raise UsageError(f"The field name {unusable[0]!r} holds a quote, a backslash or a control character.")
        fields = (self.id_field, *(() if self.texts else texts), *self.metadata)
        if repeated := [field for index, field in enumerate(fields) if field in fields[:index]]:
            raise UsageError(f"The field {repeated[0]!r} is used twice among id, text and metadata.")
        reserved = _COLUMNS if self.splitter is None else (*_COLUMNS, *CHUNK_COLUMNS)
        if taken := [field for field in self.metadata if field in reserved]:
            raise UsageError(f"The metadata field {taken[0]!r} has the name of a column that every document has.")

    @cached_property
    def texts(self) -> Template | None:
        """The parsed template."""
        return None if self.template is None else Template.parse(self.template)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        """One type for each metadata field."""
        return self.metadata_types or (METADATA_TYPE,) * len(self.metadata)

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """Columns that documents have behind their text: the metadata, then those of chunks."""
        own = dict(zip(self.metadata, self.types, strict=True))
        return own if self.splitter is None else own | CHUNK_COLUMNS


@dataclass(frozen=True, slots=True)
class Reject:
    """A non-blank line, a row, or a whole file that gave no document."""

    ordinal: int
    line: int
    """1-based number of the physical line, of the row in a table, of the element in a JSON array."""
    id: str | None
    code: DocumentErrorCode
    message: str
    """One clause without a full stop."""
    file: str | None = None
    """The file it lies in, where the corpus has several."""


@dataclass(frozen=True, slots=True)
class CorpusBlock:
    """Consecutive lines or rows of the input: `documents` + `rejects` + `duplicates` are those that are not blank, if
    nothing is cut into chunks.
    """

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
    """Columns of `CorpusBlock.documents`: id, ordinal, text, then `options.columns`."""
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("ordinal", pa.int64(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            *map(pa.field, options.columns, options.columns.values()),
        ]
    )
