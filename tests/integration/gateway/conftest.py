"""One stack for all tests that only use it; those that kill parts of one start their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from embedq_worker.engine.generate import generate_checkpoint
from stack import Stack

PROMPTS = {"query": "Instruct: find it\nQuery:", "passage": ""}


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint of dimension 32 that takes 64 tokens."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-embedding"
    return generate_checkpoint(folder, hidden_size=32, layers=2, max_length=64, prompts=PROMPTS)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, served_model: Path) -> Iterator[Stack]:
    """A stack without API keys."""
    folder = tmp_path_factory.mktemp("gateway")
    with Stack(folder, served_model, "--model-alias", "text-embedding-3-small") as running:
        yield running


@pytest.fixture
def start_stack(tmp_path: Path, served_model: Path) -> Iterator[Callable[..., Stack]]:
    """Start stacks of the test's own: `start_stack("--max-in-flight", 4)`. Stopped afterwards."""
    with ExitStack() as cleanup:

        def start(*options: object, worker: bool = True) -> Stack:
            return cleanup.enter_context(Stack(tmp_path, served_model, *options, worker=worker))

        yield start
