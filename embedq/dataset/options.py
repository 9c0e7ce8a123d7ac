"""Options of the commands on a finished dataset.

What means something else in another command has a name of its own here: one `embedq.toml` serves them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from embedq.option_base import Options, register
from embedq.options import _EngineFields

Target = Literal["npy", "faiss", "lance", "jsonl", "pgvector", "qdrant"]


class InspectOptions(Options):
    """Options of `embedq inspect`."""

    json_output: bool = Field(False, description="One JSON document instead of text.")

    flags: ClassVar[dict[str, str]] = {**Options.flags, "json_output": "--json"}


class SearchOptions(_EngineFields):
    """Options of `embedq search`."""

    model: str = Field(
        "", description="Where the dataset's model is, a folder or hub id; unset: the hub id that the dataset names."
    )
    top_k: int = Field(10, ge=1, le=10_000, description="Documents to find for each question.")
    questions: Path | None = Field(
        None, description="File with one question a line, or - for standard input; instead of one on the command line."
    )
    query_prompt: str | None = Field(None, max_length=65536, description="Text put before every question, verbatim.")
    query_prompt_name: str | None = Field(
        None,
        description="Name of a prompt of the checkpoint to put before every question; unset: query, if it has one.",
    )
    instruction: str | None = Field(
        None, max_length=65536, description="What to look for, put into the model's own query prompt."
    )
    partial: bool = Field(False, description="Also search a dataset that is not complete yet.")
    json_output: bool = Field(False, description="One JSON object per question instead of text.")

    flags: ClassVar[dict[str, str]] = {
        **Options.flags,
        "top_k": "--top-k,-k",
        "query_prompt": "--prompt",
        "query_prompt_name": "--prompt-name",
        "json_output": "--json",
    }


class ExportOptions(Options):
    """Options of `embedq export`."""

    to: Target | None = Field(
        None, description="What to write; for each the extra embedq[NAME], none for npy and jsonl."
    )
    export_output: Path | None = Field(
        None, description="File or directory to write; appears only when it is whole. For qdrant: its local mode."
    )
    export_url: str | None = Field(None, description="Server to write to: postgresql://... or http://... of Qdrant.")
    export_table: str = Field(
        "embeddings", min_length=1, max_length=63, description="Table (pgvector) or collection (qdrant)."
    )
    export_api_key: str | None = Field(None, description="API key of the Qdrant server, if it asks for one.")
    pool_chunks: bool = Field(
        False,
        description="For a dataset of chunks: one row for each document, its vector the mean of its chunks' vectors, "
        "weighted by their tokens.",
    )
    replace: bool = Field(False, description="Take the place of what has the target's name already.")
    partial: bool = Field(False, description="Also export a dataset that is not complete yet.")

    flags: ClassVar[dict[str, str]] = {
        **Options.flags,
        "export_output": "--output,-o",
        "export_url": "--url",
        "export_table": "--table",
        "export_api_key": "--api-key",
    }


class CompactOptions(Options):
    """Options of `embedq compact`."""

    compact_file_bytes: int = Field(
        256 << 20, ge=1 << 16, le=1 << 30, description="Bytes of vectors per file; files below half of it are merged."
    )
    superseded_grace_s: float = Field(
        3600.0,
        ge=0,
        description="Seconds replaced files stay readable for readers that opened the dataset before; "
        "a later call removes them.",
    )

    flags: ClassVar[dict[str, str]] = {
        **Options.flags,
        "compact_file_bytes": "--file-bytes",
        "superseded_grace_s": "--grace-s",
    }


register(InspectOptions, SearchOptions, ExportOptions, CompactOptions)
