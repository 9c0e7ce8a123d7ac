"""Which attention backend runs here: each is built, run once, and compared with a float32 reference."""

from __future__ import annotations

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
    """Backends by name, best first. A factory raises where its package is missing."""
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
    lengths = [1, 5, 64, 130]
    plan = plan_batch(PackedBatch.of([[0] * length for length in lengths]), device)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(sum(lengths), shape.heads + 2 * shape.kv_heads, shape.dim, generator=generator)
    packed = packed.to(device, dtype)
    q = packed[:, : shape.heads]
    k, v = packed[:, shape.heads : -shape.kv_heads], packed[:, -shape.kv_heads :]
    reference = SdpaAttention()
    attention.prepare(plan)
    reference.prepare(plan)
    for window in dict.fromkeys((None, *shape.windows)):
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
    """The backend and, for each one passed over, `name: reason`. Raises ModelError where `wanted` does not work."""
    passed: list[str] = []
    for name, factory in candidates(device, dtype).items():
        if wanted not in ("auto", name):
            continue
        if device.type == "cpu" and wanted == "auto" and name != "sdpa":
            continue
        reason = check(name, factory, shape, device, dtype)
        if not reason:
            return factory(), tuple(passed)
        passed.append(f"{name}: {reason}")
    raise ModelError(f"attention {wanted} does not work on {device}: {'; '.join(passed) or 'no such backend here'}")
