"""The call every attention backend answers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from embedq_worker.engine.plan import BatchPlan


class Attention(Protocol):
    """Attention within each packed text, softmax scale head_dim ** -0.5, grouped key/value heads.

    A text's queries are those of its last tokens (`cu_rows` of the plan), its keys those of all (`cu_seqlens`).
    """

    name: str

    def prepare(self, plan: BatchPlan) -> None:
        """Called once a batch, before the first layer."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        """q [rows, heads, head_dim], k and v [total_tokens, kv_heads, head_dim] -> like q.

        `window`: a token sees itself and the window - 1 tokens before it.
        """

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        """q [n, heads, head_dim]: each text's last token alone attends over its whole text -> like q."""
