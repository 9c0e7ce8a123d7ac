"""Reading a decoder's weights: whole tensors or slices, straight from the files, in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from embedq_schemas.errors import ModelError
from torch import Tensor

from embedq_worker.checkpoint import DecoderConfig, Weights
from embedq_worker.checkpoint.verify import verify_names


class WeightReader:
    """Context manager over a checkpoint's weight files. Names carry no `model.` prefix."""

    def __init__(self, weights: Weights, decoder: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._decoder = decoder
        self._dtype = dtype
        self._device = device
        self._open: dict[Path, Any] = {}
        self._loaded: dict[str, Tensor] = {}

    def __enter__(self) -> WeightReader:
        if self._weights.pickled:
            self._loaded = _load_pickled(self._weights, self._decoder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._open.values():
            handle.__exit__(kind, error, trace)
        self._open.clear()
        self._loaded.clear()

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, in the compute dtype, on the device."""
        return self._fetch(name, lambda source: source[:])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """`tensor[start:stop]`, without reading the rest where the file allows it."""
        return self._fetch(name, lambda source: source[start:stop])

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """`tensor[:, start:stop]`."""
        return self._fetch(name, lambda source: source[:, start:stop])

    def _fetch(self, name: str, cut: Callable[[Any], Tensor]) -> Tensor:
        value = cut(self._loaded[name] if self._weights.pickled else self._slice(name))
        return value.to(device=self._device, dtype=self._dtype).contiguous().clone()

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        ref = self._weights.tensors[name]
        try:
            if ref.file not in self._open:
                handle: Any = safe_open(str(ref.file), framework="pt")
                self._open[ref.file] = handle.__enter__()
            return self._open[ref.file].get_slice(ref.key)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {ref.key} from {ref.file}: {error}") from None


def _load_pickled(weights: Weights, decoder: DecoderConfig) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = {}
    for file in weights.files:
        for name, value in load_pickle(file).items():
            loaded[name.removeprefix("model.")] = value
    verify_names(decoder, {name: tuple(value.shape) for name, value in loaded.items()})
    return loaded


def load_pickle(file: Path) -> dict[str, Tensor]:
    """A pickled state dict, read without running any code it may carry. Raises ModelError."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ModelError(f"cannot read {file} as plain tensors: {error}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ModelError(f"{file} is not a state dict of tensors")
    return state
