"""Tensors in, tensors out: the compiled kernels' signatures, shape checks and pointers in one place."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from embedq_worker.engine.cpu.build import load_kernels

_SIGNATURES: dict[str, list[Any]] = {
    "embedq_attention": [
        c_void_p,
        c_void_p,
        c_long,
        c_void_p,
        c_void_p,
        c_long,
        c_void_p,
        c_long,
        c_void_p,
        c_void_p,
        *[c_int] * 7,
    ],
    "embedq_add_rms_norm": [*[c_void_p] * 5, c_long, c_int, c_float],
    "embedq_norm_rotate": [c_void_p, c_void_p, c_long, *[c_void_p] * 4, c_long, c_int, c_int, c_int, c_float],
    "embedq_silu_mul": [c_void_p, c_void_p, c_void_p, c_long, c_int],
}


class CpuKernels:
    """bfloat16, contiguous last axis. Owns `threads - 1` helper threads; one caller at a time."""

    def __init__(self, library: ctypes.CDLL, threads: int, *, amx: bool) -> None:
        self.amx = amx
        library.embedq_pool_create.argtypes, library.embedq_pool_create.restype = [c_int], c_void_p
        library.embedq_pool_destroy.argtypes, library.embedq_pool_destroy.restype = [c_void_p], None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library
        self._pool = library.embedq_pool_create(threads)

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self._library.embedq_pool_destroy(self._pool)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_rows: Tensor,
        cu_seqlens: Tensor,
        *,
        causal: bool,
        window: int | None,
        longest: int = 1 << 30,
    ) -> Tensor:
        """q [rows, heads, dim], k and v [tokens, kv_heads, dim] with one token stride, offsets of both int32 [n + 1].

        A text's rows are those of its last tokens. Rows of texts longer than `longest` tokens are left unset.
        """
        rows, heads, dim = q.shape
        out = torch.empty((rows, heads, dim), dtype=q.dtype)
        if k.stride(0) != v.stride(0) or k.stride(1) != dim or v.stride(1) != dim or q.stride(1) != dim:
            raise ValueError("attention expects heads side by side, and keys and values with one stride")
        self._library.embedq_attention(
            self._pool, q.data_ptr(), q.stride(0), k.data_ptr(), v.data_ptr(), k.stride(0), out.data_ptr(), heads * dim,
            cu_rows.data_ptr(), cu_seqlens.data_ptr(), len(cu_seqlens) - 1, heads, k.shape[1], dim, causal, window or 0,
            longest,
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns rms_norm(residual) * weight, [tokens, n]."""
        out = torch.empty_like(residual)
        pointer = None if x is None else x.data_ptr()
        self._library.embedq_add_rms_norm(
            self._pool, pointer, residual.data_ptr(), weight.data_ptr(), out.data_ptr(), *residual.shape, eps
        )
        return out

    def norm_rotate(
        self,
        x: Tensor,
        heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        eps: float,
    ) -> None:
        """In place on x [tokens, heads + key heads, dim]; cos and sin float32 [tokens, dim / 2], contiguous."""
        tokens, count, dim = x.shape
        q_pointer = None if q_weight is None else q_weight.data_ptr()
        k_pointer = None if k_weight is None else k_weight.data_ptr()
        self._library.embedq_norm_rotate(
            self._pool, x.data_ptr(), x.stride(0), q_pointer, k_pointer, cos.data_ptr(), sin.data_ptr(),
            tokens, heads, count - heads, dim, eps,
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 n] -> [tokens, n]."""
        tokens, width = gate_up.shape
        out = torch.empty((tokens, width // 2), dtype=gate_up.dtype)
        self._library.embedq_silu_mul(self._pool, gate_up.data_ptr(), out.data_ptr(), tokens, width // 2)
        return out


def cpu_kernels(
    *, hidden_size: int, intermediate_size: int, head_dim: int, threads: int
) -> tuple[CpuKernels | None, str]:
    """The kernels where they serve this shape, else None; and the reason either way."""
    if hidden_size % 32 or intermediate_size % 16 or head_dim % 32 or head_dim > 256:
        return None, "the CPU kernels serve sizes in multiples of 32 and heads of at most 256 values"
    kernels = load_kernels()
    if kernels.loaded is None:
        return None, kernels.reason
    return CpuKernels(kernels.loaded, threads, amx=kernels.amx), kernels.reason
