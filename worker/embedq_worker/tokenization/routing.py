"""Which texts the fast path must not see, decided over the bytes of a whole column at once.

Two kinds go to the reference: texts with a character that Unicode tables of different versions treat differently, and
texts that contain an added token (`<|im_end|>`), whose matching rules (stripping, whole words, escaping) are the
reference's own. Both tests may name a text too many, never one too few.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from embedq_worker.tokenization.columns import TextColumn
from embedq_worker.tokenization.stable_codepoints import stable_codepoints


class Router:
    """Byte tables built once for one tokenizer's added tokens."""

    def __init__(self, added_tokens: Iterable[str]) -> None:
        self._stable = stable_codepoints()
        self._suspect_pairs = _suspect_pairs(self._stable)
        suspects = np.flatnonzero(self._suspect_pairs.reshape(256, 256).any(axis=0))
        self._lowest_suspect_lead = int(suspects[0])
        self._tokens = [np.frombuffer(token.encode(), dtype=np.uint8) for token in added_tokens if token]
        self._first_bytes = sorted({int(token[0]) for token in self._tokens})

    def unsafe(self, texts: TextColumn) -> NDArray[np.bool_]:
        """bool [n]: True where the text must be tokenized by the reference."""
        at = np.concatenate([self._unstable_positions(texts.data), self._added_token_positions(texts.data)])
        unsafe = np.zeros(len(texts), dtype=np.bool_)
        if len(at):
            # "right" steps over empty rows, which share their offset with the row that owns the byte.
            unsafe[np.searchsorted(texts.offsets, at, side="right") - 1] = True
        return unsafe

    def _unstable_positions(self, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        # Most text ends here or one line further; the tables are only consulted at bytes that start a character.
        if not len(data) or data.max() < self._lowest_suspect_lead:
            return np.empty(0, dtype=np.int64)
        leads = np.flatnonzero(data[:-1] >= self._lowest_suspect_lead)
        pairs = data[leads + 1].astype(np.uint16)
        pairs <<= 8
        pairs |= data[leads]
        suspects = leads[self._suspect_pairs.take(pairs)]
        if not len(suspects):
            return suspects
        return suspects[~self._stable[_decode(data, suspects)]]

    def _added_token_positions(self, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        found = [np.empty(0, dtype=np.int64)]
        for first in self._first_bytes:
            starts = np.flatnonzero(data == first)
            if not len(starts):
                continue
            found.extend(_occurrences(data, token, starts) for token in self._tokens if token[0] == first)
        return np.concatenate(found)


def _suspect_pairs(stable: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool [65536], indexed by `lead | second << 8`: may a character whose UTF-8 starts with these bytes be unstable?

    For two-byte characters the pair is the character; for three-byte ones it names 64 neighbours; longer ones always
    need the closer look.
    """
    pairs = np.zeros((256, 256), dtype=np.bool_)
    pages: NDArray[np.bool_] = np.logical_not(stable.reshape(-1, 64).all(axis=1))
    for second in range(0x80, 0xC0):
        low = second & 0x3F
        for lead in range(0xC2, 0xE0):
            pairs[second, lead] = not stable[(lead & 0x1F) << 6 | low]
        for lead in range(0xE0, 0xF0):
            pairs[second, lead] = pages[(lead & 0x0F) << 6 | low]
        pairs[second, 0xF0:0xF5] = True
    return pairs.reshape(-1)


def _decode(data: NDArray[np.uint8], leads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Code points of the characters that start at `leads` (valid UTF-8, two bytes or more)."""
    lead = data[leads].astype(np.int64)
    width = 2 + (lead >= 0xE0) + (lead >= 0xF0)
    code = lead & (0x7F >> width)
    for index in (1, 2, 3):
        more = width > index
        code[more] = code[more] << 6 | (data[leads[more] + index] & 0x3F)
    return code


def _occurrences(data: NDArray[np.uint8], token: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of `starts` at which all of `token` stands; a match across two rows counts, at little cost."""
    starts = starts[starts <= len(data) - len(token)]
    # The last byte first: where added tokens share a beginning (`<|`), their ends tell more.
    for index in (len(token) - 1, *range(1, len(token) - 1)):
        if not len(starts):
            break
        starts = starts[data[starts + index] == token[index]]
    return starts
