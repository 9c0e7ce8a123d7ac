"""What transformers and sentence-transformers say about a checkpoint: one text at a time, so that nothing is padded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer


class Reference:
    """A checkpoint as sentence-transformers loads it, in float32 on the CPU."""

    def __init__(self, path: Path) -> None:
        self.model = SentenceTransformer(
            str(path), device="cpu", model_kwargs={"dtype": torch.float32, "attn_implementation": "sdpa"}
        )

    def vectors(self, texts: list[list[int]]) -> NDArray[np.float32]:
        """float32 [n, dimension] of token id lists, through every module of the checkpoint."""
        rows = []
        with torch.inference_mode():
            for ids in texts:
                tokens = torch.tensor([ids])
                features = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
                rows.append(self.model(features)["sentence_embedding"][0].float().numpy())
        return np.stack(rows)


def cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """Row-wise cosine similarity, in float64."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    similarity: NDArray[np.float64] = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return similarity
