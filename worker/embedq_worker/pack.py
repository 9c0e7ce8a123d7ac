"""Packing: which documents share a forward pass.

The cost of a packed batch is its token count, so a plan is good when batches are full. Documents are taken longest
first: neighbours then have similar lengths, which keeps attention's working set even and leaves the short documents
to fill what remains. Where the model computes common beginnings once, and there are some, those that begin alike come
together instead: batches may be less full then, but more texts are done with the same tokens.
Order inside a run carries no meaning (`ordinal` does), so nothing is lost by either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embedq_worker.prefixes import MOST_WHOLE


def longest_first(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """The order of documents by falling `lengths`, equal ones as they come: a permutation, int64 [n]."""
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def plan_batches(
    lengths: NDArray[np.int32], max_batch_tokens: int, common: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Plan batches of at most `max_batch_tokens`.

    Args:
        lengths: int [n], tokens of the documents in the order they are taken, each at least 1. A document above the
            budget gets a batch of its own.
        max_batch_tokens: the budget, in tokens that are computed.
        common: int [n], tokens each document begins with that the one before it begins with, too: computed once in a
            batch that holds both. Whole documents take at most MOST_WHOLE times the budget. None: nothing is shared.

    Returns:
        int64 [batches + 1]: batch i holds documents `bounds[i]` to `bounds[i + 1]`.
    """
    shared = np.zeros(len(lengths), np.int64) if common is None else common
    whole, own = np.cumsum(lengths, dtype=np.int64), np.cumsum(lengths - shared, dtype=np.int64)
    bounds = [0]
    while bounds[-1] < len(lengths):
        start = bounds[-1]
        # The first one of a batch has nobody to share with.
        budget = max_batch_tokens - int(shared[start])
        ends = [
            np.searchsorted(sums, (int(sums[start - 1]) if start else 0) + most, side="right")
            for sums, most in ((own, budget), (whole, MOST_WHOLE * max_batch_tokens))
        ]
        bounds.append(max(int(min(ends)), start + 1))
    return np.asarray(bounds, dtype=np.int64)
