"""Files on disk are whole or not there, and what nobody names is swept away."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from embedq_gateway.batch.lines import read_lines
from embedq_gateway.batch.outcomes import Outcomes
from embedq_gateway.batch.plan import REFUSED, BatchLimits, InvalidBatchError, Plan, make_plan
from embedq_gateway.files import FileStore
from embedq_gateway.ids import new_id
from embedq_gateway.inputs import Limits
from embedq_gateway.watch import ServedModel
from embedq_schemas.encoding import OnLong
from embedq_schemas.errors import CodecError, StorageError
from embedq_schemas.token_batch import make_token_batch
from embedq_schemas.vector_batch import VectorBatch, make_vector_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODEL = ServedModel(id="m", fingerprint="f", revision="", dimension=4, max_length=8, prompts={})
LIMITS = BatchLimits(
    max_requests=10,
    max_inputs=20,
    max_line_bytes=400,
    request=Limits(max_inputs=8, max_request_tokens=100, on_long=OnLong.ERROR),
    aliases=(),
)


def test_a_file_that_is_not_published_is_gone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with store.writing() as draft:
        draft.write(b"half")
        assert draft.path.exists()
    assert not draft.path.exists()
    with store.writing() as draft:
        draft.write(b"whole")
        store.publish(draft, "file-1")
    assert store.path("file-1").read_bytes() == b"whole"
    store.remove("file-1")
    store.remove("file-1")


def test_two_stores_on_one_directory_have_one_id(tmp_path: Path) -> None:
    assert FileStore(tmp_path).id == FileStore(tmp_path).id
    assert FileStore(tmp_path).id != FileStore(tmp_path / "other").id


def test_a_directory_that_cannot_be_used_is_an_error_a_person_can_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="data directory"):
        FileStore(tmp_path / "file")


def test_only_what_is_old_and_unnamed_is_swept_away(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    old = time.time() - 2 * 86400
    made = {}
    for folder, name, age in (
        ("files", "known", old),
        ("files", "expired", old),
        ("files", "fresh", None),
        ("tmp", "half", old),
        ("tmp", "under-way", None),
    ):
        path = made[name] = tmp_path / folder / name
        path.write_text("x")
        if age is not None:
            os.utime(path, (age, age))
    store.sweep(lambda name: name == "known")
    assert {name for name, path in made.items() if path.exists()} == {"known", "fresh", "under-way"}


def test_a_kept_file_outlives_its_deletion(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.path("file-1").write_text("text")
    kept = store.workspace("batch_1") / "input"
    store.keep("file-1", kept)
    store.keep("file-1", kept)
    store.remove("file-1")
    assert kept.read_text() == "text"


def test_ids_sort_by_the_time_they_were_made() -> None:
    ids = []
    for _ in range(5):
        ids.append(new_id("file-"))
        time.sleep(0.002)
    assert ids == sorted(ids)
    assert len({new_id("x") for _ in range(1000)}) == 1000


@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=10), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_are_found_again_at_their_offsets(tmp_path: Path, lines: list[bytes], ended: bool) -> None:
    content = b"\n".join(lines) + (b"\n" if ended else b"")
    path = tmp_path / "lines"
    path.write_bytes(content)
    with path.open("rb") as file:
        found = list(read_lines(file, 8))
    for number, offset, line in found:
        assert content[offset:].startswith(line)
        assert lines[number - 1].startswith(line.removesuffix(b"\n"))
        assert len(line) <= 9
    kept = [number for number, line in enumerate(lines, 1) if line[:9].strip()]
    assert [number for number, _, _ in found] == kept


def line(custom_id: str, value: str, more: str = "") -> str:
    body = f'{{"model": "m", "input": {value}{more}}}'
    return f'{{"custom_id": "{custom_id}", "method": "POST", "url": "/v1/embeddings", "body": {body}}}\n'


def test_a_plan_numbers_the_documents_of_each_run_and_is_never_replaced(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(
        line("a", '["x", "y"]') + "\n" + line("b", '"x"', ', "dimensions": 2') + line("c", '"x"', ', "dimensions": 9')
        + line("d", "[[1], [2], [3]]") + line("e", '"x"', ', "dimensions": 2')
    )  # fmt: skip
    plan = make_plan(source, MODEL, LIMITS)
    assert plan.runs.tolist() == [0, 1, REFUSED, 0, 1]
    assert plan.first.tolist() == [0, 0, 0, 2, 1]
    assert plan.counts.tolist() == [2, 1, 0, 3, 1]
    assert [plan.documents(run) for run in (0, 1)] == [5, 2]
    assert [plan.components(run) for run in (0, 1)] == [4, 2]
    assert plan.refusals[2][0] == 400
    plan.save(tmp_path)
    loaded = Plan.load(tmp_path)
    assert loaded is not None
    assert loaded.encodings == plan.encodings
    assert loaded.offsets.tolist() == plan.offsets.tolist()
    other = ServedModel(id="m", fingerprint="f", revision="", dimension=16, max_length=8, prompts={})
    again = make_plan(source, other, LIMITS)
    assert again.runs.tolist() != plan.runs.tolist()
    assert again.save(tmp_path).runs.tolist() == plan.runs.tolist()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("".join(line(str(i), '"x"') for i in range(11)), "too_many_requests"),
        ("".join(line(str(i), '["x", "x", "x"]') for i in range(7)), "too_many_inputs"),
        (line("a", '"' + "x" * 400 + '"'), "line_too_long"),
        ("\xff\n", "invalid_json_line"),
    ],
    ids=["lines", "texts", "long line", "bytes"],
)
def test_a_file_above_a_limit_is_no_batch(tmp_path: Path, content: str, code: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidBatchError) as refused:
        make_plan(source, MODEL, LIMITS)
    assert refused.value.errors[0].code == code


def vector_batch(ordinals: list[int], dimension: int, n_tokens: int = 3) -> VectorBatch:
    import pyarrow as pa

    n = len(ordinals)
    documents = pa.record_batch(
        {"id": pa.array(map(str, ordinals), pa.string()), "ordinal": pa.array(ordinals, pa.int64())}
    )
    tokens = make_token_batch(
        documents,
        input_ids=np.ones(n, np.uint32),
        offsets=np.arange(n + 1, dtype=np.int32),
        n_tokens=np.full(n, n_tokens, np.int32),
        truncated=np.zeros(n, np.bool_),
        text_sha256=pa.array([b"x" * 32] * n, pa.binary(32)),
        metadata=(),
    )
    vectors = np.repeat(np.array(ordinals, np.float32)[:, None], dimension, axis=1)
    return make_vector_batch(tokens, np.ascontiguousarray(vectors))


def test_outcomes_lie_at_their_places_after_a_restart_and_twice_is_as_once(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path, 0, documents=6, components=4, max_length=8)
    outcomes.store(vector_batch([5, 1], 4, n_tokens=100))
    outcomes.store(vector_batch([1], 4))
    outcomes.sync()
    again = Outcomes(tmp_path, 0, documents=6, components=4, max_length=8)
    assert again.done().tolist() == [False, True, False, False, False, True]
    assert again.tokens.tolist() == [0, 3, 0, 0, 0, 8]
    assert again.vectors[[1, 5], 0].tolist() == [1.0, 5.0]


@pytest.mark.parametrize(("ordinals", "dimension"), [([6], 4), ([-1], 4), ([0], 3)], ids=["above", "below", "wide"])
def test_results_that_do_not_fit_are_refused(tmp_path: Path, ordinals: list[int], dimension: int) -> None:
    outcomes = Outcomes(tmp_path, 0, documents=6, components=4, max_length=8)
    with pytest.raises(CodecError):
        outcomes.store(vector_batch(ordinals, dimension))
    assert not outcomes.done().any()
