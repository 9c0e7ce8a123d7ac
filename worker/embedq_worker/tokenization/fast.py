"""The fast path: gigatoken over Arrow buffers, with its memory kept within a bound."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]

from embedq_worker.tokenization.columns import TextColumn, TokenColumn

#: A word never seen before costs gigatoken's cache about ten times its bytes (measured on random words), so a cache
#: cannot have grown by B before B / 10 bytes of text went through.
_CACHE_BYTES_PER_TEXT_BYTE = 10

#: With several threads gigatoken cuts a text above 2 MiB at places it judges before normalising; whole texts are exact.
_PARALLEL_TEXT_BYTES = 1 << 20


class FastTokenizer:
    """A gigatoken tokenizer that is thrown away and loaded again when its cache has grown too large.

    gigatoken remembers every distinct word it has met and never forgets one. The cache lives in the tokenizer object,
    so dropping the object frees it; loading takes about half a second and the cache warms up again.
    """

    def __init__(self, serialized: bytes, *, threads: int, cache_bytes: int) -> None:
        """Load from the content of a tokenizer.json. Raises whatever gigatoken raises, panics included."""
        self._serialized = serialized
        self._parallel = threads > 1
        self._cache_bytes = cache_bytes
        self._process = psutil.Process()
        self.reloads = 0
        self._load()

    def _load(self) -> None:
        import gigatoken

        self._tokenizer: Any = gigatoken.Tokenizer.from_json(self._serialized)
        self._text_bytes = 0
        self._resident_floor = self._resident()

    @property
    def is_byte_level_bpe(self) -> bool:
        return type(self._tokenizer.backend).__name__ == "BPETokenizer"

    def encode(self, texts: TextColumn) -> TokenColumn:
        """Token ids of every text, without special tokens. Raises whatever gigatoken raises, panics included."""
        if len(texts) == 0:
            return TokenColumn(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.uint32))
        parallel = self._parallel and int(np.diff(texts.offsets).max()) <= _PARALLEL_TEXT_BYTES
        layout = self._tokenizer.encode_batch(_as_awkward(texts), parallel=parallel).layout
        offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data)
        tokens = TokenColumn(offsets.astype(np.int64, copy=False), ids[: offsets[-1]].astype(np.uint32, copy=False))
        self._bound_cache(len(texts.data))
        return tokens

    def reload(self) -> None:
        """Drop the tokenizer with its cache, give the memory back to the system, and load a fresh one."""
        del self._tokenizer
        _release_free_memory()
        self._load()
        self.reloads += 1

    def _bound_cache(self, text_bytes: int) -> None:
        """Reload once resident memory has risen by the bound since loading, if the cache can be the cause of it.

        The process holds other things whose growth must not cause reloads in a row; requiring enough text in between
        keeps them rare. The floor follows memory down, so what others gave back does not become room for the cache.
        """
        self._text_bytes += text_bytes
        resident = self._resident()
        self._resident_floor = min(self._resident_floor, resident)
        grown = resident - self._resident_floor
        if grown > self._cache_bytes and self._text_bytes * _CACHE_BYTES_PER_TEXT_BYTE > self._cache_bytes:
            self.reload()

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


def _as_awkward(texts: TextColumn) -> Any:
    import awkward

    characters = awkward.contents.NumpyArray(texts.data, parameters={"__array__": "char"})
    return awkward.Array(
        awkward.contents.ListOffsetArray(
            awkward.index.Index64(texts.offsets), characters, parameters={"__array__": "string"}
        )
    )


def _release_free_memory() -> None:
    # glibc keeps freed memory for itself: of 260 MB that dropping a tokenizer frees, 90 MB came back only by trimming.
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
