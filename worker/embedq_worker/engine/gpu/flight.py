"""A batch that a GPU computes while the host prepares the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from embedq_schemas.errors import EngineError
from numpy.typing import NDArray
from torch import Tensor


def _event() -> Any:
    # Blocking: a waiting thread that spins would take a core from the tokenizer.
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class LayerMark:
    """A point in the device's work: when `after` layers have run."""

    def __init__(self, after: int) -> None:
        self._left = max(1, after)
        self._event = _event()

    def layer_done(self) -> None:
        """The host has launched one more layer."""
        self._left -= 1
        if self._left == 0:
            self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class GpuFlight:
    """Vectors float32 [n, dimensions] on their way to the host."""

    background = True

    def __init__(
        self,
        vectors: Tensor,
        most: LayerMark,
        advance: Callable[[], None],
        failure: Callable[[Exception], EngineError],
    ) -> None:
        self._most, self._advance, self._failure = most, advance, failure
        self._host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        self._host.copy_(vectors, non_blocking=True)
        self._done = _event()
        self._done.record()

    def most_done(self) -> None:
        with suppress(RuntimeError):  # the result will say so
            self._most.wait()

    def result(self) -> NDArray[np.float32]:
        try:
            self._done.synchronize()
        except RuntimeError as error:
            raise self._failure(error) from error
        self._advance()
        # A copy, so that the pinned buffer serves the next batch while a file's vectors are collected.
        return self._host.numpy().copy()
