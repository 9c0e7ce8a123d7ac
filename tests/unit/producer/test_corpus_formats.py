"""Files that are no JSON lines are refused at once, instead of becoming as many error rows as they have lines."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from embedq_producer.corpus import corpus_identity
from embedq_schemas.errors import InputError

LINE = '{"id": "a", "text": "b"}\n'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(LINE.encode(), mtime=0), "compressed with gzip"),
        (LINE.encode("utf-16"), "text in UTF-16"),
        (b"PAR1" + bytes(100), "Parquet"),
    ],
    ids=["gzip", "utf-16", "parquet"],
)
def test_another_format_is_named_and_refused(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "corpus"
    path.write_bytes(content)
    with pytest.raises(InputError, match=kind):
        corpus_identity(path)


@pytest.mark.parametrize(
    "content", [b"", LINE.encode(), b"\xef\xbb\xbf" + LINE.encode(), b"Basil\n"], ids=["empty", "json", "bom", "B"]
)
def test_anything_else_is_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "corpus"
    path.write_bytes(content)
    assert corpus_identity(path)
