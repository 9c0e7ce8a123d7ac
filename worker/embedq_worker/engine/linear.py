"""Matrix products with fixed weights: plain, or packed once for oneDNN."""

from __future__ import annotations

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
    """A CPU bfloat16 product whose weight is in the blocked layout oneDNN would otherwise make at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def make_linear(weight: Tensor, bias: Tensor | None = None, *, packed_rows: int | None = None) -> Linear:
    """`packed_rows`: pack for batches of about that many tokens; None: leave the weight as it is."""
    if packed_rows is None:
        return PlainLinear(weight, bias)
    return PackedLinear(weight, bias, packed_rows)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has packed bfloat16 products here."""
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
