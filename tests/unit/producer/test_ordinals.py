"""A set of ordinals given as ranges answers as a set of integers would."""

from __future__ import annotations

import numpy as np
from embedq_producer.ordinals import NOTHING_DONE, OrdinalSet
from hypothesis import given
from hypothesis import strategies as st

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


@given(RANGES)
def test_ranges_that_touch_overlap_or_repeat_hold_what_their_union_holds(ranges: list[tuple[int, int]]) -> None:
    expected = {ordinal for first, last in ranges for ordinal in range(first, last + 1)}
    found = OrdinalSet(ranges)
    asked = np.arange(-3, 80, dtype=np.int64)
    assert len(found) == len(expected)
    assert bool(found) == bool(expected)
    assert found.contains(asked).tolist() == [ordinal in expected for ordinal in asked.tolist()]
    assert all((ordinal in found) == (ordinal in expected) for ordinal in (-1, 0, 7, 60, 72, 73))


@given(RANGES, st.randoms())
def test_the_order_of_the_ranges_does_not_matter(ranges: list[tuple[int, int]], rng: object) -> None:
    shuffled = list(ranges)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    asked = np.arange(80, dtype=np.int64)
    assert OrdinalSet(iter(shuffled)).contains(asked).tolist() == OrdinalSet(ranges).contains(asked).tolist()


def test_large_ordinals_are_exact() -> None:
    edge = 2**63 - 1
    found = OrdinalSet([(edge - 2, edge), (2**53, 2**53)])
    assert [ordinal in found for ordinal in (edge, edge - 3, 2**53, 2**53 + 1)] == [True, False, True, False]
    assert len(found) == 4
    touching = OrdinalSet([(0, edge), (5, 6), (edge, edge)])
    assert edge in touching
    assert 7 in touching


def test_nothing_done_holds_nothing() -> None:
    assert not NOTHING_DONE
    assert NOTHING_DONE.contains(np.array([0, 1], np.int64)).tolist() == [False, False]
    assert NOTHING_DONE.contains(np.array([], np.int64)).tolist() == []
