"""Which ids a run has already seen, in 8 bytes per document.

An id is represented by a 64-bit hash. Two different ids collide with probability 2**-64, so among n ids some pair does
with at most n**2 / 2**65: 3e-8 for a million ids, 3e-4 for a hundred million, 3% for a billion. The price of a
collision is that the later document is reported as a duplicate though it is none; nothing is lost silently.
"""

from __future__ import annotations

from hashlib import blake2b, shake_128

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_SHORT_BYTES = 64
# Bounds the padded copy of the ids, whatever the block: 8 bytes of index for each byte of it.
_ROWS_AT_ONCE = 4096
_WORDS = _SHORT_BYTES // 4
# Fixed keys, not per-process ones: a run that is resumed elsewhere must take the same decision for the same id.
_KEY = b"embedq id set 1"
_MULTIPLIERS: NDArray[np.uint64] = (
    np.frombuffer(shake_128(_KEY).digest(2 * (_WORDS + 2) * 8), dtype="<u8").astype(np.uint64).reshape(2, _WORDS + 2)
)


def hash_ids(ids: pa.StringArray) -> NDArray[np.uint64]:
    """64-bit hashes [n] of n non-null ids [n]; the same on every machine and in every process.

    Ids of up to 64 bytes, that is nearly all, take two independent 32-bit multilinear hashes (Lemire and Kaser,
    "Strongly universal string hashing is fast", 2014) over their zero-padded little-endian words and their length,
    vectorised over the block. Longer ones take keyed BLAKE2b.
    """
    count = len(ids)
    if count > _ROWS_AT_ONCE:
        parts = [hash_ids(ids.slice(first, _ROWS_AT_ONCE)) for first in range(0, count, _ROWS_AT_ONCE)]
        return np.concatenate(parts)
    _, offsets_buffer, data_buffer = ids.buffers()
    if count == 0 or data_buffer is None or data_buffer.size == 0:
        return np.full(count, _combine(_MULTIPLIERS[:, 0]), dtype=np.uint64)
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[ids.offset : ids.offset + count + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, dtype=np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    long = np.flatnonzero(lengths > _SHORT_BYTES)
    short_lengths = np.minimum(lengths, _SHORT_BYTES)

    width = max(4, -(-int(short_lengths.max()) // 4) * 4)
    columns = np.arange(width)
    padded = data[np.minimum(starts[:, None] + columns, data.size - 1)]
    padded[columns >= short_lengths[:, None]] = 0
    words = padded.view("<u4").astype(np.uint64)
    hashes = _combine(
        _MULTIPLIERS[:, :1]
        + _MULTIPLIERS[:, 1:2] * lengths.astype(np.uint64)
        + np.stack([words @ multipliers[2 : 2 + words.shape[1]] for multipliers in _MULTIPLIERS])
    )
    for row in long:
        digest = blake2b(data[offsets[row] : offsets[row + 1]].tobytes(), digest_size=8, key=_KEY).digest()
        hashes[row] = int.from_bytes(digest, "little")
    return hashes


def _combine(sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Only the high half of a multilinear sum is universal; its low bits depend on too little of the input.
    high, low = sums
    result: NDArray[np.uint64] = (high & np.uint64(0xFFFFFFFF00000000)) | (low >> np.uint64(32))
    return result


class IdSet:
    """A growing set of 64-bit hashes: 8 bytes each, 16 while the largest two parts merge.

    Sorted arrays, each at least twice as long as the next, so that a lookup is a handful of binary searches and an
    insertion costs O(log n) amortised moves.
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint64]] = []

    def __len__(self) -> int:
        return sum(part.size for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes held between calls."""
        return sum(part.nbytes for part in self._parts)

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Insert hashes [n]; returns [n], true where the hash was new, false where the set or an earlier row had it."""
        order = np.argsort(hashes, kind="stable")
        ascending = hashes[order]
        seen = np.zeros(ascending.size, dtype=np.bool_)
        seen[1:] = ascending[1:] == ascending[:-1]
        for part in self._parts:
            at = np.searchsorted(part, ascending)
            seen |= part[np.minimum(at, part.size - 1)] == ascending
        fresh = np.empty(ascending.size, dtype=np.bool_)
        fresh[order] = ~seen
        self._insert(ascending[~seen])
        return fresh

    def _insert(self, part: NDArray[np.uint64]) -> None:
        if part.size == 0:
            return
        while self._parts and self._parts[-1].size < 2 * part.size:
            part = np.concatenate((self._parts.pop(), part))
            # The stable sort finds the two ascending runs and merges them: twice as fast as sorting afresh.
            part.sort(kind="stable")
        self._parts.append(part)
