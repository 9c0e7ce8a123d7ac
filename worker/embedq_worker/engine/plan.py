"""What every layer needs to know about a batch, worked out once, on the CPU, before the forward pass."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedq_worker.engine.base import PackedBatch
from embedq_worker.prefixes import common_prefixes, prefix_order

TOKENS_STEP = 64
TEXTS_STEP = 16
_SHARED_AT_LEAST = TOKENS_STEP
"""Tokens from which common beginnings are computed once: rounding up would take less away again."""


@dataclass(frozen=True)
class BatchPlan:
    """A batch of n texts of `total_tokens` tokens, of which `rows` are computed: fewer where texts begin alike.

    All tensors are on the device; `row_offsets` and `offsets` are Python's copies: no layer has to ask the device.
    """

    #: int64 [rows].
    input_ids: Tensor
    #: int64 [rows], each row's place in its text; 0 in dummies.
    positions: Tensor
    #: int32 [n + 1]. A text's rows are its last tokens: all of them, unless another text's rows serve for the first.
    cu_rows: Tensor
    #: int32 [n + 1], whole texts.
    cu_seqlens: Tensor
    #: int64 [n], the row of each text's last token.
    last: Tensor
    #: int64 [total_tokens], the row of each token of each text; None where every token has its own.
    keys: Tensor | None
    #: int64, where each text of the batch stands in this plan; None where they stand in its order, dummies behind them.
    texts: Tensor | None
    row_offsets: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.row_offsets[-1]

    @property
    def total_tokens(self) -> int:
        return self.offsets[-1]

    @cached_property
    def max_rows(self) -> int:
        return max((end - start for start, end in itertools.pairwise(self.row_offsets)), default=0)

    @cached_property
    def max_seqlen(self) -> int:
        return max((end - start for start, end in itertools.pairwise(self.offsets)), default=0)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def whole(self, values: Tensor) -> Tensor:
        """Of values of rows, [rows, ...], those of every token, [total_tokens, ...]."""
        # Ten times as fast as indexing on a CPU, where these rows are parts of wider ones.
        return values if self.keys is None else values.index_select(0, self.keys)

    def in_order(self, vectors: Tensor, count: int) -> Tensor:
        """[n, ...] in the plan's order -> [count, ...] in the batch's, without those of dummies."""
        return vectors[:count] if self.texts is None else vectors[self.texts]


def plan_batch(batch: PackedBatch, device: torch.device, *, share: bool = False, round_up: bool = False) -> BatchPlan:
    """Plan one forward pass; the plan travels to the device in one copy.

    Args:
        share: compute what texts begin with in common once. For causal models of which only last tokens are wanted.
        round_up: put dummy texts behind the batch's own, so that rows and texts come in few different numbers.
            oneDNN builds a kernel for every number of rows it meets and keeps it: with every batch of another size that
            costs about 4% of a 0.6B model's time, and memory that grows for hours. Rounding wastes half a step, 1.6% of
            2,048 tokens; steps are finer for few tokens, as somebody waits for a text that comes alone.
    """
    order, common = np.arange(len(batch)), np.zeros(len(batch), np.int64)
    if share and len(batch) > 1:
        by_prefix = prefix_order(batch.input_ids, batch.cu_seqlens)
        found = common_prefixes(batch.input_ids, batch.cu_seqlens, by_prefix)
        if found.sum() >= _SHARED_AT_LEAST:
            order, common = by_prefix, found
    shared = bool(common.any())
    lengths = batch.lengths.astype(np.int64)[order]
    first = batch.cu_seqlens[:-1].astype(np.int64)[order] + common
    own = lengths - common
    dummies = _dummies(int(own.sum()), len(batch)) if round_up else np.zeros(0, np.int64)
    # A text's rows: token `first` of the batch and those behind it, at places `common` and those behind it.
    steps = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
    ids = batch.input_ids[np.repeat(first, own) + steps]
    places = np.repeat(common, own) + steps
    if len(dummies):
        ids = np.concatenate([ids, np.zeros(dummies.sum(), np.uint32)])
        # All at place 0: the rope table may be shorter than a dummy, and nobody reads their vectors.
        places = np.concatenate([places, np.zeros(dummies.sum(), np.int64)])
        own, lengths = np.concatenate([own, dummies]), np.concatenate([lengths, dummies])
        common = np.concatenate([common, np.zeros(len(dummies), np.int64)])
    rows, offsets = np.append(0, np.cumsum(own)), np.append(0, np.cumsum(lengths))
    parts = [ids, places, rows, offsets, rows[1:] - 1]
    if shared:
        parts += [_keys(rows, offsets, common), np.argsort(order)]
    packed = torch.from_numpy(np.concatenate(parts, dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    on_device = torch.split(packed, [len(part) for part in parts])
    return BatchPlan(
        input_ids=on_device[0],
        positions=on_device[1],
        cu_rows=on_device[2].to(torch.int32),
        cu_seqlens=on_device[3].to(torch.int32),
        last=on_device[4],
        keys=on_device[5] if shared else None,
        texts=on_device[6] if shared else None,
        row_offsets=tuple(rows.tolist()),
        offsets=tuple(offsets.tolist()),
    )


def round_up_to_step(count: int, step: int) -> int:
    """The next multiple of `step`: of a smaller one where few are counted, of a larger one where many are.

    At most an eighth is added, from 32 steps on a 32nd, and an octave of counts has at most 32 values.
    """
    power = 1 << count.bit_length() - 1
    step = max(min(step, power >> 3), power >> 5, 1)
    return -(-count // step) * step


def _dummies(tokens: int, texts: int) -> NDArray[np.int64]:
    """Lengths of the texts that fill both numbers up to their steps."""
    more = round_up_to_step(texts, TEXTS_STEP) - texts
    if not more and tokens == round_up_to_step(tokens, TOKENS_STEP):
        return np.zeros(0, np.int64)
    # Each dummy has at least one token, and tokens need a dummy to be in.
    more = more or round_up_to_step(texts + 1, TEXTS_STEP) - texts
    missing = round_up_to_step(tokens + more, TOKENS_STEP) - tokens
    return np.append(np.ones(more - 1, np.int64), missing - more + 1)


def _keys(rows: NDArray[np.int64], offsets: NDArray[np.int64], common: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row of each token of each text; of those it has in common with the text before it, that one's."""
    keys = np.empty(offsets[-1], np.int64)
    before = 0
    ranges = zip(rows.tolist(), rows[1:].tolist(), offsets.tolist(), common.tolist(), strict=False)
    for first, end, at, shared in ranges:
        keys[at : at + shared] = keys[before : before + shared]
        keys[at + shared : at + shared + end - first] = np.arange(first, end)
        before = at
    return keys
