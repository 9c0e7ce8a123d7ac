"""Packed attention on GPUs: flash-attn, FlashInfer, and torch's own, imported only when asked for.

Signatures follow flash-attn 2.7 (and its Hopper build, `flash_attn_interface`), FlashInfer 0.2 and later, and
torch.nn.attention.varlen, whose arguments moved between torch 2.10 and 2.12.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embedq_worker.engine.plan import BatchPlan


class _Planned:
    """What the three share: offsets on the device, and those of a batch with one query a text.

    All three align masks to the last key, where a text's queries end.
    """

    def __init__(self) -> None:
        self._cu_rows = self._cu_seqlens = self._one_each = torch.zeros(1, dtype=torch.int32)
        self._max_rows = self._max_seqlen = 0

    def prepare(self, plan: BatchPlan) -> None:
        self._cu_rows, self._max_rows = plan.cu_rows, plan.max_rows
        self._cu_seqlens, self._max_seqlen = plan.cu_seqlens, plan.max_seqlen
        self._one_each = torch.arange(len(plan) + 1, dtype=torch.int32, device=plan.cu_seqlens.device)


def _sides(window: int | None, *, causal: bool) -> tuple[int, int]:
    """(left, right) visible tokens beside the query's own; -1 is no limit."""
    return (-1 if window is None else window - 1, 0 if causal or window is not None else -1)


class FlashAttention(_Planned):
    name = "flash_attn"

    def __init__(self) -> None:
        super().__init__()
        try:
            module = importlib.import_module("flash_attn_interface")
        except ImportError:
            module = importlib.import_module("flash_attn")
        self._attend: Callable[..., Any] = module.flash_attn_varlen_func

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        return self._run(q, k, v, self._cu_rows, self._max_rows, causal=causal, window=window)

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return self._run(q, k, v, self._one_each, 1, causal=window is not None, window=window)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, max_q: int, *, causal: bool, window: int | None
    ) -> Tensor:
        out = self._attend(
            q, k, v, cu_q, self._cu_seqlens, max_seqlen_q=max_q, max_seqlen_k=self._max_seqlen, causal=causal,
            window_size=(-1 if window is None else window - 1, -1 if window is None else 0),
        )  # fmt: skip
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class TorchVarlenAttention(_Planned):
    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention.varlen import varlen_attn

        self._attend: Callable[..., Any] = varlen_attn
        self._parameters = set(inspect.signature(varlen_attn).parameters)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        return self._run(q, k, v, self._cu_rows, self._max_rows, causal=causal, window=window)

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return self._run(q, k, v, self._one_each, 1, causal=False, window=window)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, max_q: int, *, causal: bool, window: int | None
    ) -> Tensor:
        options: dict[str, Any] = {}
        if "window_size" in self._parameters:
            options["window_size"] = _sides(window, causal=causal)
        elif window is not None:
            raise RuntimeError("this torch has no sliding window in varlen_attn")
        else:
            options["is_causal"] = causal
        # Before it had the argument, the kernel took fewer key heads as they are.
        if q.shape[1] != k.shape[1] and "enable_gqa" in self._parameters:
            options["enable_gqa"] = True
        out = self._attend(q, k, v, cu_q, self._cu_seqlens, max_q, self._max_seqlen, **options)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class FlashInferAttention(_Planned):
    """Planned once a batch for each kind of layer (full or windowed, whole texts or last tokens), not once a layer."""

    name = "flashinfer"
    _WORKSPACE_BYTES = 256 << 20

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self._make: Callable[..., Any] = BatchPrefillWithRaggedKVCacheWrapper
        self._device = device
        self._wrappers: dict[tuple[bool, bool, int | None], Any] = {}
        self._planned: set[tuple[bool, bool, int | None]] = set()
        self._host = self._host_rows = torch.zeros(1, dtype=torch.int32)

    def prepare(self, plan: BatchPlan) -> None:
        super().prepare(plan)
        # Planning reads offsets on the host; handing it host tensors spares a device synchronisation.
        self._host = torch.tensor(plan.offsets, dtype=torch.int32)
        self._host_rows = torch.tensor(plan.row_offsets, dtype=torch.int32)
        self._planned.clear()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
        return self._run(q, k, v, last=False, causal=causal, window=window)

    def last(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return self._run(q, k, v, last=True, causal=True, window=window)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, *, last: bool, causal: bool, window: int | None) -> Tensor:
        kind = (last, causal, window)
        if kind not in self._wrappers:
            workspace = torch.empty(self._WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers[kind] = self._make(workspace, "NHD")
        wrapper = self._wrappers[kind]
        if kind not in self._planned:
            rows = torch.arange(len(self._host), dtype=torch.int32) if last else self._host_rows
            wrapper.plan(
                rows, self._host, q.shape[1], k.shape[1], q.shape[2], causal=causal,
                window_left=-1 if window is None else window - 1, q_data_type=q.dtype, kv_data_type=k.dtype,
            )  # fmt: skip
            self._planned.add(kind)
        out: Tensor = wrapper.run(q.contiguous(), k.contiguous(), v.contiguous())
        return out
