"""Choosing how a model computes on this machine, and saying why."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint import DecoderConfig
from embedq_worker.engine.attention import HeadShape, choose_attention
from embedq_worker.engine.cpu.kernels import CpuKernels, cpu_kernels
from embedq_worker.engine.cpu.ops import CpuAttention, CpuOps
from embedq_worker.engine.decoder import Backends
from embedq_worker.engine.group import Group
from embedq_worker.engine.linear import pays_to_pack
from embedq_worker.engine.ops import EagerOps, LayerOps, fused_ops
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.engine.shard import share_of

#: Below this many parameters a batch takes less time on a CPU than compiling would.
_WORTH_COMPILING = 50_000_000
#: Rows oneDNN lays packed weights out for; batches of other sizes use the same layout.
_PACKED_ROWS = 2048


@dataclass(frozen=True)
class Chosen:
    """`notes`: what was passed over, and why."""

    backends: Backends
    notes: tuple[str, ...]


def choose_backends(
    config: DecoderConfig,
    settings: EngineSettings,
    *,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    group: Group,
) -> Chosen:
    """Raises ModelError where a backend was asked for by name and does not work here."""
    packed_rows = _PACKED_ROWS if pays_to_pack(dtype, device, ranks=group.size) else None
    kernels, notes = _kernels(config, settings, device, dtype, threads, group)
    ops: LayerOps = EagerOps()
    if kernels is not None:
        ops = CpuOps(kernels)
    elif settings.compile is True or (
        settings.compile == "auto" and (device.type == "cuda" or config.parameters > _WORTH_COMPILING)
    ):
        ops, passed = fused_ops(device, dtype)
        notes += passed
    if settings.attention == "cpu" and kernels is None:
        raise ModelError(f"attention cpu does not work on {device}: {'; '.join(notes) or 'it is for bfloat16 on CPUs'}")
    if kernels is not None and settings.attention in ("auto", "cpu"):
        return Chosen(Backends(CpuAttention(kernels), ops, group, packed_rows), notes)
    share = share_of(config, group.rank, group.size)
    shape = HeadShape(share.heads, share.kv_heads, config.head_dim, causal, config.windows)
    attention, others = choose_attention(settings.attention, shape, device, dtype)
    return Chosen(Backends(attention, ops, group, packed_rows), notes + others)


def _kernels(
    config: DecoderConfig,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    group: Group,
) -> tuple[CpuKernels | None, tuple[str, ...]]:
    if device.type != "cpu" or dtype is not torch.bfloat16 or settings.compile is False:
        return None, ()
    kernels, why = cpu_kernels(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size // group.size,
        head_dim=config.head_dim,
        threads=threads,
    )
    return kernels, (f"cpu kernels: {why}",)
