"""Text hashes equal hashlib's over the texts' bytes, for any slice of any column."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest
from embedq_schemas.text_hash import hash_texts
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=8)


@given(TEXTS, st.data())
def test_any_slice_of_a_column_hashes_to_its_own_texts(texts: list[str], data: st.DataObject) -> None:
    column = pa.array(texts, pa.string())
    start = data.draw(st.integers(0, len(texts)))
    length = data.draw(st.integers(0, len(texts) - start))
    hashes = hash_texts(column.slice(start, length))
    hashes.validate(full=True)
    assert hashes.type == pa.binary(32)
    assert hashes.to_pylist() == [hashlib.sha256(text.encode()).digest() for text in texts[start : start + length]]


@pytest.mark.parametrize("column", [pa.array([], pa.string()), pa.array([""]), pa.array(["a", ""]).slice(1)])
def test_empty_columns_and_empty_texts_have_their_hashes(column: pa.StringArray) -> None:
    assert hash_texts(column).to_pylist() == [hashlib.sha256(b"").digest()] * len(column)
