"""A model split over ranks gives one rank's vectors, and a lost rank ends its group instead of hanging it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedq_schemas.errors import EngineError, ModelError
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.engine import EngineSettings, PackedBatch, load_engine
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.native import NativeEngine

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-odd-vocabulary": {"vocab_size": 1031, "heads": 8, "kv_heads": 4, "head_dim": 16},
    "qwen2-mean-dense-replicated-heads": {"family": "qwen2", "pooling": "mean", "dense": (48,), "causal": False},
    "qwen3-attention-bias": {"config": {"attention_bias": True}, "heads": 4, "kv_heads": 4},
}


def batch(vocab_size: int, lengths: list[int]) -> PackedBatch:
    rng = np.random.default_rng(0)
    return PackedBatch.of([rng.integers(0, vocab_size, size).tolist() for size in lengths])


def split(path: Path, size: int, dtype: str = "float32") -> NativeEngine:
    engine = load_engine(
        load_checkpoint(str(path)),
        EngineSettings(
            kind="native", device="cpu", dtype=dtype, threads=1, tensor_parallel=size, max_batch_tokens=2048
        ),
    )
    assert isinstance(engine, NativeEngine)
    return engine


@pytest.mark.parametrize(("size", "name"), [(2, name) for name in MODELS] + [(4, "qwen3-odd-vocabulary")])
def test_ranks_together_give_one_ranks_vectors(tmp_path: Path, size: int, name: str) -> None:
    path = generate_checkpoint(tmp_path / "m", **MODELS[name])
    checkpoint = load_checkpoint(str(path))
    texts = batch(checkpoint.vocab_size, [1, 7, 130, 64])
    alike = PackedBatch.of([texts.input_ids[start:].tolist() for start in (0, 8, 8, 100)])
    one = split(path, 1)
    engine = split(path, size)
    try:
        for part in (texts, alike, texts):
            assert np.abs(engine.encode(part) - one.encode(part)).max() <= 1e-5
    finally:
        engine.close()


def test_bfloat16_ranks_agree(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m", head_dim=32, intermediate_size=256)
    texts = batch(load_checkpoint(str(path)).vocab_size, [50, 3])
    expected = split(path, 1).encode(texts)
    engine = split(path, 2, "bfloat16")
    try:
        assert (engine.encode(texts) * expected).sum(1).min() >= 0.999
    finally:
        engine.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_rank_ends_its_group_within_seconds(tmp_path: Path, sent: signal.Signals) -> None:
    path = generate_checkpoint(tmp_path / "m", layers=4)
    texts = batch(load_checkpoint(str(path)).vocab_size, [20] * 10)
    engine = split(path, 2)
    assert engine._ranks is not None
    (process,) = engine._ranks._processes
    try:
        engine.encode(texts)
        os.kill(process.pid, sent)
        start = time.monotonic()
        time.sleep(0.2)  # the signal is on its way
        with pytest.raises(EngineError, match="rank 1 ended"):
            engine.encode(texts)
        with pytest.raises(EngineError, match="group has ended"):
            engine.encode(texts)
        assert time.monotonic() - start < 20
    finally:
        engine.close()


def test_ranks_exit_when_the_engine_closes(tmp_path: Path) -> None:
    engine = split(generate_checkpoint(tmp_path / "m"), 2)
    assert engine._ranks is not None
    (process,) = engine._ranks._processes
    engine.close()
    assert process.poll() is not None


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m")
    checkpoint = load_checkpoint(str(path))
    config = json.loads((path / "config.json").read_text("utf-8"))
    # The file changes between rank 0's reading and the rank's own.
    (path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 3}), "utf-8")
    with pytest.raises(ModelError, match=r"rank 1 .* could not load its share: ModelError: 3 heads"):
        load_engine(checkpoint, EngineSettings(device="cpu", dtype="float32", threads=1, tensor_parallel=2))


def test_a_model_that_does_not_split_evenly_is_refused(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(generate_checkpoint(tmp_path / "m", heads=6, kv_heads=3, hidden_size=48)))
    with pytest.raises(ModelError, match="do not split over 4 ranks"):
        load_engine(checkpoint, EngineSettings(device="cpu", tensor_parallel=4))
