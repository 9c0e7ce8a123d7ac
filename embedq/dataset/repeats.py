"""Repeated 64-bit keys among any number of them, in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

KEYS_IN_MEMORY = 1 << 23
_PARTS = 256


class RepeatedKeys:
    """Collects uniformly distributed keys and finds those that came more than once.

    8 bytes a key, in memory up to `keys_in_memory`; beyond that in files of a temporary directory, one for each value
    of a key's first byte, so that each can be sorted by itself.
    """

    def __init__(self, keys_in_memory: int = KEYS_IN_MEMORY) -> None:
        self._most = keys_in_memory
        self._parts: list[NDArray[np.uint64]] = []
        self._held = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Take in keys [n]."""
        self._parts.append(keys)
        self._held += len(keys)
        if self._held > self._most:
            self._spill()

    def find(self) -> tuple[int, NDArray[np.uint64]]:
        """How many keys came after an equal one, and the ascending values that came more than once."""
        count, values = 0, []
        for part in self._sorted_parts():
            again = part[1:] == part[:-1]
            count += int(again.sum())
            values.append(np.unique(part[1:][again]))
        return count, np.concatenate(values)

    def _sorted_parts(self) -> Iterator[NDArray[np.uint64]]:
        if self._folder is None:
            yield np.sort(np.concatenate(self._parts or [_NOTHING]))
            return
        self._spill()
        for file in sorted(Path(self._folder.name).iterdir()):
            yield np.sort(np.fromfile(file, dtype=np.uint64))

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="embedq-keys-")
        keys = np.sort(np.concatenate(self._parts or [_NOTHING]))
        bounds = np.searchsorted(keys >> np.uint64(56), np.arange(_PARTS + 1, dtype=np.uint64))
        for number in range(_PARTS):
            with (Path(self._folder.name) / f"{number:03}").open("ab") as file:
                file.write(keys[bounds[number] : bounds[number + 1]].tobytes())
        self._parts, self._held = [], 0


_NOTHING = np.empty(0, dtype=np.uint64)
