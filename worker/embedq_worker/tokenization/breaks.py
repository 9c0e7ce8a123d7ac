"""Where a long text may be cut so that both sides read well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import regex  # type: ignore[import-untyped]

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_LINE = re.compile(r"\n\s*")
_SENTENCE = re.compile(
    # Full stops of scripts that put a space behind them, then those that do not.
    "[.!?\u2026\u061f\u06d4\u0964\u0965\u1362\u104b][\"'\u2019\u201d\u00bb)\\]]*\\s+"
    "|[\u3002\uff01\uff1f\uff61][\u300d\u300f\u201d\u2019\uff09]*\\s*"
)
_WORD = re.compile(r"\s+")
_GRAPHEME = regex.compile(r"\X")
_TRIES = 8
"""Breaks of a kind to look at: spaces that carry accents are none, and a text may consist of them."""


def last_break(text: str, origin: int, low: int, high: int) -> int:
    """Where to end a chunk: a position from `low` to `high`, `low` <= `high` <= len(text), all in code points.

    The last end of a paragraph there; else of a line, of a sentence, of a word; else the last place where no character
    that a reader sees is cut in two; else `high`. `origin` is such a place before `low`.
    """
    for kind in (_PARAGRAPH, _LINE, _SENTENCE, _WORD):
        for match in reversed(list(kind.finditer(text, max(origin, low - 1), high))[-_TRIES:]):
            if (found := _whole_before(text, origin, max(low, match.start() + 1), match.end())) is not None:
                return found
    found = _whole_before(text, origin, low, high)
    return high if found is None else found


def first_break(text: str, origin: int, low: int, high: int, end: int) -> int:
    """Where to begin a chunk that repeats some of the text before `end`, `low` <= `high` <= `end`, all in code points.

    The first beginning of a sentence from `low` to `high`; else of a word from `low` to `end`; else the first place
    from `low` on where no character that a reader sees is cut in two. `origin` is such a place before `low`.
    """
    for kind, limit in ((_SENTENCE, high), (_WORD, end)):
        for match in islice(kind.finditer(text, max(origin, low - 1), limit), _TRIES):
            if (found := _whole_before(text, origin, max(low, match.start() + 1), match.end())) is not None:
                return found
    return min(end, next(at for at in _graphemes(text, origin, low) if at >= low))


def _whole_before(text: str, origin: int, low: int, high: int) -> int | None:
    """The last place from `low` to `high` between two characters as a reader sees them; None if there is none."""
    found = None
    for at in _graphemes(text, origin, low):
        if at > high:
            break
        if at >= low:
            found = at
    return found


def _graphemes(text: str, origin: int, at: int) -> Iterator[int]:
    """Ends of characters as a reader sees them, from one at or before `at` on; `origin` is a place between two."""
    start = at
    # Between two ASCII letters or digits is such a place, so that most texts need not be read from their origin.
    while start > origin and not (_is_plain(text[start - 1]) and start < len(text) and _is_plain(text[start])):
        start -= 1
    yield start
    for match in _GRAPHEME.finditer(text, start):
        yield match.end()


def _is_plain(character: str) -> bool:
    return character.isascii() and character.isalnum()
