"""Truncation and special tokens: from the bare token ids of whole texts to what the model is fed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embedq_worker.tokenization.columns import TokenColumn, offsets_of


@dataclass(frozen=True)
class Specials:
    """What the tokenizer's post-processor puts around a text: `[CLS]`/`[SEP]`, or nothing and `<|endoftext|>`."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.prefix) + len(self.suffix)


def truncate(
    tokens: TokenColumn, max_tokens: int, side: Literal["right", "left"]
) -> tuple[TokenColumn, NDArray[np.bool_]]:
    """Keep at most `max_tokens` ids of every row: its first ones, or its last ones where `side` is "left".

    Returns the shorter column and bool [n]: which rows lost ids. Where none did, the column comes back uncopied.
    """
    lengths = np.diff(tokens.offsets)
    truncated = lengths > max_tokens
    if not truncated.any():
        return tokens, truncated
    starts, ends = tokens.offsets[:-1][truncated], tokens.offsets[1:][truncated]
    first, last = (starts + max_tokens, ends) if side == "right" else (starts, ends - max_tokens)
    edges = np.zeros(len(tokens.ids) + 1, dtype=np.int8)
    # Neighbouring dropped ranges may meet (one ends where the next begins), so edges add up rather than overwrite.
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    kept = np.cumsum(edges[:-1], dtype=np.int8) == 0
    return TokenColumn(offsets_of(np.minimum(lengths, max_tokens)), tokens.ids[kept]), truncated


def add_specials(tokens: TokenColumn, specials: Specials, failed: NDArray[np.bool_] | None = None) -> TokenColumn:
    """Put the special tokens around every row except the `failed` ones (bool [n]), which stay empty."""
    if specials.count == 0:
        return tokens
    added = np.full(len(tokens), specials.count, dtype=np.int64)
    if failed is not None:
        added[failed] = 0
    offsets = tokens.offsets + offsets_of(added)
    ids = np.empty(offsets[-1], dtype=np.uint32)
    is_text = np.ones(len(ids), dtype=np.bool_)
    wrapped = slice(None) if failed is None else ~failed
    for position, token in enumerate(specials.prefix):
        at = offsets[:-1][wrapped] + position
        ids[at] = token
        is_text[at] = False
    for position, token in enumerate(reversed(specials.suffix), start=1):
        at = offsets[1:][wrapped] - position
        ids[at] = token
        is_text[at] = False
    ids[is_text] = tokens.ids
    return TokenColumn(offsets, ids)
