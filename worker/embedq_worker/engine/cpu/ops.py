"""The compiled kernels as the engine's operations and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from embedq_worker.engine.cpu.kernels import CpuKernels
from embedq_worker.engine.plan import BatchPlan


class CpuOps:
    """In place where the result replaces its input: at these sizes memory traffic is the cost."""

    name = "cpu kernels"

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps), residual

    def norm_rotate(self, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        self._kernels.norm_rotate(x, weight, cos, sin, eps)
        return x

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_mul(gate_up)


class AmxAttention:
    """One call for the whole packed batch, products on AMX tiles."""

    name = "amx"

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._cu_seqlens = torch.zeros(1, dtype=torch.int32)

    def prepare(self, plan: BatchPlan) -> None:
        self._cu_seqlens = plan.cu_seqlens

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        return self._kernels.attention(q, k, v, self._cu_seqlens, causal=causal, window=window, last=False)

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return self._kernels.attention(q, k, v, self._cu_seqlens, causal=True, window=window, last=True)
