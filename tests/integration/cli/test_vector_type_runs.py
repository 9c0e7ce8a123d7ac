"""`embedq run --vector-type`: every type by two embedders, one set of ranges whoever is killed, refusals in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import assert_complete, documents, embedq, in_process, rows, write_corpus
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import UsageError
from embedq_schemas.quantize import VectorType, decode_ranges, encode_ranges
from numpy.typing import NDArray

from embedq.options import check_vector_type

COUNT, DIMENSION = 2400, 32
CORPUS = documents(COUNT)
IDS = [document["id"] for document in CORPUS]


def run(model: Path, corpus: Path, out: Path, *more: object, **variables: Any) -> None:
    """By two embedders, in many files."""
    pace = ("--embedders", 2, "--max-batch-tokens", 256, "--job-documents", 32, "--flush-interval-s", 0.1)
    done = embedq("run", corpus, "-o", out, "--model", model, "--engine", "null", *pace, *more, **variables)
    assert done.status == 0, done.err


def stored(out: Path, kind: VectorType) -> NDArray[Any]:
    """In input order, from the files' own bytes."""
    assert_complete(out, IDS)
    found = [row["vector"] for row in rows(out).values()]
    return np.array([np.frombuffer(each, kind.dtype) for each in found] if not kind.floating else found, kind.dtype)


def ranges_of_all_files(out: Path) -> NDArray[np.float32]:
    """The one set of ranges that every file has, which is the dataset's; fails if there are more."""
    parts = list(out.glob("part-*"))
    assert len(parts) > 1
    (text,) = {pq.read_metadata(part).metadata[b"embedq.ranges"].decode() for part in parts}
    ranges = np.load(out / "_ranges.npy")
    np.testing.assert_array_equal(decode_ranges(text), ranges)
    return np.asarray(ranges, np.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.jsonl", CORPUS)


@pytest.fixture(scope="module")
def exact(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> NDArray[np.float32]:
    """The float32 vectors, in input order."""
    out = tmp_path_factory.mktemp("exact") / "out"
    run(model, corpus, out)
    (kind,) = {pq.read_metadata(part).metadata[b"embedq.vector_type"] for part in out.glob("part-*")}
    assert kind == b"float32"
    return stored(out, VectorType.FLOAT32)


def reference(vectors: NDArray[np.float32], kind: VectorType, ranges: NDArray[np.float32] | None) -> NDArray[Any]:
    if kind is VectorType.FLOAT16:
        return vectors.astype(np.float16)
    from sentence_transformers.util.quantization import quantize_embeddings

    return np.asarray(quantize_embeddings(vectors, kind.value, ranges=ranges))


# int8 takes the same way in the next test, with embedders killed on it.
@pytest.mark.parametrize("kind", ["float16", "uint8", "binary", "ubinary"])
def test_each_type_holds_what_sentence_transformers_makes_of_the_float32_vectors(
    kind: str, model: Path, corpus: Path, exact: NDArray[np.float32], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(model, corpus, out, "--vector-type", kind)
    assert_stored(out, VectorType(kind), exact)


def assert_stored(out: Path, kind: VectorType, exact: NDArray[np.float32]) -> None:
    """The dataset holds what the reference makes of `exact`, with one set of ranges where the type has them."""
    ranges = ranges_of_all_files(out) if kind.ranged else None
    assert (out / "_ranges.npy").exists() == kind.ranged
    found = stored(out, kind)
    assert found.shape == (COUNT, kind.width(DIMENSION))
    np.testing.assert_array_equal(found, reference(exact, kind, ranges))
    if ranges is not None:
        # Found from vectors of this corpus, at least a thousand of them.
        assert (ranges[0] >= exact.min(0)).all()
        assert (ranges[1] <= exact.max(0)).all()
        inside = (exact >= ranges[0]) & (exact <= ranges[1])
        assert inside.all(axis=1).sum() >= 1000


def test_embedders_killed_before_and_after_the_ranges_are_found_leave_one_set_of_them(
    model: Path, corpus: Path, exact: NDArray[np.float32], tmp_path: Path
) -> None:
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    # The first has some hundred rows when it dies; the second has laid the ranges down, and no file yet.
    faults = "embed.forwarded:kill:4,stage.written:kill:1"
    more = ("--vector-type", "int8", "--lease-s", 1)
    run(model, corpus, out, *more, EMBEDQ_FAULTS=faults, EMBEDQ_FAULTS_ONCE=str(marks))
    assert sorted(mark.name for mark in marks.iterdir()) == ["embed.forwarded@.kill", "stage.written@.kill"]
    assert_stored(out, VectorType.INT8, exact)


def test_vectors_of_another_corpus_compare_when_they_get_the_ranges_of_the_first(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    few = write_corpus(tmp_path / "few.jsonl", documents(150))
    command = ("--model", model, "--engine", "null", "--vector-type", "uint8")
    done = embedq("run", few, "-o", first, *command)
    assert done.status == 0, done.err
    ranges = np.load(first / "_ranges.npy")
    # Fewer than a thousand: the ranges are those of all.
    vectors = np.array([np.frombuffer(row["vector"], np.uint8) for row in rows(first).values()])
    assert (vectors.min(0) == 0).all()
    assert (vectors.max(0) >= 254).all()

    given = ("--vector-ranges", first / "_ranges.npy")
    more = write_corpus(tmp_path / "more.jsonl", documents(60, seed=5))
    again = embedq("run", more, "-o", second, *command, *given)
    assert again.status == 0, again.err
    np.testing.assert_array_equal(np.load(second / "_ranges.npy"), ranges)
    (part,) = second.glob("part-*")
    assert pq.read_metadata(part).metadata[b"embedq.ranges"].decode() == encode_ranges(ranges)

    same = in_process(capsys, "run", more, "-o", second, *command, *given)
    assert (same.status, same.sentence) == (0, f"{second} is already complete")
    differing = in_process(capsys, "run", more, "-o", second, *command)
    assert differing.status == 2
    assert "made with other options (vector_ranges)" in differing.sentence
    differing = in_process(capsys, "run", few, "-o", first, *command[:-1], "binary")
    assert "made with other options (vector_type)" in differing.sentence


def test_what_does_not_fit_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", documents(3))
    np.save(tmp_path / "narrow.npy", np.array([[0] * 8, [1] * 8], np.float32))
    np.save(tmp_path / "double.npy", np.zeros((2, 32)))
    (tmp_path / "text.npy").write_text("no array")
    cases = [
        (("binary", "--dimensions", 12), "binary vectors pack 8 components into a byte: 12 dimensions are no multiple"),
        (("int4",), "--vector-type must be 'float32', 'float16', 'int8', 'uint8', 'binary' or 'ubinary', found 'int4'"),
        (("binary", "--vector-ranges", tmp_path / "narrow.npy"), "binary vectors have no ranges; int8 and uint8 have"),
        (
            ("int8", "--vector-ranges", tmp_path / "narrow.npy"),
            "--vector-type int8: the ranges are [2, 8], those of 32",
        ),
        (("int8", "--vector-ranges", tmp_path / "double.npy"), "double.npy cannot be read: ranges are float32 [2, dim"),
        (("int8", "--vector-ranges", tmp_path / "text.npy"), "text.npy cannot be read: "),
        (("int8", "--vector-ranges", tmp_path / "none.npy"), "none.npy cannot be read: No such file or directory"),
    ]
    for given, sentence in cases:
        said = in_process(capsys, "run", corpus, "-o", tmp_path / "out", "-m", model, "--vector-type", *given)
        assert said.status == 2
        assert said.sentence.startswith("error: usage: ")
        assert sentence in said.sentence
    assert not (tmp_path / "out").exists()


def test_a_models_own_dimension_and_a_stream_without_ranges_are_looked_at_too() -> None:
    with pytest.raises(UsageError, match=r"--vector-type ubinary: .* 1022 dimensions are no multiple of 8"):
        check_vector_type(EncodingOptions(vector_type=VectorType.UBINARY), 1022)
    check_vector_type(EncodingOptions(vector_type=VectorType.UBINARY, dimensions=512), 1022)
    with pytest.raises(UsageError, match="--vector-type int8 needs --vector-ranges"):
        check_vector_type(EncodingOptions(vector_type=VectorType.INT8), 0, dataset=False)
    ranges = encode_ranges(np.array([[0.0] * 8, [1.0] * 8], np.float32))
    check_vector_type(EncodingOptions(vector_type=VectorType.INT8, vector_ranges=ranges), 0, dataset=False)
