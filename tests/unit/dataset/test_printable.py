"""What a document holds stays on its line and commands no terminal."""

from __future__ import annotations

import pytest

from embedq.dataset.commands import _print_hits
from embedq.dataset.search import Hit
from embedq.printable import printable


def test_all_that_moves_the_cursor_is_written_out_and_all_else_stays() -> None:
    assert printable("\x1b[2J\x9b\x7f\ta\r\n\0\u2028\u202e") == r"\x1b[2J\x9b\x7f\ta\r\n\x00\u2028\u202e"
    # Joiners belong to words and to emoji.
    for text in ("naïve 文", "می\u200cخواهم", "👩\u200d🔬", "\\x1b"):
        assert printable(text) == text


def test_a_hit_takes_one_line_whatever_its_id_and_metadata_hold(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "a\nb", "ordinal": 0, "n_tokens": 1, "truncated": False, "title": "\x1b]0;x\x07", "text": "c\n\x1bd"}
    _print_hits(None, [Hit(score=0.5, row=row)])
    assert capsys.readouterr().out == "   1  0.5000  a\\nb  title=\\x1b]0;x\\x07  c \\x1bd\n"
