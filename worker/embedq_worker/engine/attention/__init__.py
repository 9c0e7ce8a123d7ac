"""Attention over packed sequences: several backends, one call."""

from embedq_worker.engine.attention.base import Attention
from embedq_worker.engine.attention.choose import HeadShape, choose_attention
from embedq_worker.engine.attention.sdpa import SdpaAttention

__all__ = ["Attention", "HeadShape", "SdpaAttention", "choose_attention"]
