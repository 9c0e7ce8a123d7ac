"""The manifest of a Parquet dataset: one JSON line per published file, and the commit record that precedes it.

A file counts only if a commit record named it. The record travels through Redis until the file has its final name;
the manifest line is the same facts, kept with the data. A replayed publish may append a line twice: readers fold
lines by `token`. A line that does not end as an object does is a torn append and is ignored: its commit record still
exists, and the replayed publish appends it whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from embedq_schemas.errors import CodecError, UnsupportedVersionError
from embedq_schemas.names import SCHEMA_VERSION
from embedq_schemas.versions import refuse_other_version

MANIFEST_NAME = "_manifest.jsonl"

_Token = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Ordinal = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Upload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a file staged on an object store is published: a multipart upload with all its parts, not completed yet."""

    id: Annotated[str, Meta(min_length=1, max_length=2048)]
    #: ETags of its parts, which are numbered from 1.
    parts: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(min_length=1, max_length=10_000)]
    #: ETag of the object once it is completed, where the store's are MD5 sums and so can be foreseen.
    etag: str | UnsetType = UNSET


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data file: what the commit promised and what the manifest states."""

    token: _Token  # idempotency token of the commit; names the file
    run: str
    rows: Annotated[int, Meta(ge=1)]
    size_bytes: Annotated[int, Meta(ge=1)]
    tokens: Annotated[int, Meta(ge=0)]  # token count of its documents, after truncation
    #: Inclusive ranges of the rows' ordinals, flattened: first, last, first, last, ...
    ordinals: tuple[_Ordinal, ...]
    #: The model saw none of its rows: each has the vector of another row of the same text.
    copied: bool | UnsetType = UNSET
    #: In the commit record of a file on an object store, not in the manifest.
    upload: Upload | UnsetType = UNSET
    v: int = SCHEMA_VERSION

    @property
    def name(self) -> str:
        """Final file name inside the dataset directory."""
        return f"part-{self.token}.parquet"

    @property
    def staging_name(self) -> str:
        """File name before publication, inside the dataset directory."""
        return f"_staging/{self.token}.tmp"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Inclusive ranges of the rows' ordinals: (first, last)."""
        return list(zip(self.ordinals[::2], self.ordinals[1::2], strict=False))

    def encode(self) -> bytes:
        """One JSON object without a newline."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> PublishedFile:
        """Inverse of `encode`; raises CodecError, or UnsupportedVersionError for a newer major version."""
        try:
            entry = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            refuse_other_version(data, "v", "manifest")
            raise CodecError(f"manifest: {str(error)[:200]}") from None
        if entry.v != SCHEMA_VERSION:
            raise UnsupportedVersionError(f"manifest: version {entry.v}; this build knows {SCHEMA_VERSION}")
        if len(entry.ordinals) % 2 or any(first > last for first, last in entry.ranges):
            raise CodecError("manifest: ordinals are not pairs of first and last")
        return entry


_decoder = msgspec.json.Decoder(PublishedFile)


def read_manifest(dataset: Path) -> dict[str, PublishedFile]:
    """Published files of `dataset` by token; empty where there is no manifest. Raises CodecError on a bad line."""
    try:
        data = (dataset / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        return {}
    # No beginning of an entry ends in a brace, so a torn append never looks like a whole one.
    lines = (line for line in data.split(b"\n") if line.endswith(b"}"))
    return {entry.token: entry for entry in map(PublishedFile.decode, lines)}
