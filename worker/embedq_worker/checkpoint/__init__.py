"""Reading an embedding checkpoint's own description of itself, without torch."""

from embedq_worker.checkpoint.load import OVERRIDES, decoder_of, load_checkpoint
from embedq_worker.checkpoint.model import Checkpoint, DecoderConfig, Dense, Rope, TensorRef, Weights

__all__ = [
    "OVERRIDES",
    "Checkpoint",
    "DecoderConfig",
    "Dense",
    "Rope",
    "TensorRef",
    "Weights",
    "decoder_of",
    "load_checkpoint",
]
