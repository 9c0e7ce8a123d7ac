"""Small checkpoints for every test that needs a model: generated once, seeded, under pytest's temporary folder."""

from embedq_worker.engine.generate import generate_checkpoint, small_tokenizer

__all__ = ["generate_checkpoint", "small_tokenizer"]
