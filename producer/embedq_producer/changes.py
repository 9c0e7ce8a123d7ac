"""Saying that a corpus is not the one a run stopped in."""

from __future__ import annotations

from embedq_schemas.errors import InputError

from .position import Position


def check_cut(reached: Position, cut: Position | None, name: str) -> None:
    """Raise InputError unless the reader reached `cut`, where the run stopped, exactly."""
    if cut is not None and reached != cut:
        raise InputError(
            f"The corpus {name} was changed: its first {cut.line} lines or rows ended at {cut.offset} after "
            f"{cut.ordinal} documents when the run stopped, and end at {reached.offset} after {reached.ordinal} now."
        )


def ended_early(name: str, reached: Position, cut: Position | None) -> InputError:
    """For a file that ends before the position where the run stopped."""
    stopped = cut.line if cut is not None else 0
    return InputError(
        f"The corpus {name} was changed: it has {reached.line} lines or rows, and the run stopped after {stopped}."
    )
