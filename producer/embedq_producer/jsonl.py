"""One JSONL file, or an open stream of one, as a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .blocks import CorpusBlock, ReadOptions, Reject, document_schema
from .corpus import corpus_of_stream, open_corpus
from .formats import Format
from .position import START, Position
from .reader import read_corpus

__all__ = ["START", "CorpusBlock", "Position", "ReadOptions", "Reject", "document_schema", "read_jsonl"]


def read_jsonl(path: Path | BinaryIO, *, options: ReadOptions, start: Position = START) -> Iterator[CorpusBlock]:
    """`read_corpus` of one JSONL file, compressed or not. An open stream must stand at its beginning."""
    if isinstance(path, Path):
        corpus = open_corpus([path], Format.JSONL)
    else:
        corpus = corpus_of_stream(path, str(getattr(path, "name", "<stream>")), Format.JSONL)
    yield from read_corpus(corpus, options=options, start=start)
