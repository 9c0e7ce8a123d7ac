"""What a checkpoint holds and what will be done with it, before any weight is loaded (`embedq model inspect`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.engine.tuning import values_per_token

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Inspection:
    """`read` is what the files say, `plan` what will be done, both as ordered label -> text; bytes where so named."""

    model_id: str
    fingerprint: str
    read: Mapping[str, str]
    plan: Mapping[str, str]
    weight_bytes: int
    bytes_per_token: int
    notes: tuple[str, ...]


def inspect_checkpoint(checkpoint: Checkpoint, settings: EngineSettings | None = None) -> Inspection:
    """Pure description: imports no torch, loads nothing. `auto` values stay `auto` until a device is chosen."""
    settings = settings or EngineSettings()
    native = settings.kind == "native" or (settings.kind == "auto" and checkpoint.decoder is not None)
    dtype = checkpoint.dtype if settings.dtype == "auto" else settings.dtype
    itemsize = _ITEM.get(dtype, 4)
    return Inspection(
        model_id=checkpoint.model_id,
        fingerprint=checkpoint.fingerprint,
        read=_read(checkpoint),
        plan=_plan(checkpoint, settings, native=native),
        weight_bytes=_parameters(checkpoint) * itemsize or checkpoint.weights.nbytes,
        bytes_per_token=_bytes_per_token(checkpoint) * itemsize,
        notes=checkpoint.notes,
    )


def _read(checkpoint: Checkpoint) -> dict[str, str]:
    weights = checkpoint.weights
    lines = {
        "folder": str(checkpoint.path),
        "revision": checkpoint.revision or "",
        "architecture": checkpoint.model_type,
        "stored as": f"{checkpoint.dtype}, {len(weights.files)} files, {weights.nbytes / 1e9:.2f} GB",
        "vocabulary": str(checkpoint.vocab_size),
        "max length": f"{checkpoint.max_length} tokens",
        "attention": "causal" if checkpoint.causal else "bidirectional",
        "pooling": checkpoint.pooling,
        "dense": " -> ".join(
            f"{head.folder.name} ({head.in_features} to {head.out_features}, {head.activation})"
            for head in checkpoint.dense
        ),
        "normalise": "yes" if checkpoint.normalize else "no",
        "dimension": str(checkpoint.dimension),
        "prompts": ", ".join(f"{name}={text!r}" for name, text in checkpoint.prompts.items()),
        "default prompt": checkpoint.default_prompt_name or "",
    }
    config = checkpoint.decoder
    if config is not None:
        scaled = "" if config.rope.kind == "default" else f", {config.rope.kind} x{config.rope.factor:g}"
        windows = sorted({window for window in config.windows if window})
        lines["decoder"] = (
            f"{config.num_layers} layers of {config.hidden_size}, {config.num_heads} heads "
            f"({config.num_kv_heads} key/value) of {config.head_dim}, MLP {config.intermediate_size}"
        )
        lines["rope"] = f"theta {config.rope.theta:g}{scaled}"
        lines["sliding window"] = ", ".join(map(str, windows))
        lines["parameters"] = f"{config.parameters / 1e6:.1f}M outside the embedding table"
    return {label: text for label, text in lines.items() if text}


def _plan(checkpoint: Checkpoint, settings: EngineSettings, *, native: bool) -> dict[str, str]:
    pruned = native and checkpoint.pooling == "lasttoken"
    return {
        "engine": "native, packed"
        if native
        else ("null" if settings.kind == "null" else "transformers, padded buckets"),
        "device": settings.device,
        "dtype": settings.dtype,
        "attention backend": settings.attention,
        "tensor parallel": str(settings.tensor_parallel),
        "max batch tokens": str(settings.max_batch_tokens),
        "common beginnings": "computed once a batch" if native and checkpoint.shares_prefixes else "in each text",
        "last layer": "queries, output projection and MLP for last tokens only" if pruned else "whole",
        "vector": "pool"
        + "".join(f", {head.folder.name}" for head in checkpoint.dense)
        + ", slice to dimensions if asked"
        + (", L2" if checkpoint.normalize else ""),
    }


def _parameters(checkpoint: Checkpoint) -> int:
    total = 0
    for ref in checkpoint.weights.tensors.values():
        count = 1
        for extent in ref.shape:
            count *= extent
        total += count
    return total


def _bytes_per_token(checkpoint: Checkpoint) -> int:
    """Values alive at once for each token of a batch."""
    config = checkpoint.decoder
    if config is None:
        return 8 * checkpoint.hidden_size
    return values_per_token(config, shares_prefixes=checkpoint.shares_prefixes)
