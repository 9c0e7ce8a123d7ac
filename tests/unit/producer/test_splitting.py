"""A corpus read as its chunks: ordinals without gaps, the same from wherever reading goes on, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from embedq_producer.blocks import CorpusBlock, ReadOptions, document_schema
from embedq_producer.corpus import Corpus, open_corpus
from embedq_producer.position import Position
from embedq_producer.reader import read_corpus
from embedq_schemas.chunks import Chunks
from embedq_schemas.errors import UsageError

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
    first = next(block for block in read_corpus(given, options=options()) if not block.end.sent)
    rest = list(read_corpus(given, options=options(splitter=None), start=first.end))
    whole = list(read_corpus(given, options=options(splitter=None)))
    assert [row["id"] for row in rows(rest)] == [row["id"] for row in rows(whole[1:])]


@pytest.mark.parametrize("smaller", [{"block_documents": 2}, {"block_bytes": 64}, {"block_documents": 50}])
def test_blocks_of_another_size_may_be_asked_for_within_a_document(smaller: dict[str, int], tmp_path: Path) -> None:
    given, _ = corpus(tmp_path)
    blocks = list(read_corpus(given, options=options()))
    assert any(block.end.sent for block in blocks)
    for index, block in enumerate(blocks):
        rest = list(read_corpus(given, options=options(**smaller), start=block.end))
        assert rows(rest) == rows(blocks[index + 1 :])
        for name in ("rejects", "duplicates"):
            before, after = ([getattr(part, name) for part in parts] for parts in (blocks[: index + 1], rest))
            whole = [getattr(part, name) for part in blocks]
            if name == "duplicates":
                assert sum(before) + sum(after) == sum(whole)
            else:
                assert sum(before, ()) + sum(after, ()) == sum(whole, ())


def test_no_block_holds_more_chunks_than_documents_nor_more_bytes(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    documents = [{"id": str(i), "text": "x" * size, "m": "y" * 100} for i, size in enumerate((35, 9500, 5, 2500))]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    more = {"metadata": ("m",), "metadata_types": (pa.string(),), "block_documents": 50}
    for block_bytes, most in ((1 << 20, 50), (2000, 2000 // 119)):
        blocks = list(read_corpus(open_corpus([path]), options=options(**more, block_bytes=block_bytes)))
        found = rows(blocks)
        assert [row["ordinal"] for row in found] == list(range(4 + 950 + 1 + 250))
        assert {row["chunk_count"] for row in found if row["id"] == "1"} == {950}
        assert max(block.documents.num_rows for block in blocks) == most


def test_memory_follows_the_text_and_not_its_chunks(tmp_path: Path) -> None:
    """Every chunk once had a copy of the whole text: here 2.5 GB, more than an Arrow array takes."""
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"id": "a", "text": "x" * 160_000}))
    blocks = read_corpus(open_corpus([path]), options=options(metadata=(), metadata_types=(), block_documents=1000))
    assert sum(block.documents.num_rows for block in blocks) == 16_000


def test_a_metadata_field_may_not_have_the_name_of_a_chunks_column() -> None:
    with pytest.raises(UsageError, match="char_start"):
        options(metadata=("char_start",), metadata_types=(pa.int64(),))
