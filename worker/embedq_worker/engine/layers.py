"""The pieces of a Qwen decoder layer, as functions over packed tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, the statistics in float32 (arXiv 1910.07467)."""
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return weight * values.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the residual travels on, so that both are one pass over memory."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x [tokens, heads, head_dim], cos and sin float32 [tokens, head_dim / 2]; float32 inside."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def norm_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Per-head RMSNorm (Qwen3; weight None for Qwen2), then rope. x [tokens, heads, head_dim]."""
    return rotate(x if weight is None else rms_norm(x, weight, eps), cos, sin)


def rotate_qk(
    qk: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """norm_rotate of the first `heads` heads (queries) and of the rest (keys)."""
    return norm_rotate(qk[:, :heads], q_norm, cos, sin, eps), norm_rotate(qk[:, heads:], k_norm, cos, sin, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2 * inner] -> silu(gate) * up, [tokens, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
