"""Choosing `max_batch_tokens` by measuring, once per device and model; and proving at start that memory suffices."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from embedq_schemas.errors import EngineError, ModelError

from embedq_worker.checkpoint import DecoderConfig
from embedq_worker.engine.base import PackedBatch
from embedq_worker.prefixes import MOST_WHOLE

#: Tokens of the texts a sweep is made of: a usual paragraph.
_TEXT = 128
_CANDIDATES = {"cpu": (512, 1024, 2048, 4096), "cuda": (4096, 8192, 16_384, 32_768, 65_536)}
_DEFAULT = {"cpu": 2048, "cuda": 16_384}
#: A larger batch has to be clearly faster: it needs more memory, and one lost batch loses more work.
_GAIN = 1.03
#: Seconds a sweep may take; slower models keep the default.
_BUDGET = 15.0


def uniform_batch(tokens: int, text: int, *, vocab_size: int, alike: int = 0) -> PackedBatch:
    """`tokens` token ids in texts of `text` tokens (the last one shorter), whose first `alike` tokens are the same."""
    offsets = np.unique(np.append(np.arange(0, tokens, text), tokens)).astype(np.int32)
    starts, places = np.repeat(offsets[:-1], np.diff(offsets)), np.arange(tokens)
    within = places - starts
    # The next token is each text's own, so that nothing else is computed once for several of them.
    numbers = np.where(within < alike, within, np.where(within == alike, starts // text, places * 7919))
    return PackedBatch((numbers % vocab_size).astype(np.uint32), offsets)


def choose_batch_tokens(
    encode: Callable[[PackedBatch], object],
    key: Mapping[str, str],
    *,
    device_type: str,
    vocab_size: int,
    max_length: int,
) -> int:
    """The batch size with the best tokens/s; remembered under `key` in the user's cache."""
    file = _cache_file()
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:24]
    known = _read(file).get(name)
    if isinstance(known, int) and known > 0:
        return known
    chosen, measured = _sweep(encode, device_type, vocab_size, min(_TEXT, max_length))
    if measured:
        _remember(file, name, chosen)
    return chosen


def _sweep(encode: Callable[[PackedBatch], object], device_type: str, vocab_size: int, text: int) -> tuple[int, bool]:
    kind = "cuda" if device_type == "cuda" else "cpu"
    candidates, default = _CANDIDATES[kind], _DEFAULT[kind]

    def seconds(tokens: int) -> float:
        batch = uniform_batch(tokens, text, vocab_size=vocab_size)
        start = time.perf_counter()
        encode(batch)
        return time.perf_counter() - start

    seconds(candidates[0])  # compiles, allocates
    expected = seconds(candidates[0]) / candidates[0] * 2 * sum(candidates)
    if expected > _BUDGET:
        return default, False
    best, rate = candidates[0], 0.0
    for tokens in candidates:
        try:
            found = tokens / min(seconds(tokens), seconds(tokens))
        except EngineError:
            break  # out of memory: the largest that ran is the limit
        if found > rate * _GAIN:
            best, rate = tokens, found
    return best, True


def values_per_token(config: DecoderConfig, *, shares_prefixes: bool) -> int:
    """Values alive at once for each computed token of a batch: the residual, one layer's widest pair of buffers."""
    # Keys and values of whole texts are gathered where texts begin alike.
    gathered = 2 * MOST_WHOLE * config.num_kv_heads if shares_prefixes else 0
    attention = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads + gathered)
    return 4 * config.hidden_size + 3 * config.intermediate_size + attention


def check_memory(width: int, *, tokens: int, itemsize: int) -> None:
    """Raises ModelError where `tokens` tokens of `width` values cannot fit this machine's free memory."""
    import psutil

    needed, free = tokens * width * itemsize, psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"a text of {tokens} tokens needs {needed / 1e9:.1f} GB while it runs, and {free / 1e9:.1f} GB are free; "
            "lower max_length or max_batch_tokens"
        )


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "embedq" / "batch-tokens.json"


def _read(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _remember(file: Path, name: str, chosen: int) -> None:
    # A cache that cannot be written costs the next start a sweep, nothing else.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps({**_read(file), name: chosen}), "utf-8")
        part.replace(file)
