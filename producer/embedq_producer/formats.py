"""What a file holds and how it is packed, told from its name and its first bytes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import PurePosixPath

from .damage import DamagedFileError

HEAD_BYTES = 4096
"""How much of a file's beginning `of_content` wants to see."""


class Format(StrEnum):
    """How a file holds documents."""

    JSONL = "jsonl"  # one JSON object a line
    JSON = "json"  # one JSON array of objects; read as jsonl where the first character is no bracket
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    ARROW = "arrow"  # IPC file or stream, Feather
    TEXT = "text"  # a document a line
    FILES = "files"  # a document a file


TABLES = frozenset({Format.PARQUET, Format.ARROW})


class Compression(StrEnum):
    """How a file's bytes are packed."""

    GZIP = "gzip"
    BZ2 = "bz2"
    XZ = "xz"
    ZSTD = "zstd"


SUFFIXES = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".jsonlines": Format.JSONL,
    ".json": Format.JSON,
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".tab": Format.TSV,
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".arrows": Format.ARROW,
    ".ipc": Format.ARROW,
    ".feather": Format.ARROW,
    ".txt": Format.TEXT,
    ".text": Format.TEXT,
}
_PACKED_SUFFIXES = frozenset({".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd"})
_PACKED = {
    b"\x1f\x8b\x08": Compression.GZIP,
    b"BZh": Compression.BZ2,
    b"\xfd7zXZ\x00": Compression.XZ,
    b"\x28\xb5\x2f\xfd": Compression.ZSTD,
}
_MAGIC = {b"PAR1": Format.PARQUET, b"ARROW1": Format.ARROW, b"\xff\xff\xff\xff": Format.ARROW}
_OTHERS = {
    b"PK\x03\x04": "a zip archive",
    b"FEA1": "Feather version 1, not version 2",
    b"\xff\xfe": "text in UTF-16, not UTF-8",
    b"\xfe\xff": "text in UTF-16, not UTF-8",
}


def of_name(name: str) -> Format | None:
    """What a file's name says of its content, the suffix of a compression aside."""
    path = PurePosixPath(name.lower())
    if path.suffix in _PACKED_SUFFIXES:
        path = PurePosixPath(path.stem)
    return SUFFIXES.get(path.suffix)


def packed_with(head: bytes) -> Compression | None:
    """The compression whose files start like `head`."""
    return next((packing for magic, packing in _PACKED.items() if head.startswith(magic)), None)


def of_content(head: bytes) -> Format | None:
    """What a file that starts like `head`, decompressed, holds; None where it could be any text."""
    for magic, found in _MAGIC.items():
        if head.startswith(magic):
            return found
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    return {b"[": Format.JSON, b"{": Format.JSONL}.get(first)


def refuse_others(head: bytes) -> None:
    """Raise DamagedFileError where `head` shows a format in which every line would become an error row."""
    for magic, kind in _OTHERS.items():
        if head.startswith(magic):
            raise DamagedFileError(f"it is {kind}; convert it first")
