"""What a file holds is told from its name and its first bytes; what nothing reads is refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import open_corpus
from embedq_producer.formats import Compression, Format, of_content, of_name, packed_with
from embedq_producer.reader import metadata_types
from embedq_schemas.errors import InputError

LINE = '{"id": "a", "text": "b"}\n'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (LINE.encode("utf-16"), "text in UTF-16"),
        (b"PK\x03\x04" + bytes(100), "a zip archive"),
        (b"FEA1" + bytes(100), "Feather version 1"),
    ],
    ids=["utf-16", "zip", "feather-1"],
)
def test_another_format_is_named_and_refused(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "corpus"
    path.write_bytes(content)
    with pytest.raises(InputError, match=kind):
        metadata_types(open_corpus([path]), ReadOptions())


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.jsonl", Format.JSONL),
        ("a.NDJSON.gz", Format.JSONL),
        ("a.json.zst", Format.JSON),
        ("a.b.csv.bz2", Format.CSV),
        ("a.tsv", Format.TSV),
        ("part-0.snappy.parquet", Format.PARQUET),
        ("a.feather", Format.ARROW),
        ("s3://bucket/a.txt.xz", Format.TEXT),
        ("a.gz", None),
        ("README", None),
    ],
)
def test_a_name_tells_the_format_beneath_its_compression(name: str, format: Format | None) -> None:
    assert of_name(name) is format


@pytest.mark.parametrize(
    ("head", "format"),
    [
        (b"PAR1", Format.PARQUET),
        (b"ARROW1\0\0", Format.ARROW),
        (b"\xff\xff\xff\xff\x10", Format.ARROW),
        (b"\xef\xbb\xbf \n[{", Format.JSON),
        (LINE.encode(), Format.JSONL),
        (b"", None),
        (b"Basil\n", None),
    ],
    ids=["parquet", "arrow-file", "arrow-stream", "json", "jsonl", "empty", "text"],
)
def test_the_first_bytes_tell_the_format_where_they_can(head: bytes, format: Format | None) -> None:
    assert of_content(head) is format


def test_compression_is_told_from_the_bytes_alone() -> None:
    assert packed_with(b"BZh91AY") is Compression.BZ2
    assert packed_with(LINE.encode()) is None
