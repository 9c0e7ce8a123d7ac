"""What tells texts apart: their SHA-256, and its beginning where 8 bytes are enough."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def hash_texts(texts: pa.StringArray) -> pa.FixedSizeBinaryArray:
    """SHA-256 of each text's UTF-8 bytes: FixedSizeBinary(32) [n]. `texts` holds no nulls."""
    buffers = texts.buffers()
    offsets = np.frombuffer(buffers[1], np.int32, count=len(texts) + 1, offset=4 * texts.offset).tolist()
    data = memoryview(buffers[2]) if buffers[2] is not None else memoryview(b"")
    sha256 = hashlib.sha256
    digests = [sha256(data[start:end]).digest() for start, end in itertools.pairwise(offsets)]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(texts), [None, pa.py_buffer(b"".join(digests))])


def digest_bytes(digests: pa.FixedSizeBinaryArray) -> NDArray[np.uint8]:
    """uint8 [n, 32], a view of the array's buffer. `digests` holds no nulls."""
    data = np.frombuffer(digests.buffers()[1] or b"", dtype=np.uint8)[: 32 * (digests.offset + len(digests))]
    return data.reshape(-1, 32)[digests.offset :]


def text_keys(digests: pa.FixedSizeBinaryArray) -> NDArray[np.uint64]:
    """The first 8 bytes of each digest, uint64 [n]: among n texts two share them with at most n**2 / 2**65."""
    return np.ascontiguousarray(digest_bytes(digests)[:, :8]).view(np.uint64)[:, 0]
