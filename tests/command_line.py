"""The command line inside the test's own process, where nothing of the machine's settings leaks in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from embedq.cli import main


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command that starts no process: its exit status, standard output and standard error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    capsys.readouterr()
    try:
        with pytest.raises(SystemExit) as end:
            main(list(map(str, arguments)))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


def isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go where nothing is, with no variable of ours: neither embedq.toml nor EMBEDQ_* leak in."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("EMBEDQ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
