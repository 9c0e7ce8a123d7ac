"""From hidden states to vectors: pool, Dense, slice, L2; float32 throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from embedq_schemas.errors import ModelError
from torch import Tensor

from embedq_worker.checkpoint import Dense
from embedq_worker.engine.plan import BatchPlan

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class DenseHead:
    """weight float32 [out, in], bias float32 [out] or None."""

    weight: Tensor
    bias: Tensor | None
    activation: str

    def __call__(self, vectors: Tensor) -> Tensor:
        return _ACTIVATIONS[self.activation](F.linear(vectors, self.weight, self.bias))


def load_heads(heads: Sequence[Dense], device: torch.device) -> tuple[DenseHead, ...]:
    """Read each Dense folder's weights. Raises ModelError where they do not match its config."""
    return tuple(_load_head(head, device) for head in heads)


def _load_head(head: Dense, device: torch.device) -> DenseHead:
    from safetensors.torch import load_file

    from embedq_worker.engine.weights import load_pickle

    file = head.folder / "model.safetensors"
    state = load_file(file) if file.exists() else load_pickle(head.folder / "pytorch_model.bin")
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (head.out_features, head.in_features)}
    if head.bias:
        expected |= {"linear.bias": (head.out_features,)}
    found = {name: tuple(value.shape) for name, value in state.items()}
    if found != expected:
        raise ModelError(f"{head.folder.name} holds {found}; its config implies {expected}")
    bias = state["linear.bias"].to(device, torch.float32) if head.bias else None
    return DenseHead(state["linear.weight"].to(device, torch.float32), bias, head.activation)


def pool(hidden: Tensor, plan: BatchPlan, mode: str) -> Tensor:
    """hidden [total_tokens, hidden_size] -> float32 [n, hidden_size]."""
    if mode == "lasttoken":
        return hidden[plan.last].float()
    if mode == "cls":
        return hidden[plan.cu_seqlens[:-1].long()].float()
    values = hidden.float()
    lengths = plan.cu_seqlens.diff().long()
    if mode == "max":
        return torch.segment_reduce(values, "max", lengths=lengths, axis=0)
    counts = lengths.unsqueeze(1).float()
    if mode == "weightedmean":
        weights = (plan.positions + 1).unsqueeze(1).float()
        sums = torch.segment_reduce(values * weights, "sum", lengths=lengths, axis=0)
        return sums / (counts * (counts + 1) / 2)
    sums = torch.segment_reduce(values, "sum", lengths=lengths, axis=0)
    return sums / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)


def finish(pooled: Tensor, heads: Sequence[DenseHead], dimensions: int, *, normalize: bool) -> Tensor:
    """pooled float32 [n, hidden_size] -> float32 [n, dimensions]. Slicing comes before L2 (Matryoshka)."""
    for head in heads:
        pooled = head(pooled)
    vectors = pooled[:, :dimensions]
    return F.normalize(vectors, p=2.0, dim=1) if normalize else vectors
