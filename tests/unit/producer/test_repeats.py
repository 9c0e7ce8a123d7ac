"""Repeats: which documents are sent, which are held back, and what finds those again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from embedq_producer.ordinals import NOTHING_DONE, OrdinalSet
from embedq_producer.repeats import HeldBack, Repeats
from embedq_schemas.errors import StorageError
from embedq_schemas.text_hash import text_keys
from hypothesis import given, settings
from hypothesis import strategies as st


def block(texts: list[str], first: int = 0) -> pa.RecordBatch:
    ordinals = list(range(first, first + len(texts)))
    columns = {
        "id": pa.array([f"d{ordinal}" for ordinal in ordinals], pa.string()),
        "ordinal": pa.array(ordinals, pa.int64()),
        "text": pa.array(texts, pa.string()),
        "lang": pa.array([None if ordinal % 2 else "en" for ordinal in ordinals], pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


def keys_of(texts: list[str]) -> np.ndarray:
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return text_keys(pa.array(digests, pa.binary(32)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), max_size=8), st.sets(st.integers(0, 47)))
def test_each_text_is_sent_once_and_every_other_document_is_held_back_unless_it_is_done(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[str]], done: set[int]
) -> None:
    spool = tmp_path_factory.mktemp("spool") / "known.tmp"
    repeats = Repeats(spool, ["lang"], OrdinalSet((o, o) for o in done), [keys_of(["h"])])
    texts = [text for one in blocks for text in one]
    sent: list[int] = []
    first = 0
    for one in blocks:
        batch = block(one, first)
        sent += batch.column("ordinal").to_numpy()[repeats.first_time(batch)].tolist()
        first += len(one)

    expected = sorted({text: i for i, text in reversed(list(enumerate(texts))) if text != "h"}.values())
    assert sent == expected
    waiting = [i for i in range(len(texts)) if i not in expected and i not in done]
    held = repeats.close()
    assert repeats.count == len(waiting) == int(held.waiting.sum())
    found = held.ordinals_waiting()
    assert [i for i in range(len(texts)) if i in found] == waiting
    if not waiting:
        return
    rows = held.take(np.arange(len(waiting)))
    assert rows.column("id").to_pylist() == [f"d{i}" for i in waiting]
    assert rows.column("lang").to_pylist() == [None if i % 2 else "en" for i in waiting]
    sources, places = held.find(keys_of(list("abcdefgh")))
    pairs = {(int(place), "abcdefgh"[source]) for source, place in zip(sources, places, strict=True)}
    assert pairs == {(place, texts[i]) for place, i in enumerate(waiting)}
    assert held.at(np.array(waiting)).tolist() == list(range(len(waiting)))  # type: ignore[union-attr]
    assert held.at(np.array([*waiting, len(texts)])) is None
    held.settle(OrdinalSet([(0, waiting[-1] - 1)]))
    assert held.waiting.tolist() == [False] * (len(waiting) - 1) + [True]
    assert set(held.find(keys_of(list("abcdefgh")))[1].tolist()) == {len(waiting) - 1}
    assert held.at(np.array(waiting[:1])) is None or len(waiting) == 1


def test_documents_held_back_are_found_across_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedq_producer.repeats._SPOOL_ROWS", 3)
    repeats = Repeats(tmp_path / "known.tmp", [], NOTHING_DONE, [keys_of(["x"])])
    for first in range(0, 40, 2):
        # Every fourth document is new, so that the ordinals held back have gaps.
        repeats.first_time(block([f"new {first}" if first % 4 == 0 else "x", "x"], first))
    held = repeats.close()
    waiting = [i for i in range(40) if i % 4]
    assert held.at(np.array(waiting)).tolist() == list(range(30))  # type: ignore[union-attr]
    assert held.at(np.array([5, 7, 22])).tolist() == [3, 5, 16]  # type: ignore[union-attr]
    assert held.at(np.array([5, 8])) is None
    assert held.take(np.array([0, 13, 29])).column("ordinal").to_pylist() == [waiting[0], waiting[13], waiting[29]]


@pytest.mark.parametrize("rows", [1, 8192], ids=["at the end", "on the way"])
def test_a_disk_that_refuses_documents_held_back_is_told_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedq_producer.repeats._SPOOL_ROWS", rows)
    repeats = Repeats(Path("/dev/full"), (), NOTHING_DONE)

    def hold_back() -> None:
        repeats.first_time(block(["same"] * 3000))
        repeats.close()

    with pytest.raises(StorageError, match="cannot write /dev/full"):
        hold_back()


def test_nothing_held_back_is_nothing_to_settle() -> None:
    held = HeldBack(None)
    held.settle(OrdinalSet([(0, 5)]))
    assert not held.waiting.any()
    assert not held.ordinals_waiting()
    assert len(held.find(keys_of(["a"]))[0]) == 0
