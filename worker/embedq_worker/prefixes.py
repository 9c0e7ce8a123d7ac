"""Texts that begin with the same tokens: an instruction before every question, a licence before every file.

Under a causal mask a token's hidden states depend on itself and the tokens before it, so where two texts begin alike,
what they have in common needs to be computed once. Sorted by their token ids, each text has its longest common
beginning with the one before it or the one behind it, so neighbours are all that need comparing.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_WHOLE = 4
"""Tokens of a batch's whole texts, as a multiple of those that are computed: keys and values are gathered for all."""


def prefix_order(ids: NDArray[np.uint32], offsets: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The order of the texts by their token ids: a permutation, int64 [n].

    Args:
        ids: the texts' token ids, one text behind the other, uint32 [total_tokens].
        offsets: where each begins, integers [n + 1].
    """
    # Big-endian, so that the bytes compare as the ids do.
    raw = ids.astype(">u4").tobytes()
    texts = [raw[start:end] for start, end in itertools.pairwise((4 * offsets.astype(np.int64)).tolist())]
    return np.array(sorted(range(len(texts)), key=texts.__getitem__), dtype=np.int64)


def common_prefixes(
    ids: NDArray[np.uint32], offsets: NDArray[np.integer[Any]], order: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many tokens each text in `order` begins with that the one before it begins with, too: int64 [n].

    At most all but its last token, so that every text has one of its own; 0 for the first.
    """
    common = np.zeros(len(order), dtype=np.int64)
    if len(order) < 2:
        return common
    starts, lengths = offsets[:-1].astype(np.int64)[order], np.diff(offsets).astype(np.int64)[order]
    most = np.minimum(lengths[:-1], lengths[1:] - 1)
    most[ids[starts[:-1]] != ids[starts[1:]]] = 0
    # Pairs that are equal so far, compared over the next `width` tokens: most differ soon.
    pairs, at, width = np.flatnonzero(most), 0, 16
    while len(pairs):
        places = at + np.arange(width)
        inside = places < most[pairs, None]
        one, other = (np.where(inside, first[pairs, None] + places, 0) for first in (starts[:-1], starts[1:]))
        same = inside & (ids[one] == ids[other])
        equal = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common[pairs + 1] += equal
        pairs, at, width = pairs[equal == width], at + width, 2 * width
    return common
