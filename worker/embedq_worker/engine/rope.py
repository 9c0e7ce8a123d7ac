"""Rotary position embedding tables (RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embedq_worker.checkpoint import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians a position, for each pair of values."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = rope.theta**exponents
    if rope.kind == "default":
        return 1.0 / periods
    if rope.kind == "linear":
        return 1.0 / periods / rope.factor
    low, high = _correction_range(rope, head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return (1.0 / (rope.factor * periods)) * (1 - extrapolated) + (1.0 / periods) * extrapolated


def _correction_range(rope: Rope, head_dim: int) -> tuple[float, float]:
    """Dimensions between which YaRN moves from extrapolation to interpolation (its equations 17 and 23)."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def rope_table(rope: Rope, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each float32 [length, head_dim / 2], YaRN's attention factor included."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
