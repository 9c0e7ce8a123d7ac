"""Every kind of Qwen2/Qwen3 embedding checkpoint gives sentence-transformers' vectors, however it is batched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedq_worker.checkpoint import Checkpoint, load_checkpoint
from embedq_worker.engine import Engine, EngineSettings, PackedBatch, load_engine
from embedq_worker.engine.generate import generate_checkpoint
from reference import Reference, cosines

YARN: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    "max_position_embeddings": 32768,
}
YARN_NEW: dict[str, Any] = {
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
}
LINEAR: dict[str, Any] = {"rope_scaling": {"type": "linear", "factor": 2.0}}
PLAIN_NEW: dict[str, Any] = {
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}
SLIDING_TYPES: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 33,
    "layer_types": ["full_attention", "sliding_attention"],
}


@dataclass(frozen=True)
class Case:
    name: str
    made: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


CASES = [
    Case("qwen3-embedding", {"head_dim": 32}),
    Case("qwen3-embedding-prefixed-sharded", {"head_dim": 32, "prefix": True, "shards": 3}),
    Case("qwen3-untied-odd-vocabulary", {"tied": False, "vocab_size": 1031, "prefix": True}),
    Case("qwen3-one-head-group", {"heads": 6, "kv_heads": 1, "head_dim": 16, "hidden_size": 48}),
    Case("qwen3-no-groups", {"heads": 4, "kv_heads": 4}),
    Case("qwen3-four-layers", {"layers": 4, "seed": 5}),
    Case("qwen3-attention-bias", {"config": {"attention_bias": True}}),
    Case("qwen3-bidirectional-mean-unnormalised", {"causal": False, "pooling": "mean", "normalize": False}),
    Case("qwen3-mean-dense", {"pooling": "mean", "dense": (48,)}),
    Case("qwen3-lasttoken-two-dense", {"dense": (96, 24)}),
    Case("qwen3-yarn", {"config": YARN}),
    Case("qwen3-yarn-rope-parameters", {"config": YARN_NEW, "head_dim": 64}),
    Case("qwen3-linear-rope", {"config": LINEAR}),
    Case("qwen3-rope-parameters", {"config": PLAIN_NEW}),
    Case("qwen3-sliding-window", {"config": SLIDING, "layers": 3}),
    Case("qwen3-sliding-layer-types-mean", {"config": SLIDING_TYPES, "pooling": "mean"}),
    Case("qwen3-unnormalised", {"normalize": False}),
    Case("qwen3-max", {"pooling": "max"}),
    Case("qwen3-stored-bfloat16", {"dtype": "bfloat16", "prefix": True}),
    Case("qwen2-lasttoken", {"family": "qwen2"}),
    Case("qwen2-gte-bidirectional", {"family": "qwen2", "causal": False, "prefix": True, "tied": False}),
    Case("qwen2-kalm-mean", {"family": "qwen2", "pooling": "mean", "heads": 7, "kv_heads": 1, "hidden_size": 56}),
    Case("qwen2-stella-dense", {"family": "qwen2", "pooling": "mean", "causal": False, "dense": (128,), "shards": 2}),
    Case("qwen2-jina-code", {"family": "qwen2", "seed": 3, "vocab_size": 777}),
    Case("qwen2-weightedmean", {"family": "qwen2", "pooling": "weightedmean"}),
    Case("qwen2-yarn-sharded", {"family": "qwen2", "config": YARN, "shards": 4, "prefix": True}),
    Case("qwen2-sliding-window", {"family": "qwen2", "config": SLIDING, "layers": 3}),
    Case("qwen2-cls", {"family": "qwen2", "pooling": "cls", "causal": False}),
    Case("qwen3-bfloat16", {"head_dim": 32}, "bfloat16"),
    Case("qwen3-bfloat16-mean-dense", {"pooling": "mean", "dense": (48,), "dtype": "bfloat16"}, "bfloat16"),
    Case("qwen2-bfloat16-bidirectional", {"family": "qwen2", "causal": False, "pooling": "mean"}, "bfloat16"),
]


@dataclass(frozen=True)
class Loaded:
    case: Case
    checkpoint: Checkpoint
    engine: Engine
    reference: Reference


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    case: Case = request.param
    path = generate_checkpoint(tmp_path_factory.mktemp("model"), **case.made)
    checkpoint = load_checkpoint(str(path))
    engine = load_engine(
        checkpoint, EngineSettings(kind="native", device="cpu", dtype=case.dtype, threads=2, max_batch_tokens=2048)
    )
    yield Loaded(case, checkpoint, engine, Reference(path))
    engine.close()


def random_texts(checkpoint: Checkpoint, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, checkpoint.vocab_size, size).tolist() for size in lengths]


def assert_parity(loaded: Loaded, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    if loaded.case.dtype == "float32":
        assert np.abs(found - expected).max() <= 1e-5
        assert cosines(found, expected).min() >= 0.999999
    else:
        assert cosines(found, expected).min() >= 0.999


def run(loaded: Loaded, texts: list[list[int]]) -> np.ndarray:
    return loaded.engine.encode(PackedBatch.of(texts), normalize=loaded.checkpoint.normalize)


def test_a_batch_of_mixed_lengths_in_any_order_equals_the_reference(loaded: Loaded) -> None:
    texts = random_texts(loaded.checkpoint, [1, 2, 7, 40, 129, 300, 16, 64, 65])
    expected = loaded.reference.vectors(texts)
    assert_parity(loaded, run(loaded, texts), expected)
    order = np.random.default_rng(1).permutation(len(texts))
    assert_parity(loaded, run(loaded, [texts[i] for i in order]), expected[order])


def test_single_texts_and_equal_lengths_equal_the_reference(loaded: Loaded) -> None:
    texts = random_texts(loaded.checkpoint, [33] * 6, seed=2)
    expected = loaded.reference.vectors(texts)
    assert_parity(loaded, run(loaded, texts), expected)
    assert_parity(loaded, np.concatenate([run(loaded, [text]) for text in texts]), expected)


def test_texts_that_begin_alike_equal_the_reference(loaded: Loaded) -> None:
    """Whether a beginning is shared by two or by all, is a text itself, or is longer than a window or a block."""
    head, more, *ends = random_texts(loaded.checkpoint, [70, 90, 1, 2, 30, 130, 9, 5], seed=6)
    texts = [[*head, *end] for end in ends[:4]] + [[*head, *more, *end] for end in ends[2:]]
    texts += [head, head, [*head, *more], ends[5], head[:1], [*head, *more, *head]]
    order = np.random.default_rng(2).permutation(len(texts))
    shuffled = [texts[index] for index in order]
    assert_parity(loaded, run(loaded, shuffled), loaded.reference.vectors(shuffled))


def test_a_text_of_4096_tokens_among_short_ones_equals_the_reference(loaded: Loaded) -> None:
    texts = random_texts(loaded.checkpoint, [5, 4096, 31], seed=3)
    assert_parity(loaded, run(loaded, texts), loaded.reference.vectors(texts))


@pytest.mark.long
def test_a_text_of_the_full_length_equals_the_reference(loaded: Loaded) -> None:
    texts = random_texts(loaded.checkpoint, [loaded.checkpoint.max_length, 9], seed=4)
    assert len(texts[0]) == 32768
    assert_parity(loaded, run(loaded, texts), loaded.reference.vectors(texts))


@pytest.mark.parametrize("made", [{"layers": 1}, {"layers": 1, "family": "qwen2", "causal": False, "pooling": "mean"}])
def test_32768_tokens_equal_the_reference_with_one_layer(made: dict[str, Any], tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path, heads=1, kv_heads=1, hidden_size=64, **made)
    checkpoint = load_checkpoint(str(path))
    engine = load_engine(checkpoint, EngineSettings(device="cpu", dtype="float32", threads=2))
    short = Loaded(Case("long"), checkpoint, engine, Reference(path))
    texts = random_texts(checkpoint, [32768])
    assert_parity(short, run(short, texts), short.reference.vectors(texts))


def test_matryoshka_slices_after_dense_and_before_normalising(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "normalised", dense=(48,), pooling="mean")
    raw_path = generate_checkpoint(tmp_path / "raw", dense=(48,), pooling="mean", normalize=False)
    checkpoint = load_checkpoint(str(path))
    engine = load_engine(checkpoint, EngineSettings(device="cpu", dtype="float32", threads=1))
    texts = random_texts(checkpoint, [3, 50])
    whole = Reference(raw_path).vectors(texts)[:, :16]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    found = engine.encode(PackedBatch.of(texts), dimensions=16)
    assert np.abs(found - expected).max() <= 1e-5
    raw = engine.encode(PackedBatch.of(texts), dimensions=16, normalize=False)
    assert np.abs(raw - whole).max() <= 1e-5


def test_pickled_weights_give_the_same_vectors(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    path = generate_checkpoint(tmp_path, prefix=True, tied=False)
    settings = EngineSettings(device="cpu", dtype="float32", threads=1)
    texts = PackedBatch.of(random_texts(load_checkpoint(str(path)), [4, 60]))
    expected = load_engine(load_checkpoint(str(path)), settings).encode(texts)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert np.array_equal(load_engine(load_checkpoint(str(path)), settings).encode(texts), expected)
