"""Every weight of a Qwen decoder must be there, once, in the right shape; nothing else may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint.model import DecoderConfig, Weights

_FLOATS = {"F32", "F16", "BF16", "F64"}


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name (without `model.`) -> shape of every weight the forward pass uses."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key_value = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        attention = prefix + "self_attn."
        for name, rows in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            shapes[f"{attention}{name}.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{attention}{name}.bias"] = (rows,)
        shapes[attention + "o_proj.weight"] = (hidden, query)
        if config.o_bias:
            shapes[attention + "o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (dim,)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return shapes


def ignored(name: str) -> bool:
    """Tensors that may be present and are not used: the output head, and rope tables of old savers."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def verify_names(config: DecoderConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError naming the first missing, unexpected or misshapen weight."""
    expected = expected_shapes(config)
    _complain("lacks", (name for name in expected if name not in found))
    _complain("holds unexpected", (name for name in found if name not in expected and not ignored(name)))
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"the checkpoint's {name} is {found[name]}; config.json implies {shape}")


def verify_decoder(config: DecoderConfig, weights: Weights) -> None:
    """verify_names over safetensors headers, and the dtypes."""
    verify_names(config, {name: ref.shape for name, ref in weights.tensors.items()})
    for name, ref in weights.tensors.items():
        if not ignored(name) and ref.dtype not in _FLOATS:
            raise ModelError(f"the checkpoint's {name} is {ref.dtype}; expected float32, bfloat16 or float16 weights")


def _complain(what: str, names: Iterable[str]) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
        raise ModelError(f"the checkpoint {what} {listed[0]}{more}")
