"""Vectors as JSON, in OpenAI's form and in text-embeddings-inference's."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


def embeddings_body(vectors: Vectors, tokens: int, model: str, *, as_base64: bool) -> dict[str, Any]:
    """Body of an answer to `POST /v1/embeddings`, for `to_json`.

    Args:
        vectors: float32 [n, dimension], C-contiguous, in the order of the inputs.
        tokens: tokens the model has seen, special ones and prompt included.
        model: the name the request used.
        as_base64: little-endian float32 bytes in base64, instead of numbers.
    """
    rows: list[Any] = [_base64(row) for row in vectors] if as_base64 else list(vectors)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def to_json(value: Any) -> bytes:
    """JSON; rows of NumPy float32 are written with the fewest digits that give the same float32 again."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(row: Vectors) -> str:
    return base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode("ascii")
