"""The arithmetic between matrix products, as Triton kernels: each reads and writes its tensors once.

They round where the eager functions in `layers` do (statistics and rotation in float32, results in the tensor's type),
so that both give the same bits but for the order of a sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Heads and columns one program handles: small enough to fill the device, large enough for 16-byte loads.
_HEADS = 8
_COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, normed, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    total = tl.load(residual + at, mask=inside, other=0.0)
    if ADD:
        added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + added).to(total.dtype)
        tl.store(residual + at, total, mask=inside)
    values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    scaled = (values * scale).to(total.dtype).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (gain * scaled).to(total.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rotate(  # type: ignore[no-untyped-def]
    qk, q_norm, k_norm, cos, sin, stride, q_heads, heads, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < heads) & (column < HALF)
    at = qk + token * stride + head * (2 * HALF) + column
    stored = tl.load(at, mask=inside, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        is_query = inside & (head < q_heads)
        is_key = inside & (head >= q_heads)
        first = (first * scale).to(stored.dtype).to(tl.float32)
        second = (second * scale).to(stored.dtype).to(tl.float32)
        # A masked load of each, added: a head is a query or a key.
        first *= (
            tl.load(q_norm + column, mask=is_query, other=0.0) + tl.load(k_norm + column, mask=is_key, other=0.0)
        ).to(tl.float32)
        second *= (
            tl.load(q_norm + HALF + column, mask=is_query, other=0.0)
            + tl.load(k_norm + HALF + column, mask=is_key, other=0.0)
        ).to(tl.float32)
        first = first.to(stored.dtype).to(tl.float32)
        second = second.to(stored.dtype).to(tl.float32)
    angle = token * HALF + column
    c = tl.load(cos + angle, mask=column < HALF, other=0.0)
    s = tl.load(sin + angle, mask=column < HALF, other=0.0)
    tl.store(at, (first * c - second * s).to(stored.dtype), mask=inside)
    tl.store(at + HALF, (second * c + first * s).to(stored.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(gate_up, out, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = gate_up + row * (2 * inner) + column
    stored = tl.load(at, mask=inside, other=0.0)
    gate = stored.to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(stored.dtype).to(tl.float32)
    tl.store(out + row * inner + column, (activated * up).to(stored.dtype), mask=inside)


class TritonOps:
    """In place where the result replaces its input. Tensors must lie on the current CUDA device."""

    name = "triton"

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, width = residual.shape
        normed = torch.empty_like(residual)
        block = triton.next_power_of_2(width)
        _launch(
            _add_rms_norm, (rows,), residual if x is None else x, residual, weight, normed, width, eps,
            ADD=x is not None, BLOCK=block, num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
        return normed, residual

    def rotate_qk(
        self, qk: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        tokens, total, dim = qk.shape
        weight = q_norm if q_norm is not None else k_norm
        half = dim // 2
        # One of the two weights may be missing because there are no such heads; neither: no norm.
        _launch(
            _norm_rotate, (tokens, triton.cdiv(total, _HEADS)),
            qk, weight if q_norm is None else q_norm, weight if k_norm is None else k_norm,
            cos, sin, qk.stride(0), heads, total, eps,
            NORM=weight is not None, HALF=half, COLUMNS=triton.next_power_of_2(half), HEADS=_HEADS, num_warps=4,
        )  # fmt: skip
        return qk[:, :heads], qk[:, heads:]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, inner)
        _launch(_silu_mul, (rows, triton.cdiv(inner, _COLUMNS)), gate_up, out, inner, BLOCK=_COLUMNS, num_warps=4)
        return out


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    # No rows, no launch: a grid of zero is an error.
    if all(grid):
        kernel[grid](*arguments, **options)
