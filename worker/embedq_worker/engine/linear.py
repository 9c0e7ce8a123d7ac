"""Matrix products with fixed weights: plain, or packed once for oneDNN."""

from __future__ import annotations

import functools
import math
import time
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x [tokens, in] -> [tokens, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A CPU product whose weight is in the blocked layout that oneDNN would otherwise make at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        # Its strides are not looked at.
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def make_linear(weight: Tensor, bias: Tensor | None = None, *, packed_rows: int | None = None) -> Linear:
    """`packed_rows`: pack for batches of about that many tokens; None: leave the weight as it is."""
    if packed_rows is None:
        return PlainLinear(weight, bias)
    return PackedLinear(weight, bias, packed_rows)


def pays_to_pack(dtype: torch.dtype, device: torch.device, *, ranks: int = 1) -> bool:
    """Whether oneDNN's packed products are the faster ones here. Measured for float32, with torch's present threads."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # What is measured may differ from rank to rank, and all have to round batches alike.
    return dtype is torch.float32 and ranks == 1 and _packed_float32_is_faster(torch.get_num_threads())


@functools.cache
def _packed_float32_is_faster(threads: int) -> bool:
    """With `threads` threads, which torch has now. Its plain products are MKL's, good on some makers' CPUs only."""
    x, weight = torch.ones(512, 1024), torch.ones(2048, 1024)
    try:
        products: tuple[Linear, Linear] = (PlainLinear(weight), PackedLinear(weight, None, len(x)))
    except (AttributeError, RuntimeError):
        return False  # torch for other CPUs may be built with a oneDNN that has no packed products
    best = [math.inf, math.inf]
    with torch.inference_mode():
        for _ in range(6):  # the best of several, in turns: what else happens only ever makes it slower
            for kind, product in enumerate(products):
                start = time.perf_counter()
                product(x)
                best[kind] = min(best[kind], time.perf_counter() - start)
    plain, packed = best
    return packed < 0.95 * plain
