"""Documents that come as token ids: they are the model's input as they are, after a check and truncation."""

from __future__ import annotations

import hashlib
import itertools
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedq_worker.tokenization import Tokenized
from embedq_worker.tokenization.assemble import truncate
from embedq_worker.tokenization.columns import TokenColumn, offsets_of


def take_ids(
    lists: pa.ListArray, *, vocab_size: int, max_length: int, truncation_side: Literal["right", "left"] = "right"
) -> Tokenized:
    """Token ids in the place of texts: no prompt and no special token is added.

    Args:
        lists: list<uint32> [n], sliced or not, without nulls.
        vocab_size: ids are below this.
        max_length: tokens per row at most; the others are dropped from the end, or from the beginning.

    Returns:
        As for texts; `errors` names the rows that are empty or hold an id outside the vocabulary.
    """
    column = _column(lists)
    lengths = np.diff(column.offsets)
    errors = {int(row): "the list of token ids is empty" for row in np.flatnonzero(lengths == 0)}
    outside = np.flatnonzero(column.ids >= vocab_size)
    # The first one of each row: `outside` ascends, so later ones of a row find it taken.
    for position, row in zip(outside, np.searchsorted(column.offsets, outside, side="right") - 1, strict=True):
        reason = f"token id {column.ids[position]} is outside the vocabulary of {vocab_size}"
        errors.setdefault(int(row), reason)
    if errors:
        lengths[list(errors)] = 0
        column = _only(column, lengths)
    kept, truncated = truncate(column, max_length, truncation_side)
    return Tokenized(kept.ids, kept.offsets.astype(np.int32), lengths.astype(np.int32), truncated, errors)


def hash_ids(lists: pa.ListArray) -> pa.Array:
    """SHA-256 of each row's ids as little-endian unsigned 32-bit integers: FixedSizeBinary(32) [n]. No nulls."""
    column = _column(lists)
    data = column.ids.astype("<u4", copy=False).view(np.uint8).data
    bounds = itertools.pairwise((column.offsets * 4).tolist())
    digests = [hashlib.sha256(data[start:end]).digest() for start, end in bounds]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(lists), [None, pa.py_buffer(b"".join(digests))])


def _column(lists: pa.ListArray) -> TokenColumn:
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return TokenColumn(offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False))


def _only(column: TokenColumn, lengths: NDArray[np.int64]) -> TokenColumn:
    """`column` with the ids of rows of length 0 left out."""
    kept = np.repeat(lengths > 0, np.diff(column.offsets))
    return TokenColumn(offsets_of(lengths), column.ids[kept])
