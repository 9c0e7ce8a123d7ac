"""Inspect, doctor and bench say what is true of this checkpoint and this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from embedq_schemas.errors import ModelError
from embedq_worker.bench import measure_speed
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.doctor import examine
from embedq_worker.engine import EngineSettings, load_engine
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.inspect import inspect_checkpoint


def test_inspect_tells_what_was_read_and_what_will_be_done(tmp_path: Path) -> None:
    path = generate_checkpoint(
        tmp_path / "m", family="qwen2", causal=False, pooling="mean", dense=(48,), dtype="bfloat16"
    )
    found = inspect_checkpoint(load_checkpoint(str(path)))
    assert found.read["attention"] == "bidirectional"
    assert found.read["dimension"] == "48"
    assert "2_Dense (64 to 48, Identity)" in found.read["dense"]
    assert found.plan["engine"] == "native, packed"
    assert found.plan["vector"] == "pool, 2_Dense, slice to dimensions if asked, L2"
    assert found.plan["last layer"] == "whole"
    assert found.plan["common beginnings"] == "in each text"
    stored = (path / "model.safetensors").stat().st_size
    assert 0.9 * stored < found.weight_bytes < stored


def test_inspect_loads_no_torch(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m")
    code = (
        "import sys; from embedq_worker.inspect import inspect_checkpoint; from embedq_worker.checkpoint import *;"
        "inspect_checkpoint(load_checkpoint(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


def test_a_float16_checkpoint_is_noted(tmp_path: Path) -> None:
    path = generate_checkpoint(tmp_path / "m", dtype="float16")
    assert any("float16" in note for note in inspect_checkpoint(load_checkpoint(str(path))).notes)


def test_asking_for_float16_is_noted_with_its_danger(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(generate_checkpoint(tmp_path / "m")))
    settings = EngineSettings(device="cpu", dtype="float16", threads=1, max_batch_tokens=64)
    assert "float16 overflows" in load_engine(checkpoint, settings).description["notes"]


def test_doctor_names_every_part_with_a_reason() -> None:
    import torch

    findings = {finding.subject: finding for finding in examine()}
    assert findings["torch"].detail == torch.__version__
    assert findings["attention sdpa"].state == "ok"
    assert "usable cores" in findings["cpu"].detail
    if not torch.cuda.is_available():
        assert findings["gpu"].state == "missing"
        assert findings["attention flash_attn"].detail == "needs a GPU"
    assert all(finding.detail for finding in findings.values())


def test_bench_measures_full_batches(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(generate_checkpoint(tmp_path / "m")))
    engine = load_engine(checkpoint, EngineSettings(device="cpu", dtype="float32", threads=1, max_batch_tokens=256))
    (speed,) = measure_speed(checkpoint, engine, text_tokens=[100], repeats=1)
    assert checkpoint.decoder is not None
    assert (speed.text_tokens, speed.batch_tokens) == (100, 200)
    assert speed.flops == pytest.approx(2 * checkpoint.decoder.parameters * speed.tokens_per_second)
    assert speed.tokens_per_second > 0
    assert speed.share > 0


def test_bench_is_for_models_whose_flops_are_known(tmp_path: Path) -> None:
    import dataclasses

    checkpoint = load_checkpoint(str(generate_checkpoint(tmp_path / "m")))
    engine = load_engine(checkpoint, EngineSettings(kind="null"))
    other = dataclasses.replace(checkpoint, decoder=None, model_type="bert")
    with pytest.raises(ModelError, match="is bert"):
        measure_speed(other, engine)
