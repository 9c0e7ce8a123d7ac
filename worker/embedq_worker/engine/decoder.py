"""The Qwen2/Qwen3 forward pass over packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from embedq_worker.checkpoint import DecoderConfig
from embedq_worker.engine.attention import Attention
from embedq_worker.engine.layers import add_rms_norm, norm_rotate, rms_norm, silu_mul
from embedq_worker.engine.plan import BatchPlan
from embedq_worker.engine.rope import rope_table
from embedq_worker.engine.weights import WeightReader


@dataclass(frozen=True)
class Linear:
    """x W^T + b; weight [out, in]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """One decoder layer. q, k and v share one product, and so do gate and up."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def load_layer(reader: WeightReader, config: DecoderConfig, index: int) -> Layer:
    attention, mlp = f"layers.{index}.self_attn.", f"layers.{index}.mlp."
    projections = [f"{attention}{name}_proj" for name in "qkv"]
    bias = torch.cat([reader.tensor(f"{name}.bias") for name in projections]) if config.qkv_bias else None
    return Layer(
        qkv=Linear(torch.cat([reader.tensor(f"{name}.weight") for name in projections]), bias),
        o=Linear(
            reader.tensor(attention + "o_proj.weight"),
            reader.tensor(attention + "o_proj.bias") if config.o_bias else None,
        ),
        gate_up=Linear(torch.cat([reader.tensor(mlp + "gate_proj.weight"), reader.tensor(mlp + "up_proj.weight")])),
        down=Linear(reader.tensor(mlp + "down_proj.weight")),
        input_norm=reader.tensor(f"layers.{index}.input_layernorm.weight"),
        post_norm=reader.tensor(f"layers.{index}.post_attention_layernorm.weight"),
        q_norm=reader.tensor(attention + "q_norm.weight") if config.qk_norm else None,
        k_norm=reader.tensor(attention + "k_norm.weight") if config.qk_norm else None,
    )


class Decoder:
    """Loaded weights and the pass over them."""

    def __init__(self, config: DecoderConfig, reader: WeightReader, attention: Attention, *, length: int) -> None:
        self.config = config
        self._attention = attention
        self._embedding = reader.tensor("embed_tokens.weight")
        self._layers = [load_layer(reader, config, index) for index in range(config.num_layers)]
        self._norm = reader.tensor("norm.weight")
        cos, sin = rope_table(config.rope, config.head_dim, length)
        self._cos, self._sin = cos.to(self._norm.device), sin.to(self._norm.device)

    def forward(self, plan: BatchPlan, *, causal: bool, last_only: bool, progress: Callable[[], None]) -> Tensor:
        """Final hidden states [total_tokens, hidden_size]; [n, hidden_size], last tokens alone, where `last_only`.

        With `last_only` the last layer computes queries, output projection and MLP for those tokens alone.
        """
        config = self.config
        self._attention.prepare(plan)
        cos, sin = self._cos[plan.positions], self._sin[plan.positions]
        residual = F.embedding(plan.input_ids, self._embedding)
        hidden = torch.zeros_like(residual)
        for index, layer in enumerate(self._layers):
            normed, residual = add_rms_norm(hidden, residual, layer.input_norm, config.rms_norm_eps)
            prune = last_only and index == config.num_layers - 1
            attended = self._attend(layer, normed, cos, sin, plan, index, causal=causal, prune=prune)
            if prune:
                residual = residual[plan.last]
            normed, residual = add_rms_norm(layer.o(attended), residual, layer.post_norm, config.rms_norm_eps)
            hidden = layer.down(silu_mul(layer.gate_up(normed)))
            progress()
        return rms_norm(hidden + residual, self._norm, config.rms_norm_eps)

    def _attend(
        self,
        layer: Layer,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: BatchPlan,
        index: int,
        *,
        causal: bool,
        prune: bool,
    ) -> Tensor:
        config = self.config
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        window = config.windows[index]
        if prune:
            split = heads * dim
            bias = layer.qkv.bias
            q = F.linear(normed[plan.last], layer.qkv.weight[:split], None if bias is None else bias[:split])
            kv = F.linear(normed, layer.qkv.weight[split:], None if bias is None else bias[split:])
            k, v = kv.view(-1, 2, kv_heads, dim).unbind(1)
            q = norm_rotate(q.view(-1, heads, dim), layer.q_norm, cos[plan.last], sin[plan.last], eps)
            k = norm_rotate(k, layer.k_norm, cos, sin, eps)
            return self._attention.last(q, k, v, window=window).reshape(-1, heads * dim)
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, dim)
        k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        q = norm_rotate(qkv[:, :heads], layer.q_norm, cos, sin, eps)
        k = norm_rotate(k, layer.k_norm, cos, sin, eps)
        return self._attention(q, k, v, causal=causal, window=window).view(-1, heads * dim)
