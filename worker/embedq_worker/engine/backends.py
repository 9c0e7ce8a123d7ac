"""Choosing how a model computes on this machine, and saying why."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint import DecoderConfig
from embedq_worker.engine.attention import Attention, SdpaAttention
from embedq_worker.engine.cpu.kernels import cpu_kernels
from embedq_worker.engine.cpu.ops import AmxAttention, CpuOps
from embedq_worker.engine.decoder import Backends
from embedq_worker.engine.group import Group
from embedq_worker.engine.linear import can_pack
from embedq_worker.engine.ops import EagerOps, LayerOps, compiled_ops
from embedq_worker.engine.settings import EngineSettings

#: Below this many parameters a batch takes less time than compiling would.
_WORTH_COMPILING = 50_000_000


@dataclass(frozen=True)
class Chosen:
    backends: Backends
    notes: tuple[str, ...]


def choose_backends(
    config: DecoderConfig,
    settings: EngineSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    group: Group,
) -> Chosen:
    """Raises ModelError where a backend was asked for by name and does not work here."""
    packed_rows = 2048 if can_pack(dtype, device) else None
    if device.type == "cpu" and dtype is torch.bfloat16:
        kernels, why = cpu_kernels(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size // group.size,
            head_dim=config.head_dim,
            threads=threads,
        )
        if kernels is not None and settings.compile is not False:
            wanted = settings.attention in ("auto", "amx")
            attention: Attention = AmxAttention(kernels) if wanted else SdpaAttention()
            return Chosen(Backends(attention, CpuOps(kernels), group, packed_rows), (why,))
        notes: tuple[str, ...] = (why,)
    else:
        notes = ()
    if settings.attention not in ("auto", "sdpa"):
        raise ModelError(f"attention backend {settings.attention} does not work on {device}: {'; '.join(notes)}")
    worth = settings.compile is True or (settings.compile == "auto" and config.parameters > _WORTH_COMPILING)
    ops: LayerOps = EagerOps()
    if worth:
        ops, why = compiled_ops(device, dtype)
        notes = (*notes, why)
    return Chosen(Backends(SdpaAttention(), ops, group, packed_rows), notes)
