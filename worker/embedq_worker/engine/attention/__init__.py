"""Attention over packed sequences: several backends, one call."""

from embedq_worker.engine.attention.base import Attention
from embedq_worker.engine.attention.sdpa import SdpaAttention

__all__ = ["Attention", "SdpaAttention"]
