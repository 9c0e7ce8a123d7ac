"""The compiled kernels as the engine's operations and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from embedq_worker.engine.attention.sdpa import Span, attend_spans, spans
from embedq_worker.engine.cpu.kernels import CpuKernels
from embedq_worker.engine.plan import BatchPlan

#: Tokens from which scaled_dot_product_attention is faster on AMX (measured: 2x slower at 100, even near 1,500).
#: Without AMX it is slower at every length (20x at 100, 2x at 4,096).
_LONGEST_ON_AMX = 1024


class CpuOps:
    """In place where the result replaces its input: at these sizes memory traffic is the cost."""

    name = "cpu kernels"

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps), residual

    def rotate_qk(
        self, qk: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._kernels.norm_rotate(qk, heads, q_norm, k_norm, cos, sin, eps)
        return qk[:, :heads], qk[:, heads:]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_mul(gate_up)


class CpuAttention:
    """One call for a packed batch, compiled for this CPU; long texts go to sdpa, which blocks them better."""

    name = "cpu"

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._longest = _LONGEST_ON_AMX if kernels.amx else 1 << 30
        self._cu_rows = self._cu_seqlens = self._one_each = torch.zeros(1, dtype=torch.int32)
        self._long: tuple[Span, ...] = ()

    def prepare(self, plan: BatchPlan) -> None:
        self._cu_rows, self._cu_seqlens = plan.cu_rows, plan.cu_seqlens
        self._one_each = torch.arange(len(plan) + 1, dtype=torch.int32)
        self._long = tuple(span for span in spans(plan) if span.stop - span.start > self._longest)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        out = self._kernels.attention(
            q, k, v, self._cu_rows, self._cu_seqlens, causal=causal, window=window, longest=self._longest
        )
        attend_spans(q, k, v, out, self._long, causal=causal, window=window)
        return out

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return self._kernels.attention(q, k, v, self._one_each, self._cu_seqlens, causal=True, window=window)
