"""What the tests of finished datasets share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPTS = {"query": "Instruct: find it\nQuery:", "passage": "passage: "}
WORDS = ("queue", "Wort", "мир", "文章", "the", "of", "token", "model", "안녕", "naïve", "😀", "people", "zwölf")


@dataclass(frozen=True)
class Made:
    """The dataset at `path` and what went into it. `vectors`: float32 [60, 32], in input order like `documents`."""

    path: Path
    model: Path
    documents: list[dict[str, Any]]
    vectors: NDArray[np.float32]

    @property
    def ids(self) -> list[str]:
        return [document["id"] for document in self.documents]


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


Command = Callable[..., Said]
