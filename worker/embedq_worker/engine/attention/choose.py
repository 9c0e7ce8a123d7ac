"""Which attention backend runs here: each is built, run once, and compared with a float32 reference."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from embedq_schemas.errors import ModelError

from embedq_worker.engine.attention.base import Attention
from embedq_worker.engine.attention.sdpa import SdpaAttention
from embedq_worker.engine.attention.varlen import FlashAttention, FlashInferAttention, TorchVarlenAttention
from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.plan import plan_batch

#: Of half-precision attention over unit-variance values; a wrong mask or scale is off by a hundred times more.
_TOLERANCE = 0.03


@dataclass(frozen=True)
class HeadShape:
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    windows: tuple[int | None, ...] = ()


def candidates(device: torch.device, dtype: torch.dtype) -> Mapping[str, Callable[[], Attention]]:
    """Backends by name. A factory raises where its package is missing."""
    gpu: dict[str, Callable[[], Attention]] = {
        "flash_attn": FlashAttention,
        "flashinfer": lambda: FlashInferAttention(device),
        "torch": TorchVarlenAttention,
    }
    return {**gpu, "sdpa": SdpaAttention}


def check(
    name: str, factory: Callable[[], Attention], shape: HeadShape, device: torch.device, dtype: torch.dtype
) -> str:
    """Empty where the backend computes attention right here, else the reason it does not."""
    if name != "sdpa" and device.type != "cuda":
        return "needs a GPU"
    if name != "sdpa" and dtype not in (torch.bfloat16, torch.float16):
        return f"has no {str(dtype).removeprefix('torch.')} kernels"
    try:
        return _compare(factory(), shape, device, dtype)
    except ImportError as error:
        return f"not installed ({error})"
    except Exception as error:
        # Kernels raise RuntimeError, AssertionError or their compilers' own errors; each means: not here.
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _compare(attention: Attention, shape: HeadShape, device: torch.device, dtype: torch.dtype) -> str:
    batch = PackedBatch.of([[0] * length for length in (1, 5, 64, 130, 130)])
    plans = [plan_batch(batch, device)]
    if shape.causal:
        # All begin alike: each text's queries are fewer than its keys.
        plans.append(plan_batch(batch, device, share=True))
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(len(batch.input_ids), shape.heads + 2 * shape.kv_heads, shape.dim, generator=generator)
    packed = packed.to(device, dtype)
    k, v = packed[:, shape.heads : -shape.kv_heads], packed[:, -shape.kv_heads :]
    reference = SdpaAttention()
    for plan, window in itertools.product(plans, dict.fromkeys((None, *shape.windows))):
        q = packed[: plan.rows, : shape.heads]
        attention.prepare(plan)
        reference.prepare(plan)
        wanted = reference(q.float(), k.float(), v.float(), causal=shape.causal, window=window)
        last = reference.last(q.float()[plan.last], k.float(), v.float(), window=window)
        for found, expected in (
            (attention(q, k, v, causal=shape.causal, window=window), wanted),
            (attention.last(q[plan.last], k, v, window=window), last),
        ):
            error = float(np.abs(found.float().cpu().numpy() - expected.cpu().numpy()).max())
            if not error <= _TOLERANCE:
                return f"differs from the reference by {error:.3g}"
    return ""


def choose_attention(
    wanted: str, shape: HeadShape, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, tuple[str, ...]]:
    """The backend (for `auto` the fastest), and for each one passed over `name: reason`.

    Raises ModelError where `wanted` does not work.
    """
    passed: dict[str, str] = {}
    right: dict[str, Attention] = {}
    for name, factory in candidates(device, dtype).items():
        if wanted not in ("auto", name):
            continue
        if device.type == "cpu" and wanted == "auto" and name != "sdpa":
            continue
        if reason := check(name, factory, shape, device, dtype):
            passed[name] = reason
        else:
            right[name] = factory()
    if not right:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed.items())
        raise ModelError(f"attention {wanted} does not work on {device}: {reasons or 'no such backend here'}")
    best = next(iter(right))
    if len(right) > 1:
        times = {name: seconds(attention, shape, device, dtype) for name, attention in right.items()}
        best = min(times, key=times.__getitem__)
        passed |= {name: f"{times[name] / times[best]:.2f}x the time of {best}" for name in times if name != best}
    return right[best], tuple(f"{name}: {reason}" for name, reason in passed.items())


def seconds(
    attention: Attention, shape: HeadShape, device: torch.device, dtype: torch.dtype, *, length: int = 512
) -> float:
    """The least time of one layer's attention over 8,192 tokens, in texts of `length` tokens."""
    plan = plan_batch(PackedBatch.of([[0] * length] * max(1, 8192 // length)), device)
    packed = torch.randn(plan.total_tokens, shape.heads + 2 * shape.kv_heads, shape.dim, device=device, dtype=dtype)
    q, k = packed[:, : shape.heads], packed[:, shape.heads : -shape.kv_heads]
    v = packed[:, -shape.kv_heads :]
    attention.prepare(plan)
    best = float("inf")
    for _ in range(8):
        begun = time.perf_counter()
        attention(q, k, v, causal=shape.causal).sum().item()
        best = min(best, time.perf_counter() - begun)
    return best
