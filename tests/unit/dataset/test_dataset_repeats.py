"""Counting repeats in bounded memory finds what counting in memory finds."""

from __future__ import annotations

import numpy as np
import pytest

from embedq.dataset.repeats import RepeatedKeys


@pytest.mark.parametrize("in_memory", [10**9, 1000, 0], ids=["memory", "some files", "files only"])
def test_repeats_are_those_of_a_plain_count(in_memory: int) -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64 - 1, 5000, dtype=np.uint64)
    keys[rng.integers(0, 5000, 700)] = keys[rng.integers(0, 5000, 700)]
    with RepeatedKeys(in_memory) as repeats:
        for part in np.array_split(keys, 11):
            repeats.add(part)
        count, values = repeats.find()
    found, counts = np.unique(keys, return_counts=True)
    assert count == len(keys) - len(found) > 0
    np.testing.assert_array_equal(values, found[counts > 1])


def test_nothing_repeats_in_nothing() -> None:
    with RepeatedKeys() as repeats:
        count, values = repeats.find()
    assert (count, len(values)) == (0, 0)
