"""torch.nn.functional.scaled_dot_product_attention, one text at a time: runs everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from embedq_worker.engine.plan import BatchPlan

#: Queries of a block where a mask is needed, so that it stays small at any length.
_MASKED_BLOCK = 1024


@dataclass(frozen=True)
class Span:
    """Where one text's rows and keys lie: the rows are those of its last tokens."""

    first: int
    end: int
    start: int
    stop: int


def spans(plan: BatchPlan) -> tuple[Span, ...]:
    """One for each text."""
    rows, keys = itertools.pairwise(plan.row_offsets), itertools.pairwise(plan.offsets)
    return tuple(Span(*own, *whole) for own, whole in zip(rows, keys, strict=True))


class SdpaAttention:
    name = "sdpa"

    def __init__(self) -> None:
        self._spans: tuple[Span, ...] = ()

    def prepare(self, plan: BatchPlan) -> None:
        self._spans = spans(plan)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        attend_spans(q, k, v, out, self._spans, causal=causal, window=window)
        return out

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        for row, span in enumerate(self._spans):
            start = span.start if window is None else max(span.start, span.stop - window)
            out[row : row + 1] = _attend(q[row : row + 1], k[start : span.stop], v[start : span.stop], causal=False)
        return out


def attend_spans(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, texts: Iterable[Span], *, causal: bool, window: int | None
) -> None:
    """Fill the rows of `out` [rows, heads, head_dim] that belong to `texts`, one text at a time."""
    for text in texts:
        rows, keys = text.end - text.first, text.stop - text.start
        if (window is not None and keys > window) or (causal and rows < keys):
            _masked(q, k, v, out, text, window)
        else:
            part = slice(text.start, text.stop)
            out[text.first : text.end] = _attend(q[text.first : text.end], k[part], v[part], causal=causal)


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


def _masked(q: Tensor, k: Tensor, v: Tensor, out: Tensor, text: Span, window: int | None) -> None:
    """A causal text whose queries do not see all keys before them, or are fewer than its keys."""
    behind = text.stop - text.end  # from a row to its token's key
    for first in range(text.first, text.end, _MASKED_BLOCK):
        end = min(first + _MASKED_BLOCK, text.end)
        begin = text.start if window is None else max(text.start, first + behind - window + 1)
        stop = end + behind
        tokens = torch.arange(first + behind, stop, device=q.device).unsqueeze(1)
        columns = torch.arange(begin, stop, device=q.device).unsqueeze(0)
        mask = columns <= tokens
        if window is not None:
            mask &= columns > tokens - window
        out[first:end] = _attend(q[first:end], k[begin:stop], v[begin:stop], causal=False, mask=mask)
