"""The arithmetic between matrix products, behind one interface: eager, compiled by torch, or our kernels."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from embedq_worker.engine import layers


class LayerOps(Protocol):
    """`residual`, `x` and `qk` may be overwritten; the returned tensors are the results."""

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


def fused_ops(device: torch.device, dtype: torch.dtype) -> tuple[LayerOps, tuple[str, ...]]:
    """The fastest operations that are right on this device, and why faster ones were passed over."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return EagerOps(), ("eager operations: no C++ compiler for torch.compile",)
    passed: tuple[str, ...] = ()
    candidates: list[Callable[[], LayerOps]] = [_triton_ops, CompiledOps] if device.type == "cuda" else [CompiledOps]
    for make in candidates:
        try:
            ops = make()
            _check(ops, device, dtype)
        except Exception as error:
            # Compilers raise errors of their own (a missing header, no Triton); each of them means: not here.
            passed += (f"{make.__name__.strip('_')}: {type(error).__name__}: {str(error).partition(chr(10))[0]}",)
        else:
            return ops, passed
    return EagerOps(), passed


def _triton_ops() -> LayerOps:
    from embedq_worker.engine.gpu.kernels import TritonOps

    return TritonOps()


def _check(ops: LayerOps, device: torch.device, dtype: torch.dtype) -> None:
    """Raises RuntimeError where `ops` does not compute what EagerOps does."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows, heads, dim, eps = 33, 6, 32, 1e-6
    x, residual, weight, gate_up = random(rows, 96), random(rows, 96), random(96), random(rows, 2 * 96)
    qk, gain, angles = random(rows, heads, dim), random(dim), random(rows, dim).float()
    cos, sin = angles.cos()[:, : dim // 2].contiguous(), angles.sin()[:, dim // 2 :].contiguous()

    def results(o: LayerOps) -> dict[str, tuple[Tensor, ...]]:
        return {
            "norm": o.add_rms_norm(None, residual.clone(), weight, eps),
            "add": o.add_rms_norm(x.clone(), residual.clone(), weight, eps),
            "rope": o.rotate_qk(qk.clone(), 4, gain, gain, cos, sin, eps),
            "silu": (o.silu_mul(gate_up),),
        }

    found, wanted = results(ops), results(EagerOps())
    for name, expected in wanted.items():
        for one, other in zip(found[name], expected, strict=True):
            # Values are near one; a wrong index or a missing factor is off by that much.
            if not torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02):
                raise RuntimeError(f"{name} differs from the reference")
