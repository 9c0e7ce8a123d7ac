"""The arithmetic between matrix products, behind one interface: eager, compiled by torch, or the CPU kernels."""

from __future__ import annotations

import shutil
from typing import Protocol

import torch
from torch import Tensor

from embedq_worker.engine import layers


class LayerOps(Protocol):
    """`residual` and `x` may be overwritten; the returned tensors are the results."""

    name: str

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(residual + x), residual + x); x None adds nothing."""

    def rotate_qk(
        self, qk: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Per-head RMSNorm (weights None: none), then rope; qk [tokens, heads + key heads, head_dim] -> (q, k)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 n] -> [tokens, n]."""


class EagerOps:
    name = "eager"

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x is None:
            return layers.rms_norm(residual, weight, eps), residual
        return layers.add_rms_norm(x, residual, weight, eps)

    def rotate_qk(
        self, qk: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return layers.rotate_qk(qk, heads, q_norm, k_norm, cos, sin, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return layers.silu_mul(gate_up)


class CompiledOps(EagerOps):
    """torch.compile over the same functions, one graph for every batch size."""

    name = "torch.compile"

    def __init__(self) -> None:
        # Row counts differ from batch to batch: without dynamic shapes each would compile anew.
        self._add = torch.compile(layers.add_rms_norm, dynamic=True)
        self._rotate = torch.compile(layers.rotate_qk, dynamic=True)
        self._silu = torch.compile(layers.silu_mul, dynamic=True)

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return super().add_rms_norm(x, residual, weight, eps) if x is None else self._add(x, residual, weight, eps)

    def rotate_qk(
        self, qk: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._rotate(qk, heads, q_norm, k_norm, cos, sin, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._silu(gate_up)


def compiled_ops(device: torch.device, dtype: torch.dtype) -> tuple[LayerOps, str]:
    """CompiledOps where torch.compile works on this machine, else EagerOps; and why."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return EagerOps(), "eager: no C++ compiler for torch.compile"
    ops = CompiledOps()
    try:
        probe = torch.zeros(32, 64, dtype=dtype, device=device)
        ops.silu_mul(probe)
        ops.add_rms_norm(probe, probe, probe[0], 1e-6)
        half = torch.zeros(32, 8, device=device)
        ops.rotate_qk(probe.view(32, 4, 16), 3, probe[0, :16], probe[0, :16], half, half, 1e-6)
    except Exception as error:
        # torch.compile raises its back end's own errors (a missing header, no Triton); all of them mean eager.
        return EagerOps(), f"eager: torch.compile failed ({type(error).__name__})"
    return ops, "torch.compile"
