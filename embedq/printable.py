"""What documents hold, on a line of a terminal."""

from __future__ import annotations

# Control characters, which move the cursor or command the terminal, line ends, and what turns the direction of writing.
_HIDDEN = (*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_WRITTEN = {code: chr(code).encode("unicode_escape").decode() for code in _HIDDEN}


def printable(text: str) -> str:
    """`text` with line breaks, tabs and all that commands a terminal written as in a Python string."""
    return text.translate(_WRITTEN)
