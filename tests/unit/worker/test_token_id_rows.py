"""Documents of token ids: checked, truncated, hashed, and otherwise left as they are."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Literal

import pyarrow as pa
from embedq_schemas.job import INPUT_IDS_TYPE
from embedq_worker.tokenization.given import hash_ids, take_ids
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 50
LISTS = st.lists(st.lists(st.integers(0, VOCAB + 2), max_size=12), min_size=1, max_size=15)


@given(LISTS, st.integers(1, 10), st.sampled_from(["right", "left"]), st.integers(0, 3))
def test_good_rows_are_the_models_input_and_bad_rows_are_named(
    lists: list[list[int]], longest: int, side: Literal["right", "left"], skipped: int
) -> None:
    column: Any = pa.array([[1]] * skipped + lists, INPUT_IDS_TYPE).slice(skipped)
    taken = take_ids(column, vocab_size=VOCAB, max_length=longest, truncation_side=side)
    for row, ids in enumerate(lists):
        found = taken.input_ids[taken.offsets[row] : taken.offsets[row + 1]].tolist()
        bad = [token for token in ids if token >= VOCAB]
        if bad or not ids:
            assert (found, taken.n_tokens[row], taken.truncated[row]) == ([], 0, False)
            assert taken.errors[row] == (
                f"token id {bad[0]} is outside the vocabulary of {VOCAB}" if bad else "the list of token ids is empty"
            )
            continue
        assert row not in taken.errors
        assert found == (ids[:longest] if side == "right" else ids[-longest:])
        assert (taken.n_tokens[row], taken.truncated[row]) == (len(ids), len(ids) > longest)
    assert hash_ids(column).to_pylist() == [
        hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).digest() for ids in lists
    ]
