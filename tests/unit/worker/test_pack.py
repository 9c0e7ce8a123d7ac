"""The packer's plan: every document once, no batch above the budget, and few batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from embedq_worker.pack import longest_first, plan_batches
from embedq_worker.prefixes import MOST_WHOLE
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(1, 300), max_size=200).map(lambda found: np.array(found, np.int32))


def first_fit_decreasing(lengths: np.ndarray, budget: int) -> int:
    """Batches that a careful packer, free to look back at every open batch, would need."""
    room: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        for batch, left in enumerate(room):
            if length <= left:
                room[batch] -= length
                break
        else:
            room.append(budget - length)
    return len(room)


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 400))
def test_every_document_is_in_one_batch_and_no_batch_of_several_exceeds_the_budget(
    lengths: np.ndarray, budget: int
) -> None:
    bounds = plan_batches(lengths, budget)
    assert bounds.dtype == np.int64
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    sizes = np.diff(bounds)
    assert (sizes >= 1).all()
    for start, end in itertools.pairwise(bounds):
        assert end == start + 1 or lengths[start:end].sum() <= budget
        # Nothing that would still fit is left to the next one.
        assert end == len(lengths) or lengths[start : end + 1].sum() > budget


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 400), st.data())
def test_what_neighbours_share_is_counted_once_in_each_batch_and_whole_documents_are_bounded(
    lengths: np.ndarray, budget: int, data: st.DataObject
) -> None:
    shares = [data.draw(st.integers(0, min(a, b - 1))) for a, b in itertools.pairwise(lengths.tolist())]
    common = np.array([0, *shares][: len(lengths)], np.int64)

    def fits(start: int, end: int) -> bool:
        computed = lengths[start:end].sum() - common[start + 1 : end].sum()
        return bool(computed <= budget and lengths[start:end].sum() <= MOST_WHOLE * budget)

    bounds = plan_batches(lengths, budget, common).tolist()
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    for start, end in itertools.pairwise(bounds):
        assert end == start + 1 or fits(start, end)
        assert end == len(lengths) or not fits(start, end + 1)


@settings(deadline=None)
@given(LENGTHS)
def test_documents_come_longest_first_and_equal_ones_in_their_order(lengths: np.ndarray) -> None:
    order = longest_first(lengths)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(lengths)))
    ranked = [(-int(lengths[row]), int(row)) for row in order]
    assert ranked == sorted(ranked)


@settings(deadline=None, max_examples=200)
@given(LENGTHS.filter(len), st.integers(300, 2000))
def test_batches_are_hardly_more_than_a_careful_packer_needs(lengths: np.ndarray, budget: int) -> None:
    bounds = plan_batches(lengths[longest_first(lengths)], budget)
    # Next-fit on falling lengths needs at most 1.7 times the optimum, whatever the lengths (Baker and Coffman, 1981).
    assert len(bounds) - 1 <= 1.7 * first_fit_decreasing(lengths, budget) + 2


@settings(deadline=None)
@given(LENGTHS.filter(len), st.integers(8, 40))
def test_documents_much_shorter_than_the_budget_fill_their_batches(lengths: np.ndarray, times: int) -> None:
    budget = int(lengths.max()) * times
    bounds = plan_batches(lengths, budget)
    fullest = int(lengths.sum()) / (budget * (1 - 1 / times))
    assert len(bounds) - 1 <= fullest + 1


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_makes_no_batch_and_one_document_makes_one(count: int) -> None:
    bounds = plan_batches(np.full(count, 10, np.int32), 5)
    assert bounds.tolist() == list(range(count + 1))


def test_token_counts_beyond_32_bits_are_added_up_right() -> None:
    lengths = np.full(3, 2**31 - 1, np.int32)
    assert plan_batches(lengths, 2**33).tolist() == [0, 3]
    assert plan_batches(lengths, 2**32).tolist() == [0, 2, 3]
