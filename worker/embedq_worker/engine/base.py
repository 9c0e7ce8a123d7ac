"""The engine's interface: packed token ids in, float32 vectors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from embedq_schemas.errors import EngineError
from numpy.typing import NDArray


@dataclass(frozen=True)
class PackedBatch:
    """Texts without padding: `input_ids` uint32 [total_tokens], `cu_seqlens` int32 [n + 1] from 0 to total_tokens."""

    input_ids: NDArray[np.uint32]
    cu_seqlens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.diff(self.cu_seqlens)

    def halves(self) -> tuple[PackedBatch, PackedBatch]:
        """The first half of the texts, and the others."""
        middle = len(self) // 2
        at = int(self.cu_seqlens[middle])
        first = PackedBatch(self.input_ids[:at], self.cu_seqlens[: middle + 1])
        return first, PackedBatch(self.input_ids[at:], self.cu_seqlens[middle:] - self.cu_seqlens[middle])

    @classmethod
    def of(cls, texts: list[list[int]]) -> PackedBatch:
        """Pack lists of token ids, in order."""
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        return cls(np.fromiter((i for ids in texts for i in ids), np.uint32, count=int(offsets[-1])), offsets)


@runtime_checkable
class Engine(Protocol):
    """One loaded model. Not thread-safe, except `steps`, which any thread may read."""

    dimension: int
    max_length: int
    max_batch_tokens: int
    device: str
    description: Mapping[str, str]

    @property
    def steps(self) -> int:
        """Progress: grows at least once a layer while a batch runs, never falls."""

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        """float32 [n, dimensions or dimension]: pool, Dense, slice to `dimensions`, then L2, all in float32.

        Raises EngineError where the batch is not well formed or the forward pass fails.
        """

    def close(self) -> None:
        """Release the model and end helper processes. May be called twice."""


class Flight(Protocol):
    """A batch under way; in the `background` if another may be launched before its result is taken."""

    background: bool

    def most_done(self) -> None:
        """Return once half of it has run: a batch launched then keeps the device busy, and urgent work can go first."""

    def result(self) -> NDArray[np.float32]:
        """What `encode` returns. Raises EngineError where it would."""


@runtime_checkable
class Launching(Protocol):
    """An engine whose device computes in the background, batches in the order of their launches."""

    def launch(self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True) -> Flight:
        """Begin `encode`; its errors come with the result."""


class Foreground:
    """A batch that is computed by the thread that asks for it."""

    background = False

    def __init__(self, encode: Callable[[], NDArray[np.float32]]) -> None:
        self._encode = encode
        self._outcome: NDArray[np.float32] | EngineError | None = None

    @classmethod
    def failed(cls, error: EngineError) -> Foreground:
        """A batch whose launch raised `error`."""

        def encode() -> NDArray[np.float32]:
            raise error

        return cls(encode)

    def most_done(self) -> None:
        try:
            self._outcome = self._encode()
        except EngineError as error:
            self._outcome = error

    def result(self) -> NDArray[np.float32]:
        if self._outcome is None:
            self.most_done()
        if isinstance(self._outcome, EngineError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


def launch(engine: Engine, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True) -> Flight:
    """Begin `engine.encode`, in the background where the engine can."""
    if isinstance(engine, Launching):
        return engine.launch(batch, dimensions=dimensions, normalize=normalize)
    return Foreground(partial(engine.encode, batch, dimensions=dimensions, normalize=normalize))


def check_batch(batch: PackedBatch, *, vocab_size: int, max_length: int) -> None:
    """Raises EngineError unless the batch can be run as it is: ids in range, offsets rising, no text too long."""
    offsets = batch.cu_seqlens
    if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(batch.input_ids):
        raise EngineError(f"cu_seqlens must run from 0 to {len(batch.input_ids)} tokens")
    lengths = np.diff(offsets)
    if len(lengths) and int(lengths.min()) < 1:
        raise EngineError(f"text {int(lengths.argmin())} of the batch has no tokens")
    if len(lengths) and int(lengths.max()) > max_length:
        raise EngineError(f"text {int(lengths.argmax())} has {lengths.max()} tokens; the model takes {max_length}")
    if len(batch.input_ids) and int(batch.input_ids.max()) >= vocab_size:
        raise EngineError(f"token id {batch.input_ids.max()} is outside the vocabulary of {vocab_size}")


def check_dimensions(dimensions: int | None, dimension: int) -> int:
    """The vector length to return. Raises EngineError unless 1 <= dimensions <= dimension."""
    if dimensions is None:
        return dimension
    if not 1 <= dimensions <= dimension:
        raise EngineError(f"dimensions {dimensions} is not between 1 and the model's {dimension}")
    return dimensions
