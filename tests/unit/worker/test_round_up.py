"""Dummy texts behind a batch: the batch itself stays as it is, and sizes come in steps."""

from __future__ import annotations

import numpy as np
from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.plan import TEXTS_STEP, TOKENS_STEP, round_up
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80))
def test_rounding_keeps_the_batch_in_front_and_fills_both_numbers_up(lengths: list[int]) -> None:
    batch = PackedBatch.of([[7] * length for length in lengths])
    rounded = round_up(batch)
    assert len(rounded.input_ids) % TOKENS_STEP == 0
    assert len(rounded) % TEXTS_STEP == 0
    np.testing.assert_array_equal(rounded.input_ids[: len(batch.input_ids)], batch.input_ids)
    np.testing.assert_array_equal(rounded.cu_seqlens[: len(batch) + 1], batch.cu_seqlens)
    assert rounded.cu_seqlens.dtype == np.int32
    assert rounded.input_ids.dtype == np.uint32
    assert rounded.lengths.min() >= 1
    assert rounded.cu_seqlens[-1] == len(rounded.input_ids)
    assert rounded.lengths[len(batch) :].max(initial=0) <= 2 * TOKENS_STEP
    assert len(rounded.input_ids) - len(batch.input_ids) < 2 * TOKENS_STEP
