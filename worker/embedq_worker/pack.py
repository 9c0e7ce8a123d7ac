"""Packing: which documents share a forward pass.

The cost of a packed batch is its token count, so a plan is good when batches are full. Documents are taken longest
first: neighbours then have similar lengths, which keeps attention's working set even and leaves the short documents
to fill what remains. Where the model computes common beginnings once, those that begin alike come together instead.
Order inside a run carries no meaning (`ordinal` does), so nothing is lost by either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def longest_first(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """The order of documents by falling `lengths`, equal ones as they come: a permutation, int64 [n]."""
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def plan_batches(lengths: NDArray[np.int32], max_batch_tokens: int) -> NDArray[np.int64]:
    """Plan batches of at most `max_batch_tokens`.

    Args:
        lengths: int [n], tokens of the documents in the order they are taken, each at least 1. A document above the
            budget gets a batch of its own.
        max_batch_tokens: the budget in tokens.

    Returns:
        int64 [batches + 1]: batch i holds documents `bounds[i]` to `bounds[i + 1]`.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    bounds = [0]
    while bounds[-1] < len(lengths):
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, before + max_batch_tokens, side="right"))
        bounds.append(max(end, start + 1))
    return np.asarray(bounds, dtype=np.int64)
