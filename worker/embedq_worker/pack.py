"""Packing: which documents share a forward pass.

The cost of a packed batch is its token count, so a plan is good when batches are full. Documents are taken longest
first: neighbours then have similar lengths, which keeps attention's working set even and leaves the short documents
to fill what remains. Order inside a run carries no meaning (`ordinal` does), so nothing is lost by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def plan_batches(lengths: NDArray[np.int32], max_batch_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Plan batches of at most `max_batch_tokens`.

    Args:
        lengths: int [n], tokens per document, each at least 1. A document above the budget gets a batch of its own.
        max_batch_tokens: the budget in tokens.

    Returns:
        `order` int64 [n], a permutation of the documents, longest first; and `bounds` int64 [batches + 1], such that
        batch i holds documents `order[bounds[i]:bounds[i + 1]]`.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    ends = np.cumsum(lengths[order], dtype=np.int64)
    bounds = [0]
    while bounds[-1] < len(order):
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, before + max_batch_tokens, side="right"))
        bounds.append(max(end, start + 1))
    return order, np.asarray(bounds, dtype=np.int64)
