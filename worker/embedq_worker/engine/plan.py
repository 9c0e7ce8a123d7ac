"""What every layer needs to know about a batch, worked out once, on the CPU, before the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embedq_worker.engine.base import PackedBatch


@dataclass(frozen=True)
class BatchPlan:
    """`input_ids`, `positions` int64 [total_tokens]; `cu_seqlens` int32 [n + 1]; `last` int64 [n], the index of each
    text's last token; all on the device. `offsets` is cu_seqlens as Python integers: no layer has to ask the device."""

    input_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    last: Tensor
    offsets: tuple[int, ...]
    max_seqlen: int

    @property
    def total_tokens(self) -> int:
        return self.offsets[-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1


TOKENS_STEP = 64
TEXTS_STEP = 16


def round_up(batch: PackedBatch) -> PackedBatch:
    """`batch` with dummy texts behind its own, so that tokens and texts come in few different numbers.

    oneDNN builds a kernel for every number of rows it meets and keeps it: with every batch of another size that costs
    about 4% of a 0.6B model's time, and memory that grows for hours. Rounding wastes half a step, 1.6% of 2,048 tokens.
    """
    total, count = len(batch.input_ids), len(batch)
    texts, tokens = -count % TEXTS_STEP, -total % TOKENS_STEP
    if not texts and not tokens:
        return batch
    # Each dummy has at least one token, and tokens need a dummy to be in.
    texts = texts or TEXTS_STEP
    while tokens < texts:
        tokens += TOKENS_STEP
    ends = np.append(np.arange(1, texts), tokens).astype(np.int32) + batch.cu_seqlens[-1]
    ids = np.concatenate([batch.input_ids, np.zeros(tokens, np.uint32)])
    return PackedBatch(ids, np.concatenate([batch.cu_seqlens, ends.astype(np.int32)]))


def plan_batch(batch: PackedBatch, device: torch.device) -> BatchPlan:
    """One host-to-device copy: ids, positions and offsets travel as one int64 buffer."""
    total, count = len(batch.input_ids), len(batch)
    starts = batch.cu_seqlens[:-1].astype(np.int64)
    host = np.empty(2 * total + 2 * count + 1, np.int64)
    host[:total] = batch.input_ids
    host[total : 2 * total] = np.arange(total) - np.repeat(starts, batch.lengths)
    host[2 * total : 2 * total + count] = batch.cu_seqlens[1:].astype(np.int64) - 1
    host[2 * total + count :] = batch.cu_seqlens
    packed = torch.from_numpy(host)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return BatchPlan(
        input_ids=packed[:total],
        positions=packed[total : 2 * total],
        cu_seqlens=packed[2 * total + count :].to(torch.int32),
        last=packed[2 * total : 2 * total + count],
        offsets=tuple(int(offset) for offset in batch.cu_seqlens),
        max_seqlen=int(batch.lengths.max(initial=0)),
    )
