"""What a command is told about its corpus, and how that opens one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import Corpus, open_corpus
from embedq_producer.formats import Format
from embedq_producer.reader import metadata_types
from embedq_producer.template import Template
from embedq_schemas.errors import UsageError
from embedq_schemas.metadata_type import parse_metadata_type
from pydantic import Field, field_validator

from embedq.option_base import Options


class CorpusOptions(Options):
    """How the corpus is read."""

    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "text", "files"] = Field(
        "auto",
        description="What the sources hold. auto: as each file's name and first bytes say; text: a document a line; "
        "files: a document a file.",
    )
    id_field: str = Field(
        "id", description="Field that holds a document's id; documents without one get an id made from their text."
    )
    text_field: str = Field("text", description="Field that holds a document's text; a dot leads into an object.")
    template: str | None = Field(
        None,
        max_length=65536,
        description="Text made of several fields, instead of --text: '{title} {body}'. A missing field is empty.",
    )
    metadata: tuple[str, ...] = Field(
        (),
        description="Field to keep as a column of the output, in its own type or in the one named after a colon "
        "(score:double); may be given several times.",
    )
    strict: bool = Field(
        False, description="Stop at the first bad line instead of writing it to the errors and going on."
    )
    on_duplicate_id: Literal["skip", "error"] = Field(
        "skip",
        description="A document whose id occurred before in the corpus: skip counts it as skipped, "
        "error makes it an error row. The first one always counts.",
    )
    job_documents: int = Field(1024, ge=1, le=65536, description="Most documents in one job.")
    job_bytes: int = Field(1 << 20, ge=1024, le=256 << 20, description="Most bytes of input in one job.")
    max_line_bytes: int = Field(
        64 << 20, ge=1024, le=1 << 30, description="Longest line read, in bytes; a longer one becomes an error row."
    )

    @field_validator("template")
    @classmethod
    def _template(cls, source: str | None) -> str | None:
        if source is not None:
            try:
                Template.parse(source)
            except UsageError as error:
                raise ValueError(str(error)) from None
        return source

    def open_corpus(self, sources: Sequence[str | Path]) -> Corpus:
        """The files that `sources` name; raises InputError, UsageError."""
        return open_corpus(sources, None if self.format == "auto" else Format(self.format))

    def read_options(self, corpus: Corpus) -> ReadOptions:
        """For the reader of `corpus`, whose first documents say what types metadata have; raises InputError."""
        columns = [_named_type(column) for column in self.metadata]
        options = ReadOptions(
            id_field=self.id_field,
            text_field=self.text_field,
            template=self.template,
            metadata=tuple(name for name, _ in columns),
            block_bytes=self.job_bytes,
            block_documents=self.job_documents,
            max_line_bytes=self.max_line_bytes,
            strict=self.strict,
        )
        found = metadata_types(corpus, options)
        types = tuple(given or own for (_, given), own in zip(columns, found, strict=True))
        return replace(options, metadata_types=types)

    def notes(self) -> list[str]:
        """A sentence about each flag that may not say what was meant: JSON has no schema to refuse a field by."""
        return [
            f"--metadata {column} is read as a field of that name, for {column.rpartition(':')[2]!r} is no type"
            for column in self.metadata
            if ":" in column and _named_type(column)[1] is None
        ]

    def corpus_identity(self, corpus: Corpus) -> str:
        """What a run resumes with: the content, and how it is read."""
        identity = f"{corpus.identity}:{self.id_field}:{self.text_field}"
        if self.template is not None:
            identity += ":" + hashlib.sha256(self.template.encode()).hexdigest()[:16]
        return identity if self.format == "auto" else f"{identity}:{self.format}"


def _named_type(column: str) -> tuple[str, pa.DataType | None]:
    """`name:type` in its parts; a colon that no type follows belongs to the name."""
    name, colon, kind = column.rpartition(":")
    if colon:
        try:
            return name, parse_metadata_type(kind)
        except ValueError:
            pass
    return column, None
