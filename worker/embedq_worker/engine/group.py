"""The ranks one model is split over, as the layers see them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """`rank` of `size`; sums are exact copies on every rank."""

    rank: int
    size: int

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place where the backend can."""


class Solo:
    """One rank: nothing to sum."""

    rank = 0
    size = 1

    def all_reduce(self, value: Tensor) -> Tensor:
        return value
