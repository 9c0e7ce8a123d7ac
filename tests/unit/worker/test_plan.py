"""What a forward pass computes: common beginnings once, and dummy texts, so that sizes come in steps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.plan import TEXTS_STEP, TOKENS_STEP, plan_batch, round_up_to_step
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80))
def test_rounding_keeps_the_batch_in_front_and_fills_both_numbers_up(lengths: list[int]) -> None:
    batch = PackedBatch.of([[7] * length for length in lengths])
    plan = plan_batch(batch, CPU, round_up=True)
    assert plan.total_tokens == round_up_to_step(plan.total_tokens, TOKENS_STEP)
    assert len(plan) == round_up_to_step(len(plan), TEXTS_STEP)
    np.testing.assert_array_equal(plan.input_ids[: len(batch.input_ids)], batch.input_ids.astype(np.int64))
    assert plan.offsets[: len(batch) + 1] == tuple(batch.cu_seqlens.tolist())
    assert plan.row_offsets == plan.offsets
    assert plan.keys is None
    dummies = np.diff(plan.offsets)[len(batch) :]
    assert dummies.min(initial=1) >= 1
    assert not plan.positions[len(batch.input_ids) :].any(), "a rope table may be shorter than a dummy"
    more = plan.total_tokens - len(batch.input_ids)
    assert more < max(2 * TOKENS_STEP, len(batch.input_ids) // 16)
    assert more < 2 + len(batch.input_ids) // 4
    vectors = torch.arange(len(plan)).unsqueeze(1)
    assert plan.in_order(vectors, len(batch)).squeeze(1).tolist() == list(range(len(batch)))


def test_sizes_come_in_few_numbers_and_a_short_text_alone_is_hardly_longer() -> None:
    # oneDNN keeps 1,024 kernels, and each size takes one for each of a layer's products.
    assert len({round_up_to_step(tokens, TOKENS_STEP) for tokens in range(1, 4097)}) < 120
    assert len({round_up_to_step(tokens, TOKENS_STEP) for tokens in range(1, 16_385)}) < 180
    assert [plan_batch(PackedBatch.of([[7] * n]), CPU, round_up=True).rows for n in (1, 10, 17, 40, 100)] == [
        1,
        10,
        18,
        40,
        104,
    ]


ENDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
LONG = st.builds(lambda head, times, end: [head] * times + end, st.integers(0, 1), st.integers(0, 120), ENDS)


@given(texts=st.lists(ENDS | LONG, min_size=1, max_size=40), round_up=st.booleans())
def test_every_token_has_the_row_of_its_whole_prefix_and_no_prefix_has_two(
    texts: list[list[int]], round_up: bool
) -> None:
    batch = PackedBatch.of(texts)
    plan = plan_batch(batch, CPU, share=True, round_up=round_up)
    ids, places = plan.input_ids.tolist(), plan.positions.tolist()
    keys = range(plan.total_tokens) if plan.keys is None else plan.keys.tolist()
    at = plan.in_order(torch.arange(len(plan)), len(texts)).tolist()
    owner: dict[int, tuple[int, ...]] = {}
    for text, index in zip(texts, at, strict=True):
        rows = keys[plan.offsets[index] : plan.offsets[index + 1]]
        assert [ids[row] for row in rows] == text
        assert [places[row] for row in rows] == list(range(len(text)))
        # Rows stand for whole prefixes, not for tokens: two texts with a row in common have all before it in common.
        for place, row in enumerate(rows):
            assert owner.setdefault(row, tuple(text[: place + 1])) == tuple(text[: place + 1])
        own = range(plan.row_offsets[index], plan.row_offsets[index + 1])
        assert list(rows[len(text) - len(own) :]) == list(own)
        assert plan.last[index] == own[-1]
    assert len(set(at)) == len(texts)
    # A text whose every token another has, too, still has one row of its own; others share all they can.
    if plan.keys is not None:
        prefixes = Counter(owner[row] for row in owner)
        assert all(count == 1 or prefix in map(tuple, texts) for prefix, count in prefixes.items())


def test_little_in_common_is_not_worth_sharing() -> None:
    alike = [[7] * 9 + list(range(100 * i, 100 * i + 100)) for i in range(1, 9)]
    assert plan_batch(PackedBatch.of(alike), CPU, share=True).keys is None  # 63 tokens
    assert plan_batch(PackedBatch.of([*alike, [7]]), CPU, share=True).keys is not None
    assert plan_batch(PackedBatch.of([*alike, [7]]), CPU).keys is None
