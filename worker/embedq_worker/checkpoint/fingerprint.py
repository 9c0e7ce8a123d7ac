"""One hash over everything that changes vectors, so that a queue never mixes two models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedq_worker.checkpoint.model import TensorRef, Weights

#: Raise it when the engine's mathematics change on purpose.
_VERSION = 1
_BLOCK = 4096


def fingerprint(settings: Mapping[str, Any], files: list[Path], weights: list[Weights]) -> str:
    """sha256, hex, over the resolved settings, whole files, and weight headers with sampled blocks.

    Weights are hashed by tensor name, so resharding or a `model.` prefix leaves the fingerprint as it is. Three blocks
    of 4 KiB a tensor tell trainings apart: a step of an optimiser changes nearly every value.
    """
    digest = hashlib.sha256(f"embedq-model-{_VERSION}\n".encode())
    digest.update(json.dumps(settings, sort_keys=True, ensure_ascii=False, default=str).encode())
    for file in files:
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    for part in weights:
        if part.pickled:
            for file in part.files:
                size = file.stat().st_size
                digest.update(f"\n{file.name} {size}\n".encode())
                _blocks(digest, file, 0, size, count=256)
        for name in sorted(part.tensors):
            # The output head is not used, and some savers leave it out.
            if name != "lm_head.weight":
                _tensor(digest, name, part.tensors[name])
    return digest.hexdigest()


def _tensor(digest: hashlib._Hash, name: str, ref: TensorRef) -> None:
    digest.update(f"\n{name} {ref.dtype} {ref.shape}\n".encode())
    _blocks(digest, ref.file, ref.offset, ref.nbytes, count=3)


def _blocks(digest: hashlib._Hash, file: Path, offset: int, nbytes: int, *, count: int) -> None:
    with file.open("rb") as stream:
        if nbytes <= count * _BLOCK:
            stream.seek(offset)
            digest.update(stream.read(nbytes))
            return
        for index in range(count):
            stream.seek(offset + (nbytes - _BLOCK) * index // (count - 1))
            digest.update(stream.read(_BLOCK))
