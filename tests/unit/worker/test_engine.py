"""The engine's contract: what goes in is checked, what comes out is the same however texts are batched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import pytest
from embedq_schemas.errors import EngineError, ModelError
from embedq_worker.checkpoint import Checkpoint, load_checkpoint
from embedq_worker.engine import Engine, EngineSettings, PackedBatch, load_engine
from embedq_worker.engine.generate import generate_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(str(generate_checkpoint(tmp_path_factory.mktemp("model") / "m", max_length=512)))


def load(checkpoint: Checkpoint, **options: Any) -> Engine:
    defaults = {"device": "cpu", "dtype": "float32", "threads": 1, "max_batch_tokens": 512}
    return load_engine(checkpoint, EngineSettings(**{**defaults, **options}))


@pytest.fixture(scope="module")
def native(checkpoint: Checkpoint) -> Engine:
    return load(checkpoint)


@pytest.fixture(scope="module")
def null(checkpoint: Checkpoint) -> Engine:
    return load(checkpoint, kind="null")


@pytest.fixture(params=["native", "null"])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


def test_vectors_are_unit_float32_rows_in_order(engine: Engine) -> None:
    vectors = engine.encode(PackedBatch.of([[1, 2, 3], [4], [1, 2, 3]]))
    assert vectors.shape == (3, engine.dimension)
    assert vectors.dtype == np.float32
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    assert np.abs(vectors[0] - vectors[2]).max() < 1e-6
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def test_an_empty_batch_gives_no_rows(engine: Engine) -> None:
    assert engine.encode(PackedBatch.of([])).shape == (0, engine.dimension)
    assert engine.encode(PackedBatch.of([]), dimensions=8).shape == (0, 8)


def test_fewer_dimensions_are_the_slice_normalised_again(engine: Engine) -> None:
    batch = PackedBatch.of([[5, 6], [7]])
    whole = engine.encode(batch, normalize=False)
    sliced = engine.encode(batch, dimensions=16)
    assert np.abs(sliced - whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)).max() < 1e-6


@pytest.mark.parametrize("dimensions", [0, -1, 65])
def test_impossible_dimensions_are_engine_errors(engine: Engine, dimensions: int) -> None:
    with pytest.raises(EngineError, match="is not between 1 and the model's 64"):
        engine.encode(PackedBatch.of([[1]]), dimensions=dimensions)


BAD_BATCHES: dict[str, tuple[list[int], list[int], str]] = {
    "id outside the vocabulary": ([1, 10**6], [0, 2], "outside the vocabulary"),
    "empty text": ([1, 2], [0, 0, 2], "text 0 of the batch has no tokens"),
    "falling offsets": ([1, 2, 3], [0, 2, 1, 3], "has no tokens"),
    "offsets not from zero": ([1, 2, 3], [1, 3], "must run from 0 to 3"),
    "offsets past the end": ([1, 2, 3], [0, 4], "must run from 0 to 3"),
    "no offsets": ([], [], "must run from 0"),
    "too long": ([1] * 513, [0, 513], "has 513 tokens; the model takes 512"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_malformed_batch_is_an_engine_error_and_the_engine_lives_on(engine: Engine, name: str) -> None:
    ids, offsets, message = BAD_BATCHES[name]
    with pytest.raises(EngineError, match=message):
        engine.encode(PackedBatch(np.array(ids, np.uint32), np.array(offsets, np.int32)))
    assert engine.encode(PackedBatch.of([[1]])).shape == (1, 64)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=70), min_size=1, max_size=9), data=st.data())
def test_a_vector_does_not_depend_on_its_batch(engine: Engine, texts: list[list[int]], data: st.DataObject) -> None:
    together = engine.encode(PackedBatch.of(texts))
    index = data.draw(st.integers(0, len(texts) - 1))
    assert np.abs(together[index] - engine.encode(PackedBatch.of([texts[index]]))[0]).max() <= 1e-5
    order = data.draw(st.permutations(range(len(texts))))
    shuffled = engine.encode(PackedBatch.of([texts[i] for i in order]))
    assert np.abs(shuffled - together[list(order)]).max() <= 1e-5


def test_progress_moves_while_a_batch_runs(checkpoint: Checkpoint) -> None:
    engine = load(checkpoint)
    seen: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add(engine.steps)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = engine.steps
    for _ in range(20):
        engine.encode(PackedBatch.of([[1] * 500]))
    done.set()
    watcher.join()
    assert engine.steps == before + 20 * 3  # two layers and the end
    assert len(seen) > 3


def test_a_closed_engine_says_so(checkpoint: Checkpoint) -> None:
    engine = load(checkpoint)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.encode(PackedBatch.of([[1]]))


def test_every_engine_answers_the_protocol(engine: Engine) -> None:
    assert isinstance(engine, Engine)
    assert engine.description["engine"] in ("native", "null")
    assert engine.max_length == 512
    assert engine.max_batch_tokens == (512)


def test_the_native_engine_refuses_other_architectures(tmp_path: Path, checkpoint: Checkpoint) -> None:
    import dataclasses

    other = dataclasses.replace(checkpoint, decoder=None, architecture="other", model_type="bert")
    with pytest.raises(ModelError, match="runs Qwen2 and Qwen3"):
        load(other, kind="native")


def test_a_device_that_is_not_there_is_refused(checkpoint: Checkpoint) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ModelError, match="torch sees no GPU"):
        load(checkpoint, device="cuda:0")


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer", "torch", "cpu"])
def test_a_backend_that_does_not_work_here_is_refused_with_its_reason(checkpoint: Checkpoint, name: str) -> None:
    with pytest.raises(ModelError, match=f"attention {name} does not work on cpu"):
        load(checkpoint, attention=name)


@pytest.mark.long
def test_eager_and_compiled_operations_agree(checkpoint: Checkpoint, native: Engine) -> None:
    compiled = load(checkpoint, compile=True)
    if compiled.description["operations"] == "eager":
        pytest.skip(f"torch.compile does not work here: {compiled.description['notes']}")
    batch = PackedBatch.of([[1, 2, 3], [9] * 100])
    assert np.abs(compiled.encode(batch) - native.encode(batch)).max() <= 1e-5


@pytest.mark.parametrize(
    "wrong", [{"kind": "magic"}, {"device": "tpu"}, {"dtype": "int8"}, {"tensor_parallel": 0}, {"max_batch_tokens": 0}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        EngineSettings(**wrong)


def test_importing_the_engine_imports_no_torch() -> None:
    code = "import embedq_worker.engine, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_packed_and_plain_float32_products_agree(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two a machine takes is measured, so each has to be right wherever tests run."""
    from embedq_worker.engine import linear

    made = load_checkpoint(str(generate_checkpoint(tmp_path, family=family, intermediate_size=88)))
    vectors = []
    for packs, kind in ((False, linear.PlainLinear), (True, linear.PackedLinear)):
        monkeypatch.setattr(linear, "_packed_float32_is_faster", lambda _, packs=packs: packs)
        with monkeypatch.context() as patch:
            used = {linear.PlainLinear: 0, linear.PackedLinear: 0}
            for each in used:
                patch.setattr(each, "__call__", counted(each, used))
            engine = load(made)
            vectors.append(engine.encode(PackedBatch.of([[1, 2, 3], list(range(200)), [9]])))
        assert used[kind] > 0
        assert sum(used.values()) == used[kind]
    assert np.abs(vectors[0] - vectors[1]).max() <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_length", [8, 100])
def test_dummies_longer_than_the_longest_text_change_no_vector(
    dtype: str, max_length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedq_worker.engine import linear

    monkeypatch.setattr(linear, "_packed_float32_is_faster", lambda _: True)
    made = load_checkpoint(str(generate_checkpoint(tmp_path, max_length=max_length)))
    engine = load(made, dtype=dtype, max_batch_tokens=4096)
    texts = [
        [(place * 7 + index) % 500 for place in range(1 + index % max_length)] for index in range(700 * 8 // max_length)
    ]
    together = engine.encode(PackedBatch.of(texts))
    for index in (0, 1, len(texts) // 2, len(texts) - 1):
        alone = engine.encode(PackedBatch.of([texts[index]]))[0]
        assert float(alone @ together[index]) >= (0.999999 if dtype == "float32" else 0.999)


def counted(kind: type[Any], used: dict[type[Any], int]) -> Callable[..., Any]:
    """`kind`'s product, counted in `used`."""
    product = kind.__call__

    def call(self: Any, x: Any) -> Any:
        used[kind] += 1
        return product(self, x)

    return call


@pytest.mark.parametrize(
    ("chosen", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_the_threads_of_products_wait_briefly_unless_the_user_chose(
    checkpoint: Checkpoint, chosen: dict[str, str], spins: str
) -> None:
    """What the OpenMP runtime itself says that it read, which it does once, when torch is imported."""
    code = (
        "import sys\n"
        "from embedq_worker.checkpoint import load_checkpoint\n"
        "from embedq_worker.engine import EngineSettings, load_engine\n"
        "load_engine(load_checkpoint(sys.argv[1]), EngineSettings(device='cpu', max_batch_tokens=64))\n"
    )
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, "-c", code, checkpoint.path],
        env=unset | chosen | {"OMP_DISPLAY_ENV": "verbose"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in run.stderr


def test_the_batch_size_is_measured_once_and_remembered(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedq_worker.engine import tuning

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load(checkpoint, max_batch_tokens="auto").max_batch_tokens
    assert first in (512, 1024, 2048, 4096)
    calls: list[int] = []
    monkeypatch.setattr(tuning, "_sweep", lambda *_: calls.append(1) or (512, True))
    assert load(checkpoint, max_batch_tokens="auto").max_batch_tokens == first
    assert calls == []
    (tmp_path / "embedq" / "batch-tokens.json").write_text("not json")
    assert load(checkpoint, max_batch_tokens="auto").max_batch_tokens == 512


def test_a_sweep_takes_the_fastest_batch_that_runs() -> None:
    import time

    from embedq_worker.engine import tuning

    def encode(batch: PackedBatch) -> None:
        tokens = len(batch.input_ids)
        if tokens > 2048:
            raise EngineError("out of memory")
        time.sleep(0.002 + tokens * (2e-6 if tokens < 2048 else 1e-6))

    assert tuning._sweep(encode, "cpu", 100, 128) == (2048, True)


def test_a_batch_above_the_planned_memory_runs_in_parts(checkpoint: Checkpoint, native: Engine) -> None:
    from embedq_worker.engine.native import NativeEngine
    from embedq_worker.engine.plan import BatchPlan

    small = load(checkpoint, max_batch_tokens=256)
    assert isinstance(small, NativeEngine)
    assert small._decoder is not None
    rows: list[tuple[int, int]] = []
    forward = small._decoder.forward

    def recorded(plan: BatchPlan, progress: Callable[[], None]) -> Any:
        rows.append((plan.rows, plan.total_tokens))
        return forward(plan, progress)

    small._decoder.forward = recorded  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    head = rng.integers(0, 500, 200).tolist()
    apart = [rng.integers(0, 500, length).tolist() for length in (300, 10, 400, 200, 350, 1, 512)]
    alike = [[*head, number] for number in range(40)]
    for texts in (apart, alike):
        batch = PackedBatch.of(texts)
        assert np.abs(small.encode(batch) - native.encode(batch)).max() <= 1e-5
    assert all(computed <= 512 and whole <= 2048 for computed, whole in rows)
    assert max(whole for _, whole in rows) > 1024  # what is shared is not taken apart


def test_a_text_that_cannot_fit_memory_is_refused_at_start(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedq_worker.engine.tuning import check_memory, values_per_token

    assert checkpoint.decoder is not None
    # A text alone gathers no keys.
    needed = values_per_token(checkpoint.decoder, shares_prefixes=False) * checkpoint.max_length * 4
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=needed))
    assert load(checkpoint, max_batch_tokens=64).max_batch_tokens == 64
    with pytest.raises(ModelError, match="lower max_length or max_batch_tokens"):
        load(checkpoint, max_batch_tokens=checkpoint.max_length)
    with pytest.raises(ModelError, match="lower max_length or max_batch_tokens"):
        check_memory(values_per_token(checkpoint.decoder, shares_prefixes=True), tokens=10**12, itemsize=4)
