"""Long texts into chunks of at most so many tokens, cut where a reader would cut them.

A chunk is a slice of its text. What counts is how many tokens that slice has when it is tokenized by itself, with
prompt and special tokens, as a worker will; where tokens of the whole text end only tells where to try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
            raise UsageError(f"chunk_overlap {self._overlap} is above half of the {self._limit} tokens of a chunk")
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
        places = np.array([cut[:2] for work in works for cut in work.cuts], dtype=np.int64).reshape(-1, 2)
        starts[is_cut], ends[is_cut] = places.T
        slices = pa.array([work.text[cut.start : cut.end] for work in works for cut in work.cuts], pa.string())
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
            pairs = zip(open_works, plans, strict=True)
            slices = [work.text[chunk.start : chunk.end] for work, plan in pairs for chunk in plan]
            sizes = self._lengths(slices) - (self._limit - self._room)
            first = 0
            for work, plan in zip(open_works, plans, strict=True):
                work.take(plan, sizes[first : first + len(plan)].tolist(), self._room)
                first += len(plan)


class _Chunk(NamedTuple):
    start: int  # in code points
    end: int
    tokens: int  # of the whole text that end in it
    given: int  # that it was to have at most


@dataclass
class _Work:
    """A long text and the chunks found so far."""

    text: str
    #: int64 [tokens], ascending: code points before the end of each token.
    token_ends: NDArray[np.int64]
    cuts: list[_Chunk] = field(default_factory=list)
    #: Why the text cannot be cut; it has no chunks then.
    refused: str = ""
    #: Tokens of a slice by itself, over those of the whole text in it, as the last ones were.
    _growth: float = 1.0
    #: What the next chunk may have at most, since more was too much: tokens of the whole text, code points.
    _most_tokens: int | None = None
    _most_characters: int | None = None
    #: Chunks to plan at once.
    _ahead: int = _AT_ONCE

    @property
    def done(self) -> bool:
        return bool(self.refused) or (bool(self.cuts) and self.cuts[-1].end == len(self.text))

    def plan(self, room: int, overlap: int) -> list[_Chunk]:
        """The next chunks, if each of them turns out to fit."""
        planned: list[_Chunk] = []
        last = self.cuts[-1] if self.cuts else None
        while len(planned) < self._ahead and (last is None or last.end < len(self.text)):
            tokens, characters = max(1, int(room / self._growth)), len(self.text)
            if not planned:
                tokens = min(tokens, self._most_tokens or tokens)
                characters = self._most_characters or characters
            last = self._next(last, tokens, characters, overlap)
            planned.append(last)
        return planned

    def _next(self, last: _Chunk | None, tokens: int, characters: int, overlap: int) -> _Chunk:
        before = last.end if last is not None else 0
        start = self._begin(last, overlap) if last is not None else 0
        first, most = self._tokens(start), len(self.token_ends)
        if first + tokens >= most and len(self.text) - start <= characters:
            return self._chunk(start, len(self.text), tokens)
        high = int(self.token_ends[min(first + tokens, most) - 1]) if most else len(self.text)
        high = min(high, start + characters)
        if high <= before:
            # Less fits than the chunks would have in common.
            start, high = before, before + min(characters, max(1, high - start))
        low = int(self.token_ends[min(first + max(1, int(tokens * _NEAR)), most) - 1]) if most else high
        return self._chunk(start, last_break(self.text, start, min(max(low, before + 1), high), high), tokens)

    def _begin(self, last: _Chunk, overlap: int) -> int:
        reach = self._tokens(last.end) - overlap
        low = max(last.start + 1, int(self.token_ends[reach - 1]) if reach > 0 else 0)
        if not overlap or low >= last.end:
            return last.end
        high = int(self.token_ends[min(max(0, reach + overlap // 2), len(self.token_ends) - 1)])
        return first_break(self.text, last.start, low, min(max(low, high), last.end), last.end)

    def _chunk(self, start: int, end: int, given: int) -> _Chunk:
        return _Chunk(start, end, max(1, self._tokens(end) - self._tokens(start)), given)

    def _tokens(self, position: int) -> int:
        """Tokens before a position."""
        return int(np.searchsorted(self.token_ends, position, side="right"))

    def take(self, planned: Sequence[_Chunk], sizes: Sequence[int], room: int) -> None:
        """Accept chunks up to the first that has more tokens by itself than there is room for: it is planned anew."""
        for number, (chunk, size) in enumerate(zip(planned, sizes, strict=True)):
            growth = size / chunk.tokens
            if size <= room:
                self.cuts.append(chunk)
                self._most_tokens = self._most_characters = None
                # It falls slowly: a chunk that turns out too long costs more than one that is not quite full.
                self._growth = max(1.0, growth, 1.0 + 0.9 * (self._growth - 1.0))
                continue
            self._ahead = max(1, number)
            # Several tokens may end in one character, so that a chunk has more of them than it was given.
            given = min(chunk.tokens, chunk.given)
            self._growth = min(float(room), max(size / given, self._growth))
            if given > 1:
                self._most_tokens = given - 1
            elif chunk.end - chunk.start > 1:
                self._most_tokens, self._most_characters = 1, (chunk.end - chunk.start) // 2
            else:
                self.refused, self.cuts = f"the character at {chunk.start} alone does not fit into a chunk", []
            return
        self._ahead = min(_AT_ONCE, 4 * self._ahead)
