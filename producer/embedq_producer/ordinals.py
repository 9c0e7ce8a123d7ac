"""Sets of ordinals as ranges: how a dataset says which documents of the input it holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class OrdinalSet:
    """Ordinals given as inclusive ranges, which may touch and overlap. 16 bytes per disjoint range."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2)
        firsts, lasts = pairs[:, 0], np.maximum.accumulate(pairs[:, 1]) if len(pairs) else pairs[:, 1]
        # A range starts where no earlier one reaches.
        starts = np.ones(len(pairs), dtype=np.bool_)
        starts[1:] = firsts[1:] > lasts[:-1] + 1
        self._firsts = firsts[starts]
        self._lasts = lasts[np.append(np.flatnonzero(starts)[1:] - 1, len(pairs) - 1)] if len(pairs) else lasts

    def __len__(self) -> int:
        return int((self._lasts - self._firsts + 1).sum())

    def __contains__(self, ordinal: int) -> bool:
        return bool(self.contains(np.array([ordinal], dtype=np.int64))[0])

    def contains(self, ordinals: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [n]: which of `ordinals` (int64 [n]) are in the set."""
        if not len(self._firsts):
            return np.zeros(len(ordinals), dtype=np.bool_)
        index = np.searchsorted(self._firsts, ordinals, side="right") - 1
        inside: NDArray[np.bool_] = (index >= 0) & (ordinals <= self._lasts[index])
        return inside


NOTHING_DONE = OrdinalSet()
