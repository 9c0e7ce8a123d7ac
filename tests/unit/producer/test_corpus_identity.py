"""A corpus is recognised again, and another one is not taken for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from embedq_producer.corpus import corpus_identity
from embedq_schemas.errors import InputError


def test_the_same_content_has_the_same_identity_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 300_000)
    (tmp_path / "b").write_bytes(b"x" * 300_000)
    assert corpus_identity(tmp_path / "a") == corpus_identity(tmp_path / "b")
    assert corpus_identity(tmp_path / "a").startswith("300000-")


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 300_000])
def test_another_size_beginning_or_end_is_another_identity(tmp_path: Path, size: int) -> None:
    corpus = tmp_path / "corpus"

    def identity(content: bytes) -> str:
        corpus.write_bytes(content)
        return corpus_identity(corpus)

    content = b"x" * size
    contents = {content, content + b"x", content[:-1] + b"y", b"y" + content[1:]}
    assert len({identity(each) for each in contents}) == len(contents)


def test_what_has_no_identity_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for path, reason in [
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "empty", "holds no file"),
        (tmp_path / "pipe", "is a pipe"),
    ]:
        with pytest.raises(InputError, match=reason):
            corpus_identity(path)
