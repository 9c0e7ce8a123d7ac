"""`embedq run` ends when its processes end again and again, and not while documents get done in between."""

from __future__ import annotations

import pytest
from embedq_worker.supervisor import ProcessEndedError

from embedq.run import _Patience


def test_restarts_without_progress_end_the_run_and_progress_starts_the_count_anew() -> None:
    patience = _Patience(most=3)
    for restarts in range(4):
        patience.check(settled=10, restarts=restarts)
    patience.check(settled=11, restarts=4)
    for restarts in range(5, 8):
        patience.check(settled=11, restarts=restarts)
    with pytest.raises(ProcessEndedError):
        patience.check(settled=11, restarts=8)
