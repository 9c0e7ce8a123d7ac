"""A checkpoint is read from its own files, and what cannot be served exactly is refused with one clear sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from embedq_schemas.errors import ModelError
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.engine.generate import END, generate_checkpoint


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), "utf-8")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return generate_checkpoint(tmp_path / "tiny-model")


def test_the_description_comes_from_the_files(tmp_path: Path) -> None:
    path = generate_checkpoint(
        tmp_path / "m", family="qwen2", pooling="mean", causal=False, normalize=False, dense=(48, 24), max_length=512
    )
    checkpoint = load_checkpoint(str(path))
    assert (checkpoint.architecture, checkpoint.pooling) == ("qwen2", "mean")
    assert (checkpoint.causal, checkpoint.normalize) == (False, False)
    assert (checkpoint.hidden_size, checkpoint.dimension, checkpoint.max_length) == (64, 24, 512)
    assert checkpoint.model_id == "m"
    assert checkpoint.prompts["query"].endswith("\nQuery:")
    assert checkpoint.default_prompt_name is None
    assert checkpoint.tokenizer_file == path.resolve() / "tokenizer.json"


def test_reading_a_checkpoint_imports_no_torch(model: Path) -> None:
    code = (
        "import sys; from embedq_worker.checkpoint import load_checkpoint; from embedq_worker.engine import *;"
        "load_checkpoint(sys.argv[1]); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(model)], check=True, timeout=60)


def test_the_smallest_length_that_is_set_counts(model: Path) -> None:
    edit(model / "tokenizer_config.json", model_max_length=1e30)
    assert load_checkpoint(str(model)).max_length == 32_768
    edit(model / "tokenizer_config.json", model_max_length=9000)
    assert load_checkpoint(str(model)).max_length == 9000
    edit(model / "sentence_bert_config.json", max_seq_length=700)
    assert load_checkpoint(str(model)).max_length == 700
    assert load_checkpoint(str(model), max_length=100).max_length == 100
    with pytest.raises(ModelError, match="max_length 701 is not between 2 and the 700"):
        load_checkpoint(str(model), max_length=701)


def test_yarn_extends_the_length(model: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    edit(model / "config.json", rope_scaling=scaling)
    edit(model / "tokenizer_config.json", model_max_length=131_072)
    assert load_checkpoint(str(model)).max_length == 131_072


def test_overrides_replace_what_the_files_say(model: Path) -> None:
    checkpoint = load_checkpoint(str(model), pooling="mean", normalize=False, causal=False)
    assert (checkpoint.pooling, checkpoint.normalize, checkpoint.causal) == ("mean", False, False)
    with pytest.raises(ModelError, match="unknown model override 'poling'"):
        load_checkpoint(str(model), poling="mean")
    with pytest.raises(ModelError, match="pooling 'median' is not supported"):
        load_checkpoint(str(model), pooling="median")


def test_another_dense_head_can_be_chosen(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m", dense=(48,))
    other = generate_checkpoint(tmp_path / "other", dense=(16,))
    (other / "2_Dense").rename(path / "2_Dense_16")
    assert load_checkpoint(str(path)).dimension == 48
    assert load_checkpoint(str(path), dense="2_Dense_16").dimension == 16


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "mean"},
        {"normalize": False},
        {"causal": False},
    ],
)
def test_a_setting_that_changes_vectors_changes_the_fingerprint(model: Path, change: dict[str, Any]) -> None:
    assert load_checkpoint(str(model), **change).fingerprint != load_checkpoint(str(model)).fingerprint


def test_every_file_that_changes_vectors_changes_the_fingerprint(tmp_path: Path, model: Path) -> None:
    seen = {load_checkpoint(str(model)).fingerprint}

    def fresh() -> bool:
        fingerprint = load_checkpoint(str(model)).fingerprint
        new = fingerprint not in seen
        seen.add(fingerprint)
        return new

    edit(model / "config.json", rope_theta=5000.0)
    assert fresh()
    edit(model / "config_sentence_transformers.json", prompts={"query": "Query: "})
    assert fresh()
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8") + "\n", "utf-8")
    assert fresh()
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert fresh()


def test_another_layout_of_the_same_weights_keeps_the_fingerprint(tmp_path: Path) -> None:
    names = [
        load_checkpoint(str(generate_checkpoint(tmp_path / name, **made))).fingerprint
        for name, made in {"a": {}, "b": {"prefix": True}, "c": {"shards": 3}}.items()
    ]
    assert len(set(names)) == 1


def test_two_seeds_are_two_models(tmp_path: Path) -> None:
    first = load_checkpoint(str(generate_checkpoint(tmp_path / "a", seed=1)))
    second = load_checkpoint(str(generate_checkpoint(tmp_path / "b", seed=2)))
    assert first.fingerprint != second.fingerprint


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "awq-quantised"),
    "encoder-decoder": ({"is_encoder_decoder": True}, "encoder-decoder"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "rope kind": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial rotary"),
    "no model type": ({"model_type": None}, "names no model_type"),
    "hidden size": ({"hidden_size": 65}, "embed_tokens.weight is .*; config.json implies"),
    "fewer layers than weights": ({"num_hidden_layers": 1}, "holds unexpected layers.1"),
    "more layers than weights": ({"num_hidden_layers": 3}, "lacks layers.2"),
    "odd heads": ({"num_key_value_heads": 3}, "do not fit together"),
    "window without mask": (
        {"is_causal": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        "without a causal mask",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_exactly_is_refused(model: Path, name: str) -> None:
    changes, message = REFUSED[name]
    edit(model / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(str(model))


def test_missing_places_are_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint folder at"):
        load_checkpoint(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match="is a file; expected a"):
        load_checkpoint(str(model / "config.json"))


def test_an_adapter_is_refused(model: Path) -> None:
    edit(model / "adapter_config.json", peft_type="LORA")
    with pytest.raises(ModelError, match="LoRA adapter; merge it"):
        load_checkpoint(str(model))


def test_a_checkpoint_without_fast_tokenizer_is_refused(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_checkpoint(str(model))


def test_damaged_weights_are_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="truncated"):
        load_checkpoint(str(model))
    weights.write_bytes(b"\xff" * 8 + whole[8:])
    with pytest.raises(ModelError, match="damaged: its header claims"):
        load_checkpoint(str(model))
    weights.write_bytes(whole[:4])
    with pytest.raises(ModelError, match="too short"):
        load_checkpoint(str(model))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m", shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_checkpoint(str(path))


def test_an_index_may_not_lead_outside_the_checkpoint(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m", shards=2)
    edit(path / "model.safetensors.index.json", weight_map={"norm.weight": "../../secret.safetensors"})
    with pytest.raises(ModelError, match="outside its folder"):
        load_checkpoint(str(path))


def test_modules_that_are_not_computed_are_refused(model: Path) -> None:
    modules = json.loads((model / "modules.json").read_text("utf-8"))
    odd = {"idx": 3, "name": "3", "path": "3_Weird", "type": "custom_code.Whitening"}
    (model / "modules.json").write_text(json.dumps([*modules, odd]), "utf-8")
    with pytest.raises(ModelError, match=r"uses 'custom_code\.Whitening'"):
        load_checkpoint(str(model))


def test_concatenated_poolings_are_refused(model: Path) -> None:
    edit(model / "1_Pooling" / "config.json", pooling_mode_mean_tokens=True)
    with pytest.raises(ModelError, match="concatenates mean, lasttoken"):
        load_checkpoint(str(model))


def test_prompts_left_out_of_mean_pooling_are_refused_and_can_be_overridden(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m", pooling="mean")
    edit(path / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(ModelError, match="include_prompt is false"):
        load_checkpoint(str(path))
    assert load_checkpoint(str(path), include_prompt=True).include_prompt


def test_a_folder_without_modules_json_pools_by_mean_and_says_so(model: Path) -> None:
    (model / "modules.json").unlink()
    checkpoint = load_checkpoint(str(model))
    assert (checkpoint.pooling, checkpoint.normalize) == ("mean", False)
    assert "no modules.json" in checkpoint.notes[0]


def test_the_generated_tokenizer_appends_the_end_token() -> None:
    from embedq_worker.engine.generate import _appending, small_tokenizer
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(_appending(small_tokenizer())))
    end = tokenizer.token_to_id(END)
    assert tokenizer.encode("").ids == [end]
    ids = tokenizer.encode("the world of vectors, 12 好").ids
    assert ids[-1] == end
    assert ids[0] == tokenizer.token_to_id("the")
    assert tokenizer.decode(ids) == "the world of vectors, 12 好"


def test_last_token_pooling_without_an_end_token_is_noted(model: Path) -> None:
    from embedq_worker.engine.generate import small_tokenizer

    assert not load_checkpoint(str(model)).notes
    (model / "tokenizer.json").write_text(json.dumps(small_tokenizer()), "utf-8")
    assert any("appends no end token" in note for note in load_checkpoint(str(model)).notes)
