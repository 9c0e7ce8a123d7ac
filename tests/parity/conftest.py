"""Threads are set, not inherited: parity runs beside other tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    import torch

    torch.set_num_threads(2)
