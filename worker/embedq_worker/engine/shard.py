"""One rank's share of a decoder: which rows and columns it holds, and loading them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from embedq_schemas.errors import ModelError
from torch import Tensor

from embedq_worker.checkpoint import DecoderConfig
from embedq_worker.engine.group import Group
from embedq_worker.engine.linear import Linear, make_linear
from embedq_worker.engine.weights import WeightReader


@dataclass(frozen=True)
class Share:
    """Head and column ranges of one rank; key/value heads are replicated where there are more ranks than heads."""

    heads: int
    kv_heads: int
    first_head: int
    first_kv_head: int
    inner: int
    first_inner: int
    vocab: int
    first_vocab: int


def share_of(config: DecoderConfig, rank: int, size: int) -> Share:
    """Raises ModelError where the model does not split evenly over `size` ranks."""
    if config.num_heads % size or config.intermediate_size % size:
        raise ModelError(
            f"{config.num_heads} heads and {config.intermediate_size} MLP columns do not split over {size} ranks"
        )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ModelError(f"{config.num_kv_heads} key/value heads do not split over {size} ranks")
    heads, inner = config.num_heads // size, config.intermediate_size // size
    kv_heads = max(1, config.num_kv_heads // size)
    # Odd vocabularies: the last rank's table is shorter, and ids outside a rank's rows give zeros.
    vocab = -(-config.vocab_size // size)
    return Share(
        heads=heads,
        kv_heads=kv_heads,
        first_head=rank * heads,
        first_kv_head=rank * config.num_kv_heads // size,
        inner=inner,
        first_inner=rank * inner,
        vocab=max(0, min(vocab, config.vocab_size - rank * vocab)),
        first_vocab=rank * vocab,
    )


@dataclass(frozen=True)
class Layer:
    """One decoder layer's share. q, k and v are one product, and so are gate and up.

    The last layer of a pruned model has `q` and `kv` apart instead of `qkv`: queries are needed for last tokens alone.
    """

    qkv: Linear | None
    q: Linear | None
    kv: Linear | None
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def load_layer(
    reader: WeightReader,
    config: DecoderConfig,
    share: Share,
    group: Group,
    index: int,
    *,
    split: bool,
    rows: int | None,
) -> Layer:
    """Read layer `index`: rows of q, k, v, gate and up; columns of o and down. `rows`: pack for that batch size."""
    base, mlp, dim = f"layers.{index}.self_attn.", f"layers.{index}.mlp.", config.head_dim

    def projection(name: str, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        start, stop = first * dim, (first + count) * dim
        weight = reader.rows(f"{base}{name}_proj.weight", start, stop)
        return weight, reader.rows(f"{base}{name}_proj.bias", start, stop) if config.qkv_bias else None

    q = projection("q", share.first_head, share.heads)
    k = projection("k", share.first_kv_head, share.kv_heads)
    v = projection("v", share.first_kv_head, share.kv_heads)
    begin, end = share.first_inner, share.first_inner + share.inner
    o_bias = reader.tensor(base + "o_proj.bias") if config.o_bias and group.rank == 0 else None
    start, stop = share.first_head * dim, (share.first_head + share.heads) * dim
    return Layer(
        qkv=None if split else _joined([q, k, v], rows),
        q=_joined([q], rows) if split else None,
        kv=_joined([k, v], rows) if split else None,
        o=make_linear(reader.columns(base + "o_proj.weight", start, stop), o_bias, packed_rows=rows),
        gate_up=_joined(
            [(reader.rows(mlp + f"{name}_proj.weight", begin, end), None) for name in ("gate", "up")], rows
        ),
        down=make_linear(reader.columns(mlp + "down_proj.weight", begin, end), packed_rows=rows),
        input_norm=reader.tensor(f"layers.{index}.input_layernorm.weight"),
        post_norm=reader.tensor(f"layers.{index}.post_attention_layernorm.weight"),
        q_norm=reader.tensor(base + "q_norm.weight") if config.qk_norm else None,
        k_norm=reader.tensor(base + "k_norm.weight") if config.qk_norm else None,
    )


def _joined(parts: list[tuple[Tensor, Tensor | None]], rows: int | None) -> Linear:
    biases = [bias for _, bias in parts if bias is not None]
    return make_linear(
        torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None, packed_rows=rows
    )


class Embedding:
    """Vocabulary-parallel token table: each rank looks up the ids it holds; the sum over ranks is the whole."""

    def __init__(self, reader: WeightReader, share: Share, group: Group) -> None:
        self._group, self._share = group, share
        self._table = reader.rows("embed_tokens.weight", share.first_vocab, share.first_vocab + share.vocab)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [tokens] -> [tokens, hidden_size]."""
        if self._group.size == 1:
            return F.embedding(input_ids, self._table)
        local = input_ids - self._share.first_vocab
        mine = (local >= 0) & (local < self._share.vocab)
        if self._share.vocab == 0:
            return self._group.all_reduce(
                input_ids.new_zeros(len(input_ids), self._table.shape[1], dtype=self._table.dtype)
            )
        rows = F.embedding(local.where(mine, 0), self._table) * mine.unsqueeze(1)
        return self._group.all_reduce(rows)
