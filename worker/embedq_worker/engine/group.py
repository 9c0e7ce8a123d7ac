"""The ranks one model is split over, as the layers see them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

#: A rank that computes nothing for this long while the others wait is taken for hung.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class Group(Protocol):
    """`rank` of `size`; sums are exact copies on every rank."""

    rank: int
    size: int

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place where there is anything to sum."""

    def abort(self) -> None:
        """End pending collectives with an error. May be called from another thread, and twice."""


class Solo:
    """One rank: nothing to sum."""

    rank = 0
    size = 1

    def all_reduce(self, value: Tensor) -> Tensor:
        return value

    def abort(self) -> None:
        pass


class Ranks:
    """A process group of its own, not torch's global one: two engines in one process do not meet.

    gloo on CPUs, NCCL on GPUs. `store` is a TCPStore all ranks reach.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        import torch.distributed as distributed

        dist: Any = distributed  # several of these classes are missing from its stubs

        self.rank, self.size = rank, size
        self._sum: Any = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp.SUM
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = COLLECTIVE_TIMEOUT
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            gloo._timeout = COLLECTIVE_TIMEOUT
            self._group = dist.ProcessGroupGloo(store, rank, size, gloo)

    def all_reduce(self, value: Tensor) -> Tensor:
        self._group.allreduce([value], self._sum).wait()
        return value

    def abort(self) -> None:
        if hasattr(self._group, "abort"):
            self._group.abort()
