"""config.json of a Qwen2/Qwen3 model, old and new spelling, as a DecoderConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint.model import DecoderConfig, Rope

#: model_type -> family. pplx-embed ships Qwen3 under its own name, bidirectional.
FAMILIES: Mapping[str, Literal["qwen2", "qwen3"]] = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "bidirectional_pplx_qwen3": "qwen3",
}
_BIDIRECTIONAL = {"bidirectional_pplx_qwen3"}


def is_causal(config: Mapping[str, Any]) -> bool:
    """gte-Qwen2 and others say `is_causal: false` in config.json; models that generate text are causal otherwise."""
    if "is_causal" in config:
        return bool(config["is_causal"])
    if config.get("model_type") in FAMILIES:
        return config["model_type"] not in _BIDIRECTIONAL
    return any("CausalLM" in str(name) for name in config.get("architectures") or ())


def read_decoder(config: Mapping[str, Any], *, causal: bool) -> DecoderConfig:
    """Raises ModelError on a missing field, or on one embedq would not compute exactly."""
    family = FAMILIES[config["model_type"]]
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported; Qwen models use silu")
    hidden_size, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    num_layers = _positive(config, "num_hidden_layers")
    num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
    head_dim = _positive(config, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(f"{num_heads} heads, {num_kv_heads} key/value heads of {head_dim} values do not fit together")
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(config, "vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family == "qwen3" and attention_bias,
        windows=_windows(config, num_layers, causal=causal),
    )


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {key} is {value!r}; expected a positive integer")
    return value


def _windows(config: Mapping[str, Any], num_layers: int, *, causal: bool) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", num_layers))
        kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"config.json: layer_types must name {num_layers} full or sliding attention layers")
    if "sliding_attention" in kinds and not window:
        raise ModelError("config.json: layer_types asks for sliding attention, but no sliding_window is set")
    if "sliding_attention" in kinds and not causal:
        raise ModelError("sliding-window attention without a causal mask is not supported")
    return tuple(int(window) if kind == "sliding_attention" and window else None for kind in kinds)


def read_rope(config: Mapping[str, Any]) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`. Raises ModelError."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError("config.json: the rope settings are not an object")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if float(scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=float(scaling["factor"]))
    if kind != "yarn":
        raise ModelError(f"rope type {kind!r} is not supported; supported: default, linear, yarn")
    return _yarn(config, scaling, theta)


def _yarn(config: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> Rope:
    # Older configs leave the original length out; max_position_embeddings then is the original length.
    original = int(scaling.get("original_max_position_embeddings") or config["max_position_embeddings"])
    factor = float(scaling.get("factor") or int(config["max_position_embeddings"]) / original)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
        else:
            attention_factor = _mscale(factor, 1.0)
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        truncate=bool(scaling.get("truncate", True)),
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Longest text the positions allow, in tokens: YaRN and linear scaling extend the trained length."""
    value = config.get("max_position_embeddings")
    if not isinstance(value, int):
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings") if isinstance(scaling, Mapping) else None
    if original:
        return max(value, int(float(scaling.get("factor") or 1.0) * int(original)))
    return value
