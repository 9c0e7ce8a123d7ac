"""Threads are set, not inherited: parity runs beside other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _threads() -> Iterator[None]:
    import torch

    torch.set_num_threads(2)
    yield
