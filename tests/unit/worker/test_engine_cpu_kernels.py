"""The compiled CPU kernels against plain float32 arithmetic, at every size where a block or a mask may end wrongly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from embedq_worker.engine import layers
from embedq_worker.engine.attention import SdpaAttention
from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.cpu import build
from embedq_worker.engine.cpu.kernels import CpuKernels, cpu_kernels
from embedq_worker.engine.cpu.ops import CpuAttention
from embedq_worker.engine.plan import BatchPlan, plan_batch
from torch import Tensor


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found, why = cpu_kernels(hidden_size=64, intermediate_size=64, head_dim=32, threads=2)
    if found is None:
        pytest.skip(f"the CPU kernels do not run here: {why}")
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 200, 255, 256, 257]


@pytest.mark.parametrize("shape", [(16, 8, 128), (4, 4, 32), (14, 2, 64), (6, 1, 96), (3, 3, 256)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 33), (True, 1), (True, 128)])
def test_attention_equals_float32_attention(
    kernels: CpuKernels, shape: tuple[int, int, int], causal: bool, window: int | None
) -> None:
    heads, kv_heads, dim = shape
    batch = PackedBatch.of([[0] * length for length in EDGES])
    check_attention(kernels, plan_batch(batch, torch.device("cpu")), heads, kv_heads, dim, causal, window)


@pytest.mark.parametrize("step", [1, 16, 129])
@pytest.mark.parametrize("window", [None, 33, 1, 128])
def test_attention_of_texts_that_begin_alike_equals_float32_attention(
    kernels: CpuKernels, step: int, window: int | None
) -> None:
    # Sorted, each text begins as the one before it and adds its own: one token, a tile, or more than a task's queries.
    batch = PackedBatch.of([[0] * length for length in range(1, 900, step)][:60])
    plan = plan_batch(batch, torch.device("cpu"), share=True)
    assert set(np.diff(plan.row_offsets)) == {1, step}
    check_attention(kernels, plan, 4, 2, 32, True, window)


def check_attention(
    kernels: CpuKernels, plan: BatchPlan, heads: int, kv_heads: int, dim: int, causal: bool, window: int | None
) -> None:
    packed = random(plan.total_tokens, heads + 2 * kv_heads, dim)
    q, k, v = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    q = q[: plan.rows]
    reference, kernel = SdpaAttention(), CpuAttention(kernels)
    reference.prepare(plan)
    kernel.prepare(plan)
    wanted = reference(q.float(), k.float(), v.float(), causal=causal, window=window)
    found = kernel(q, k, v, causal=causal, window=window)
    assert (found.float() - wanted).abs().max().item() < 0.02
    wanted = reference.last(q.float()[plan.last], k.float(), v.float(), window=window)
    found = kernel.last(q[plan.last], k, v, window=window)
    assert (found.float() - wanted).abs().max().item() < 0.02


def test_long_texts_beside_short_ones_take_the_other_path(kernels: CpuKernels) -> None:
    plan = plan_batch(PackedBatch.of([[0] * 20, [0] * 1500, [0] * 40]), torch.device("cpu"))
    packed = random(plan.total_tokens, 8, 32)
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    reference, kernel = SdpaAttention(), CpuAttention(kernels)
    reference.prepare(plan)
    kernel.prepare(plan)
    wanted = reference(q.float(), k.float(), v.float(), causal=True)
    assert (kernel(q, k, v, causal=True).float() - wanted).abs().max().item() < 0.02


def test_large_scores_neither_overflow_nor_vanish(kernels: CpuKernels) -> None:
    plan = plan_batch(PackedBatch.of([[0] * 100]), torch.device("cpu"))
    packed = random(100, 6, 32) * 40
    q, k, v = packed[:, :2], packed[:, 2:4], packed[:, 4:]
    reference, kernel = SdpaAttention(), CpuAttention(kernels)
    reference.prepare(plan)
    kernel.prepare(plan)
    wanted = reference(q.float(), k.float(), v.float(), causal=True)
    found = kernel(q, k, v, causal=True).float()
    assert torch.isfinite(found).all()
    assert ((found - wanted).abs() <= 0.02 * wanted.abs() + 0.5).all()


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_norm_adds_and_normalises(kernels: CpuKernels, rows: int) -> None:
    x, residual, weight = random(rows, 96), random(rows, 96, seed=1), random(96, seed=2)
    wanted, added = layers.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-6)
    total = residual.clone()
    found = kernels.add_rms_norm(x, total, weight, 1e-6)
    assert torch.allclose(total.float(), added, rtol=0.01, atol=0.01)
    assert torch.allclose(found.float(), wanted, rtol=0.02, atol=0.02)
    alone = kernels.add_rms_norm(None, total, weight, 1e-6)
    assert torch.equal(alone, found)


@pytest.mark.parametrize("normed", [True, False])
def test_rotation_normalises_queries_and_keys_by_their_own_weights(kernels: CpuKernels, normed: bool) -> None:
    packed, q_norm, k_norm = random(20, 8, 64), random(64, seed=1), random(64, seed=2)
    angles = torch.rand(20, 32, generator=torch.Generator().manual_seed(3))
    cos, sin = angles.cos(), angles.sin()
    weights = (q_norm, k_norm) if normed else (None, None)
    q, k = layers.rotate_qk(
        packed[:, :6].float(), 4, *(None if w is None else w.float() for w in weights), cos, sin, 1e-6
    )
    kept = packed[:, 6:].clone()
    kernels.norm_rotate(packed[:, :6], 4, *weights, cos, sin, 1e-6)
    assert torch.allclose(packed[:, :6].float(), torch.cat((q, k), dim=1), rtol=0.02, atol=0.02)
    assert torch.equal(packed[:, 6:], kept)


def test_silu_equals_torch_far_from_zero_too(kernels: CpuKernels) -> None:
    gate_up = torch.cat((torch.linspace(-80, 80, 320), random(320).float())).to(torch.bfloat16).repeat(3, 1)
    wanted = layers.silu_mul(gate_up.float())
    assert torch.allclose(kernels.silu_mul(gate_up).float(), wanted, rtol=0.01, atol=1e-3)


def test_without_a_compiler_the_reason_is_given_and_nothing_breaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if build._missing_instructions():
        pytest.skip("this CPU has no AVX512_BF16, so no compiler is looked for")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    missing = build.load_kernels.__wrapped__()
    assert missing.loaded is None
    assert "no C++ compiler" in missing.reason


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if build._missing_instructions():
        pytest.skip("this CPU has no AVX512_BF16, so no compiler is looked for")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    broken = build.load_kernels.__wrapped__()
    assert broken.loaded is None
    assert "did not compile" in broken.reason


def test_shapes_the_kernels_do_not_serve_are_declined() -> None:
    found, why = cpu_kernels(hidden_size=64, intermediate_size=64, head_dim=24, threads=1)
    assert found is None
    assert "multiples of 32" in why
