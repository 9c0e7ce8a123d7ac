"""Checkpoints that the command line's tests share. Small: what is tested is around the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import isolate
from embedq_worker.engine.generate import generate_checkpoint

PROMPTS = {"query": "Instruct: find it\nQuery:", "passage": ""}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint of dimension 32 that takes 48 tokens."""
    folder = tmp_path_factory.mktemp("checkpoints") / "small"
    return generate_checkpoint(folder, hidden_size=32, layers=2, max_length=48, prompts=PROMPTS)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    folder = tmp_path_factory.mktemp("checkpoints") / "other"
    return generate_checkpoint(folder, hidden_size=32, layers=2, max_length=48, seed=1)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)
