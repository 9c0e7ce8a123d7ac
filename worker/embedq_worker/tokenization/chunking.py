"""Long texts into chunks of at most so many tokens, cut where a reader would cut them.

A chunk is a slice of its text. What counts is how many tokens that slice has when it is tokenized by itself, with
prompt and special tokens, as a worker will; where tokens of the whole text end only tells where to try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from embedq_schemas.chunks import Chunks
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import UsageError
from numpy.typing import NDArray

from embedq_worker.tokenization import TextTokenizer
from embedq_worker.tokenization.breaks import first_break, last_break

_LEAST_ROOM = 8
_NEAR = 0.75
"""A break is near where at least this part of the chunk lies before it."""
_AT_ONCE = 64
"""Chunks of a text planned before the first of them is tokenized."""
_MOST_GROWTH = 3
"""Bytes that normalisation makes of one, at the most."""


class Chunker:
    """Cuts the long texts of one run; a `Splitter` for the reader of its corpus."""

    def __init__(self, tokenizer: TextTokenizer, encoding: EncodingOptions) -> None:
        """For runs with the options `encoding`.

        Raises:
            UsageError: prompt and special tokens leave no room for text, or the overlap is above half of a chunk.
        """
        self._tokenizer = tokenizer
        self._encoding = encoding
        self._limit = encoding.chunk_tokens or encoding.longest(tokenizer.max_length)
        self._overlap = self._limit // 8 if encoding.chunk_overlap is None else encoding.chunk_overlap
        if 2 * self._overlap > self._limit:
            raise UsageError(f"an overlap of {self._overlap} is above half of the {self._limit} tokens of a chunk")
        taken = int(self._lengths([""])[0])
        self._room = self._limit - taken
        if self._room < _LEAST_ROOM:
            raise UsageError(
                f"chunks of {self._limit} tokens have no room for text beside {taken} of prompt and special tokens; "
                f"give at least {taken + _LEAST_ROOM}"
            )

    def __call__(self, texts: pa.StringArray) -> Chunks:
        """Cut `texts` [n]; one that fits is its own only chunk."""
        rows = self._long(texts)
        works = [_Work(text, self._tokenizer.token_ends(text)) for text in texts.take(pa.array(rows)).to_pylist()]
        self._cut(works)
        counts = np.ones(len(texts), dtype=np.int64)
        counts[rows] = [len(work.cuts) for work in works]
        owners = np.repeat(np.arange(len(texts)), counts)
        index = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.zeros(len(owners), dtype=np.int64)
        ends = pc.utf8_length(texts).to_numpy().astype(np.int64)[owners]
        is_cut = np.isin(owners, rows)
        places = np.array([cut for work in works for cut in work.cuts], dtype=np.int64).reshape(-1, 2)
        starts[is_cut], ends[is_cut] = places.T
        slices = pa.array([work.text[start:end] for work in works for start, end in work.cuts], pa.string())
        # Behind each other, then in their order: whole texts are never copied once for each of their chunks.
        order = np.empty(len(owners), dtype=np.int64)
        order[~is_cut] = owners[~is_cut]
        order[is_cut] = len(texts) + np.arange(len(slices))
        refused = {int(row): work.refused for row, work in zip(rows, works, strict=True) if work.refused}
        pieces = pa.concat_arrays([texts, slices]).take(pa.array(order))
        return Chunks(owners, pieces, index.astype(np.int32), starts, ends, refused)

    def _lengths(self, texts: Sequence[str] | pa.StringArray) -> NDArray[np.int32]:
        """Tokens of each text as a document of the run, before truncation: int32 [n]."""
        return self._tokenizer.encode_as(pa.array(texts, pa.string()), self._encoding).n_tokens

    def _long(self, texts: pa.StringArray) -> NDArray[np.int64]:
        """Rows [m] of the texts that do not fit into a chunk."""
        rows = np.arange(len(texts))
        if self._tokenizer.counts_bytes:
            prompt = len(self._encoding.prompt.encode())
            sizes = pc.binary_length(texts).to_numpy().astype(np.int64)
            rows = rows[_MOST_GROWTH * (sizes + prompt) > self._room]
        lengths = self._lengths(texts.take(pa.array(rows)))
        return rows[lengths > self._limit]

    def _cut(self, works: Sequence[_Work]) -> None:
        while open_works := [work for work in works if not work.done]:
            plans = [work.plan(self._room, self._overlap) for work in open_works]
            planned = [
                work.text[start:end] for work, plan in zip(open_works, plans, strict=True) for start, end in plan
            ]
            over = self._lengths(planned) - self._limit
            first = 0
            for work, plan in zip(open_works, plans, strict=True):
                work.take(plan, over[first : first + len(plan)].tolist(), self._room)
                first += len(plan)


@dataclass
class _Work:
    """A long text and the chunks found so far: (start, end) in code points."""

    text: str
    #: int64 [tokens], ascending: code points before the end of each token.
    token_ends: NDArray[np.int64]
    cuts: list[tuple[int, int]] = field(default_factory=list)
    #: Why the text cannot be cut; it has no chunks then.
    refused: str = ""
    #: Tokens to leave off the next chunk, which was too long before.
    _less: int = 0

    @property
    def done(self) -> bool:
        return bool(self.refused) or (bool(self.cuts) and self.cuts[-1][1] == len(self.text))

    def plan(self, room: int, overlap: int) -> list[tuple[int, int]]:
        """The next chunks, if each of them turns out to fit."""
        planned: list[tuple[int, int]] = []
        last = self.cuts[-1] if self.cuts else None
        while len(planned) < _AT_ONCE and (last is None or last[1] < len(self.text)):
            last = self._next(last, max(1, room - (0 if planned else self._less)), overlap)
            planned.append(last)
        return planned

    def _next(self, last: tuple[int, int] | None, room: int, overlap: int) -> tuple[int, int]:
        before = last[1] if last is not None else 0
        start = self._begin(last, overlap) if last is not None else 0
        first, most = self._tokens(start), len(self.token_ends)
        if first + room >= most:
            return start, len(self.text)
        high = int(self.token_ends[first + room - 1])
        if high <= before:
            # Less fits than the chunks would have in common.
            start, high = before, before + 1
        low = int(self.token_ends[first + max(1, int(room * _NEAR)) - 1])
        return start, last_break(self.text, min(max(low, before + 1), high), high)

    def _begin(self, last: tuple[int, int], overlap: int) -> int:
        start, end = last
        reach = self._tokens(end) - overlap
        low = max(start + 1, int(self.token_ends[reach - 1]) if reach > 0 else 0)
        high = int(self.token_ends[min(max(0, reach + overlap // 2), len(self.token_ends) - 1)])
        return first_break(self.text, low, min(max(low, high), end)) if overlap and low < end else end

    def _tokens(self, position: int) -> int:
        """Tokens before a position."""
        return int(np.searchsorted(self.token_ends, position, side="right"))

    def take(self, planned: Sequence[tuple[int, int]], over: Sequence[int], room: int) -> None:
        """Accept chunks up to the first with tokens `over` the limit, which is to be planned anew, shorter."""
        for chunk, more in zip(planned, over, strict=True):
            if more > 0:
                if self._less >= room:
                    self.refused, self.cuts = f"no part of the text at character {chunk[0]} fits into a chunk", []
                self._less += max(more, self._less)
                return
            self.cuts.append(chunk)
            self._less = 0
