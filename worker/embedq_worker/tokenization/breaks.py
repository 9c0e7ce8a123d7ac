"""Where a long text may be cut so that both sides read well."""

from __future__ import annotations

import re
import unicodedata

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_LINE = re.compile(r"\n\s*")
_SENTENCE = re.compile(
    # Full stops of scripts that put a space behind them, then those that do not.
    "[.!?\u2026\u061f\u06d4\u0964\u0965\u1362\u104b][\"'\u2019\u201d\u00bb)\\]]*\\s+"
    "|[\u3002\uff01\uff1f\uff61][\u300d\u300f\u201d\u2019\uff09]*\\s*"
)
_WORD = re.compile(r"\s+")
_ZERO_WIDTH_JOINER = "\u200d"
_MOST_FLAG_LETTERS = 256


def last_break(text: str, low: int, high: int) -> int:
    """Where to end a chunk: a position from `low` to `high`, `low` < `high` <= len(text), all in code points.

    The last end of a paragraph there; else of a line, of a sentence, of a word; else the last place where no character
    a reader sees is cut in two; else `high`.
    """
    for kind in (_PARAGRAPH, _LINE, _SENTENCE, _WORD):
        found = None
        for match in kind.finditer(text, max(0, low - 1), high):
            found = match.end()
        if found is not None and found >= low:
            return found
    return next((at for at in range(high, low - 1, -1) if not _joined(text, at)), high)


def first_break(text: str, low: int, high: int) -> int:
    """Where to begin a chunk that repeats some of the text before it: a position from `low` to `high`.

    The first beginning of a sentence there; else of a word; else the first place where no character is cut in two.
    """
    for kind in (_SENTENCE, _WORD):
        match = kind.search(text, low, high)
        if match is not None:
            return match.end()
    return next((at for at in range(low, high + 1) if not _joined(text, at)), low)


def _joined(text: str, at: int) -> bool:
    """Whether the code points around `at` make one character: combining marks, emoji sequences, flags, line ends."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if before == "\r":
        return after == "\n"
    if before == _ZERO_WIDTH_JOINER or after == _ZERO_WIDTH_JOINER or unicodedata.category(after).startswith("M"):
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff" or "\U000e0020" <= after <= "\U000e007f":
        return True
    return _is_flag_letter(before) and _is_flag_letter(after) and _flag_letters_before(text, at) % 2 == 1


def _is_flag_letter(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _flag_letters_before(text: str, at: int) -> int:
    first = at
    # A text of nothing but flags must not be read from its beginning for each cut; far back, any parity does.
    while first and at - first < _MOST_FLAG_LETTERS and _is_flag_letter(text[first - 1]):
        first -= 1
    return at - first
