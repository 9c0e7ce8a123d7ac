"""Inputs given as token ids: what they mean, and which are refused."""

from __future__ import annotations

import pytest
from stack import Stack
from tokenizers import Tokenizer


def test_ids_outside_the_vocabulary_are_refused_and_named(stack: Stack) -> None:
    error = stack.refused(400, json={"model": stack.model.name, "input": [[1, 2], [1 << 30]]})
    assert error["param"] == "input[1]"


def test_ids_and_their_text_give_the_same_vector(stack: Stack) -> None:
    ids = Tokenizer.from_file(str(stack.model / "tokenizer.json")).encode("the people of the world").ids
    by_ids, by_text = (stack.embed(value) for value in (ids, "the people of the world"))
    assert by_ids["usage"] == by_text["usage"]
    assert by_ids["data"][0]["embedding"] == pytest.approx(by_text["data"][0]["embedding"], abs=2e-3)
