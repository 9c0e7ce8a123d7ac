"""The vectors of one run of a batch, on disk, at the places of their documents.

Storing a row twice stores the same row, so results may be read again after any crash until they are dropped from Redis.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from embedq_schemas.errors import CodecError
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.sinks.files import storage_errors
from numpy.typing import NDArray


class Outcomes:
    """Rows for `documents` documents. The files are full-sized from the start: a disk too small says so at once."""

    def __init__(self, folder: Path, run: int, *, documents: int, components: int, max_length: int) -> None:
        """Open the files, or make them; raises StorageError."""
        self._max_length = max_length
        with storage_errors(f"write to {folder}"):
            vectors = folder / f"run-{run}.vectors"
            tokens = folder / f"run-{run}.tokens"
            _reserve(vectors, documents * components * 4)
            _reserve(tokens, documents * 4)
            #: float32 [documents, components]; rows without an outcome are zero.
            self.vectors: NDArray[np.float32] = np.memmap(vectors, np.float32, "r+", shape=(documents, components))
            #: int32 [documents]: tokens the model has seen, 0 for a document without a vector.
            self.tokens: NDArray[np.int32] = np.memmap(tokens, np.int32, "r+", shape=(documents,))

    def store(self, batch: VectorBatch) -> None:
        """Put a batch's rows in their places; raises CodecError if they have none."""
        ordinals = batch.table.column("ordinal").to_numpy()
        documents, components = self.vectors.shape
        inside = not len(ordinals) or 0 <= int(ordinals.min()) <= int(ordinals.max()) < documents
        if not inside or batch.dimension != components or batch.vectors.dtype != np.float32:
            raise CodecError(f"{len(ordinals)} results do not fit a run of {documents} documents, {components} wide")
        tokens = batch.table.column("n_tokens").to_numpy()
        self.vectors[ordinals] = batch.vectors
        # A truncated document's count is that of its whole text.
        self.tokens[ordinals] = np.clip(tokens, 1, self._max_length)

    def sync(self) -> None:
        """Make what was stored durable: a row's count never is without its vector. Raises StorageError."""
        with storage_errors("write a batch's results"):
            self.vectors.flush()  # type: ignore[attr-defined]
            self.tokens.flush()  # type: ignore[attr-defined]

    def done(self) -> NDArray[np.bool_]:
        """bool [documents]: which have a vector."""
        return np.asarray(self.tokens) > 0


def _reserve(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_size == size:
            return
        if hasattr(os, "posix_fallocate"):
            # Writing to a mapped page that the disk cannot give ends the process.
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
