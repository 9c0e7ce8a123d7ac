"""The Qwen2/Qwen3 forward pass over packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from embedq_worker.checkpoint import DecoderConfig
from embedq_worker.engine.attention import Attention
from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.group import Group
from embedq_worker.engine.ops import LayerOps
from embedq_worker.engine.plan import BatchPlan, plan_batch
from embedq_worker.engine.rope import rope_table
from embedq_worker.engine.shard import Embedding, Layer, load_layer, share_of
from embedq_worker.engine.weights import WeightReader


@dataclass(frozen=True)
class Backends:
    """How a decoder computes: attention, the operations between products, its ranks, and the packed batch size."""

    attention: Attention
    ops: LayerOps
    group: Group
    packed_rows: int | None = None


class Decoder:
    """Loaded weights and the pass over them.

    `last_only` models are pruned: the last layer serves last tokens alone, and what causal ones have in common at the
    beginning of several texts is computed once.
    """

    def __init__(
        self,
        config: DecoderConfig,
        reader: WeightReader,
        backends: Backends,
        *,
        length: int,
        causal: bool,
        last_only: bool,
    ) -> None:
        group = backends.group
        self.config = config
        self._attention, self._ops, self._group = backends.attention, backends.ops, group
        self._causal, self._last_only = causal, last_only
        self._rounds_up = backends.packed_rows is not None
        self._share = share_of(config, group.rank, group.size)
        self._embedding = Embedding(reader, self._share, group)
        last = config.num_layers - 1
        self._layers = [
            load_layer(
                reader, config, self._share, group, index, split=last_only and index == last, rows=backends.packed_rows
            )
            for index in range(config.num_layers)
        ]
        self._norm = reader.tensor("norm.weight")
        cos, sin = rope_table(config.rope, config.head_dim, length)
        self._cos, self._sin = cos.to(self._norm.device), sin.to(self._norm.device)

    def plan(self, batch: PackedBatch) -> BatchPlan:
        """How this decoder runs `batch`; the same on every rank."""
        share = self._causal and self._last_only
        return plan_batch(batch, self._norm.device, share=share, round_up=self._rounds_up)

    def forward(self, plan: BatchPlan, progress: Callable[[], None]) -> Tensor:
        """Final hidden states [rows, hidden_size]; [n, hidden_size] of last tokens where `last_only`."""
        eps, ops, reduce = self.config.rms_norm_eps, self._ops, self._group.all_reduce
        self._attention.prepare(plan)
        cos, sin = self._cos[plan.positions], self._sin[plan.positions]
        residual = self._embedding(plan.input_ids)
        hidden: Tensor | None = None
        for layer, window in zip(self._layers, self.config.windows, strict=True):
            normed, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            if layer.qkv is None:
                attended = self._attend_last(layer, normed, cos, sin, plan, window)
                residual = residual[plan.last]
            else:
                attended = self._attend(layer, layer.qkv(normed), cos, sin, plan, window)
            normed, residual = ops.add_rms_norm(reduce(layer.o(attended)), residual, layer.post_norm, eps)
            hidden = reduce(layer.down(ops.silu_mul(layer.gate_up(normed))))
            progress()
        normed, _ = ops.add_rms_norm(hidden, residual, self._norm, eps)
        return normed

    def _attend(
        self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor, plan: BatchPlan, window: int | None
    ) -> Tensor:
        heads, kv_heads, dim = self._share.heads, self._share.kv_heads, self.config.head_dim
        eps = self.config.rms_norm_eps
        parts = qkv.view(-1, heads + 2 * kv_heads, dim)
        v = parts[:, heads + kv_heads :]
        q, k = self._ops.rotate_qk(parts[:, : heads + kv_heads], heads, layer.q_norm, layer.k_norm, cos, sin, eps)
        attended = self._attention(q, plan.whole(k), plan.whole(v), causal=self._causal, window=window)
        return attended.view(-1, heads * dim)

    def _attend_last(
        self, layer: Layer, normed: Tensor, cos: Tensor, sin: Tensor, plan: BatchPlan, window: int | None
    ) -> Tensor:
        assert layer.q is not None, "a pruned layer holds q and kv apart"
        assert layer.kv is not None, "a pruned layer holds q and kv apart"
        heads, kv_heads, dim = self._share.heads, self._share.kv_heads, self.config.head_dim
        eps = self.config.rms_norm_eps
        q = layer.q(normed[plan.last]).view(-1, heads, dim)
        k, v = layer.kv(normed).view(-1, 2, kv_heads, dim).unbind(1)
        q, _ = self._ops.rotate_qk(q, heads, layer.q_norm, None, cos[plan.last], sin[plan.last], eps)
        _, k = self._ops.rotate_qk(k, 0, None, layer.k_norm, cos, sin, eps)
        return self._attention.last(q, plan.whole(k), plan.whole(v), window=window).reshape(-1, heads * dim)
