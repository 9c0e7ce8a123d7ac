"""Compact vectors: what each type stores, how float32 becomes it, and what it stands for.

The definitions are those of `quantize_embeddings` in sentence-transformers, so that its arrays and ours are equal.
Reading back is ours: the middle of a bucket for int8 and uint8, the nearest unit vector for binary and ubinary.
"""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedq_schemas.errors import EngineError

BUCKETS = 256


class VectorType(StrEnum):
    """How a vector of d components is stored."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"  # half the bytes; the nearest value
    INT8 = "int8"  # a quarter: the bucket of each component, out of 256 between its dimension's ranges, less 128
    UINT8 = "uint8"  # the bucket itself
    BINARY = "binary"  # a 32nd: one bit for each component, 1 where it is above 0; bytes less 128, as int8
    UBINARY = "ubinary"  # the bytes themselves; the first component is the highest bit of the first one

    @property
    def floating(self) -> bool:
        """Whether components are stored as numbers of their own scale."""
        return self in (VectorType.FLOAT32, VectorType.FLOAT16)

    @property
    def ranged(self) -> bool:
        """Whether values mean nothing without ranges."""
        return self in (VectorType.INT8, VectorType.UINT8)

    @property
    def packed(self) -> bool:
        """Whether only signs are kept, eight to a byte."""
        return self in (VectorType.BINARY, VectorType.UBINARY)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Of the array of stored vectors."""
        names = {VectorType.BINARY: "int8", VectorType.UBINARY: "uint8"}
        return np.dtype(names.get(self, self.value))

    def width(self, dimension: int) -> int:
        """Numbers stored for a vector of `dimension` components: `dimension`, or an eighth of it."""
        return dimension // 8 if self.packed else dimension

    def row_bytes(self, dimension: int) -> int:
        """Bytes stored for a vector of `dimension` components."""
        return self.width(dimension) * self.dtype.itemsize

    def arrow(self, dimension: int) -> pa.DataType:
        """The Arrow column: a fixed-size list of never-null floats, else fixed-size binary.

        In Parquet a list of small integers takes as much as one of float32.
        """
        if self.floating:
            return pa.list_(pa.field("item", pa.from_numpy_dtype(self.dtype)), dimension)
        return pa.binary(self.row_bytes(dimension))

    def fault(self, dimension: int, ranges: NDArray[np.float32] | None) -> str | None:
        """Why vectors of `dimension` components cannot be of this type with these ranges; None if they can."""
        if self.packed and dimension % 8:
            return f"{self} vectors pack 8 components into a byte: {dimension} dimensions are no multiple of 8"
        if ranges is not None and ranges.shape != (2, dimension):
            return f"the ranges are {list(ranges.shape)}, those of {dimension} dimensions are [2, {dimension}]"
        return None


def ranges_of(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Smallest and largest value of each dimension of `vectors` (float32 [n, d], n >= 1): float32 [2, d]."""
    return np.stack((vectors.min(axis=0), vectors.max(axis=0)))


def quantize(
    vectors: NDArray[np.float32], kind: VectorType, ranges: NDArray[np.float32] | None = None
) -> NDArray[np.generic]:
    """`vectors` (float32 [n, d]) as they are stored: [n, kind.width(d)] of kind.dtype.

    Args:
        vectors: finite; of any norm.
        ranges: float32 [2, d], for int8 and uint8. What lies outside goes into the outermost bucket. A dimension whose
            ends are equal has one bucket of size 1 above them.

    Raises:
        EngineError: a vector holds NaN or infinity, or is too large for float16.
    """
    if not np.isfinite(vectors).all():
        raise EngineError("a vector holds NaN or infinity")
    if kind is VectorType.FLOAT32:
        return vectors
    if kind is VectorType.FLOAT16:
        if np.abs(vectors).max(initial=0) > np.finfo(np.float16).max:
            raise EngineError("a vector holds a value beyond 65504, the largest of float16")
        return np.asarray(vectors, np.float16)
    if kind.ranged:
        assert ranges is not None, "int8 and uint8 need ranges"
        starts, steps = _buckets(ranges)
        buckets = np.clip(np.floor((vectors - starts) / steps), 0, BUCKETS - 1)
        return np.asarray(buckets - 128 if kind is VectorType.INT8 else buckets, kind.dtype)
    bits = np.packbits(vectors > 0, axis=-1)
    return _offset(bits).view(np.int8) if kind is VectorType.BINARY else bits


def dequantize(
    stored: NDArray[np.generic], kind: VectorType, ranges: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """What stored vectors stand for: float32 [n, d].

    int8, uint8: the middle of each bucket, or the value of a dimension that has only one. binary, ubinary: the unit
    vector with these signs, whose components are 1/sqrt(d) and -1/sqrt(d).
    """
    if kind.floating:
        return np.asarray(stored, np.float32)
    if kind.ranged:
        assert ranges is not None, "int8 and uint8 need ranges"
        starts, steps = _buckets(ranges)
        middles = np.where(ranges[0] == ranges[1], np.float32(0), np.float32(0.5))
        buckets = stored.astype(np.float32) + np.float32(128 if kind is VectorType.INT8 else 0)
        return (buckets + middles) * steps + starts
    signs = np.unpackbits(bits_of(stored, kind), axis=-1).astype(np.float32)
    return (signs * 2 - 1) / np.float32(np.sqrt(signs.shape[-1]))


def bits_of(stored: NDArray[np.generic], kind: VectorType) -> NDArray[np.uint8]:
    """Stored binary or ubinary vectors as ubinary: uint8 [n, d / 8]."""
    plain = stored.view(np.uint8)
    return _offset(plain) if kind is VectorType.BINARY else plain


def _offset(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Add 128, or take it away, modulo 256."""
    return values ^ np.uint8(128)


def _buckets(ranges: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    starts, ends = ranges
    steps = (ends - starts) / np.float32(BUCKETS - 1)
    return starts, np.where(steps == 0, np.float32(1), steps)


def encode_ranges(ranges: NDArray[np.float32]) -> str:
    """`ranges` as text: base64 of their little-endian bytes, minima first."""
    return base64.b64encode(np.ascontiguousarray(ranges, "<f4").tobytes()).decode()


def decode_ranges(text: str) -> NDArray[np.float32]:
    """Inverse of `encode_ranges`; raises ValueError unless they are finite, each minimum at most its maximum."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("ranges are base64 of float32 [2, dimensions]") from None
    if not data or len(data) % 8:
        raise ValueError(f"ranges of {len(data)} bytes, expected float32 [2, dimensions]")
    return checked_ranges(np.frombuffer(data, "<f4").reshape(2, -1))


def checked_ranges(ranges: NDArray[np.generic]) -> NDArray[np.float32]:
    """`ranges` if they are float32 [2, d], finite, each minimum at most its maximum; raises ValueError."""
    if ranges.dtype != np.float32 or ranges.ndim != 2 or len(ranges) != 2 or not ranges.shape[1]:
        raise ValueError(f"ranges are float32 [2, dimensions], found {ranges.dtype} {list(ranges.shape)}")
    found = ranges.astype(np.float32)
    with np.errstate(over="ignore"):
        widths = found[1] - found[0]
    if not np.isfinite(widths).all() or (widths < 0).any():
        raise ValueError("ranges must be finite, and each minimum at most its maximum")
    return found
