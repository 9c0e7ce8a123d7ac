"""A corpus read as its chunks: ordinals without gaps, the same from wherever reading goes on, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from embedq_producer import pieces
from embedq_producer.blocks import CorpusBlock, ReadOptions, document_schema
from embedq_producer.corpus import Corpus, open_corpus
from embedq_producer.position import Position
from embedq_producer.reader import read_corpus
from embedq_schemas.chunks import Chunks
from embedq_schemas.errors import InputError, UsageError

SIZE = 10


def split(texts: pa.StringArray) -> Chunks:
    """Chunks of ten characters; a text of exclamation marks cannot be cut."""
    places = [
        [] if text.startswith("!") else [(at, min(at + SIZE, len(text))) for at in range(0, max(1, len(text)), SIZE)]
        for text in texts.to_pylist()
    ]
    flat = [(row, number, *place) for row, own in enumerate(places) for number, place in enumerate(own)]
    owners, index, starts, ends = np.array(flat, dtype=np.int64).reshape(-1, 4).T
    values = texts.to_pylist()
    pieces = pa.array([values[row][start:end] for row, _, start, end in flat], pa.string())
    refused = {row: "it is all exclamation marks" for row, own in enumerate(places) if not own}
    return Chunks(owners, pieces, index.astype(np.int32), starts, ends, refused)


def corpus(folder: Path) -> tuple[Corpus, list[dict[str, Any]]]:
    """Two files with long and short texts, a bad line, a repeated id, texts without an id, and one nobody can cut."""
    documents: list[Any] = [{"id": f"d{i}", "text": f"{i:03}" * (1 + 7 * (i % 4)), "n": i} for i in range(40)]
    documents[5] = "no object"
    documents[9] = {"id": "bang", "text": "!" * 30}
    documents[12] = {"id": "d3", "text": "repeated"}
    documents[20] = documents[24] = {"text": "without an id, " * 3}
    for number, half in enumerate((documents[:23], documents[23:])):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in half))
    return open_corpus([folder / "0.jsonl", folder / "1.jsonl"]), documents


def options(**changes: Any) -> ReadOptions:
    more = {"metadata": ("n",), "metadata_types": (pa.int64(),), "block_documents": 6, "splitter": split}
    return ReadOptions(**more | changes)


def rows(blocks: list[CorpusBlock]) -> list[dict[str, Any]]:
    return [row for block in blocks for row in block.documents.to_pylist()]


def test_chunks_take_ordinals_one_after_the_other_and_their_documents_columns(tmp_path: Path) -> None:
    given, documents = corpus(tmp_path)
    plain = list(read_corpus(given, options=options(splitter=None)))
    blocks = list(read_corpus(given, options=options()))

    found = rows(blocks)
    assert all(block.documents.schema == document_schema(options()) for block in blocks)
    whole = {row["id"]: row for row in rows(plain)}
    joined: dict[str, str] = {}
    for row in found:
        document = whole[row["id"]]
        assert row["n"] == document["n"]
        assert row["text"] == document["text"][row["char_start"] : row["char_end"]]
        assert row["chunk_index"] * SIZE == row["char_start"] == len(joined.get(row["id"], ""))
        joined[row["id"]] = joined.get(row["id"], "") + row["text"]
    assert joined == {name: row["text"] for name, row in whole.items() if name != "bang"}
    rejected = [reject for block in blocks for reject in block.rejects]
    assert [(reject.id, reject.line, reject.code) for reject in rejected] == [
        (None, 6, "invalid_json"),
        ("bang", 10, "too_long"),
        ("d3", 13, "duplicate_id"),
    ]
    skipped = sum(block.duplicates for block in blocks)
    taken = sorted([row["ordinal"] for row in found] + [reject.ordinal for reject in rejected])
    assert skipped == 1
    # One ordinal is that of the text that was there before.
    assert len(set(taken)) == len(taken) == blocks[-1].end.next_ordinal - skipped
    assert taken[-1] == blocks[-1].end.next_ordinal - 1
    assert blocks[-1].end.ordinal == len(documents)


def test_reading_on_from_any_block_gives_the_very_same_chunks(tmp_path: Path) -> None:
    given, _ = corpus(tmp_path)
    blocks = list(read_corpus(given, options=options()))
    assert len(blocks) > 5
    for index, block in enumerate(blocks):
        start = Position.from_json(block.end.to_json())
        assert list(read_corpus(given, options=options(), start=start)) == blocks[index + 1 :]


def test_a_position_of_another_way_to_cut_is_one_of_the_same_document(tmp_path: Path) -> None:
    given, _ = corpus(tmp_path)
    first, *_ = read_corpus(given, options=options())
    rest = list(read_corpus(given, options=options(splitter=None), start=first.end))
    whole = list(read_corpus(given, options=options(splitter=None)))
    assert [row["id"] for row in rows(rest)] == [row["id"] for row in rows(whole[1:])]


def test_a_text_with_more_chunks_than_a_job_may_hold_is_an_error_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MAX_ENTRY_DOCUMENTS", 8)
    path = tmp_path / "c.jsonl"
    texts = {"a": 35, "b": 95, "c": 5, "d": 25}
    path.write_text("".join(json.dumps({"id": name, "text": "x" * size}) + "\n" for name, size in texts.items()))
    (block,) = read_corpus(open_corpus([path]), options=options(metadata=(), metadata_types=()))
    assert [row["id"] for row in block.documents.to_pylist()] == [*"aaaa", "c", *"ddd"]
    assert [(reject.id, reject.ordinal, reject.code) for reject in block.rejects] == [("b", 4, "too_long")]
    assert [row["ordinal"] for row in block.documents.to_pylist()] == [0, 1, 2, 3, 5, 6, 7, 8]
    with pytest.raises(InputError, match="line 2"):
        list(read_corpus(open_corpus([path]), options=options(metadata=(), metadata_types=(), strict=True)))


def test_a_metadata_field_may_not_have_the_name_of_a_chunks_column() -> None:
    with pytest.raises(UsageError, match="char_start"):
        options(metadata=("char_start",), metadata_types=(pa.int64(),))
