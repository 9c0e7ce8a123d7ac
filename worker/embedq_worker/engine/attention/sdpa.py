"""torch.nn.functional.scaled_dot_product_attention, one text at a time: runs everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from embedq_worker.engine.plan import BatchPlan

#: Queries per block of a windowed layer, so that its mask stays small at any length.
_WINDOW_BLOCK = 1024


class SdpaAttention:
    name = "sdpa"

    def __init__(self) -> None:
        self._spans: tuple[tuple[int, int], ...] = ()

    def prepare(self, plan: BatchPlan) -> None:
        self._spans = tuple(zip(plan.offsets, plan.offsets[1:], strict=False))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        attend_spans(q, k, v, out, self._spans, causal=causal, window=window)
        return out

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        for row, (begin, stop) in enumerate(self._spans):
            start = begin if window is None else max(begin, stop - window)
            out[row : row + 1] = _attend(q[row : row + 1], k[start:stop], v[start:stop], causal=False)
        return out


def attend_spans(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, spans: Iterable[tuple[int, int]], *, causal: bool, window: int | None
) -> None:
    """Fill `out` [tokens, heads, head_dim] for the texts at `spans` (start, stop), one at a time."""
    for start, stop in spans:
        if window is not None and stop - start > window:
            _windowed(q, k, v, out, start, stop, window)
        else:
            out[start:stop] = _attend(q[start:stop], k[start:stop], v[start:stop], causal=causal)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None) -> Tensor:
    """[tokens, heads, head_dim] each; grouped heads where k has fewer."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, out: Tensor, start: int, stop: int, window: int) -> None:
    for first in range(start, stop, _WINDOW_BLOCK):
        end = min(first + _WINDOW_BLOCK, stop)
        begin = max(start, first - window + 1)
        rows = torch.arange(first, end, device=q.device).unsqueeze(1)
        columns = torch.arange(begin, end, device=q.device).unsqueeze(0)
        mask = (columns <= rows) & (columns > rows - window)
        out[first:end] = _attend(q[first:end], k[begin:end], v[begin:end], causal=False, mask=mask)
