"""Cutting texts into jobs: bounded, complete, in order; and a digest that does not depend on the cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from embedq_broker.outcome import Cursor, Look
from embedq_producer.client import documents
from embedq_producer.client.assembly import Assembly, pages
from embedq_producer.client.documents import InputDigest, jobs
from embedq_producer.client.values import Embeddings
from embedq_schemas.dead_letter import DeadLetter, Stage
from embedq_schemas.errors import CodecError, DocumentErrorCode, UsageError
from embedq_schemas.job import Codec, decode_job, encode_job
from embedq_schemas.run import RunCounters, RunStatus
from embedq_schemas.vector_batch import VectorBatch, columns
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)
DOCUMENTS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"text": TEXT}, optional={"id": TEXT, "a": st.none() | TEXT}),
        st.fixed_dictionaries({"input_ids": IDS}, optional={"id": TEXT, "a": st.none() | TEXT}),
    ),
    max_size=12,
)


def cut(given_documents: Any, size: int) -> list[pa.RecordBatch]:
    saved = documents.JOB_DOCUMENTS
    documents.JOB_DOCUMENTS = size
    try:
        made = list(jobs(given_documents, metadata=["a"]))
    finally:
        documents.JOB_DOCUMENTS = saved
    assert [last for _, last in made] == [False] * (len(made) - 1) + [True] * bool(made)
    return [job for job, _ in made]


def position(batches: list[pa.RecordBatch]) -> str:
    digest = InputDigest()
    for batch in batches:
        digest.update(batch)
    return digest.position


@given(DOCUMENTS, st.integers(1, 5))
def test_jobs_hold_every_document_once_in_order_and_decode_again(wanted: Any, size: int) -> None:
    made = cut(wanted, size)
    rows = [row for job in made for row in decode_job(encode_job(job), Codec.ARROW).to_pylist()]
    assert [row["ordinal"] for row in rows] == list(range(len(wanted)))
    for index, (row, document) in enumerate(zip(rows, wanted, strict=True)):
        assert row == {"id": str(index), "a": None, **document, "ordinal": index}
    assert all(job.num_rows <= size for job in made)


@given(DOCUMENTS, st.integers(1, 5), st.integers(1, 5))
def test_a_digest_does_not_depend_on_the_cuts(wanted: Any, one: int, other: int) -> None:
    assert position(cut(wanted, one)) == position(cut(wanted, other))


@given(DOCUMENTS, DOCUMENTS)
def test_other_documents_have_another_digest(left: Any, right: Any) -> None:
    def meaning(wanted: Any) -> Any:
        return [{"id": str(index), "a": None, **document} for index, document in enumerate(wanted)]

    assert (position(cut(left, 3)) == position(cut(right, 3))) == (meaning(left) == meaning(right))


def test_a_copy_of_a_digest_goes_its_own_way() -> None:
    first, second = cut([{"text": "a"}, {"text": "b"}], 1)
    digest = InputDigest()
    digest.update(first)
    copy = digest.copy()
    copy.update(second)
    assert digest.position == position([first])
    assert copy.position == position([first, second])


def test_a_job_is_bounded_in_characters_but_holds_a_document_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "JOB_CHARACTERS", 10)
    assert [job.num_rows for job, _ in jobs(["x" * 4] * 5 + ["y" * 50] + ["z"] * 2)] == [3, 3, 2]


@pytest.mark.parametrize(
    ("texts", "more", "words"),
    [
        ({"text": "a"}, {}, "put a single one in a list"),
        ([{"id": "a"}], {}, "document 0 needs either a text or input_ids"),
        ([{"text": "a", "input_ids": [1]}], {}, "document 0 needs either"),
        ([{"text": 1}], {}, "the text of document 0 is of type int"),
        (["a", b"b"], {}, "document 1 is of type bytes"),
        ([[1, "2"]], {}, "document 0 is not a list of token ids"),
        ([[2**32]], {}, "document 0 is not a list of token ids"),
        ([[2**70]], {}, "document 0 is not a list of token ids"),
        ([[[1], [2, 3]]], {}, "document 0 is not a list of token ids"),
        ([[True]], {}, "document 0 is not a list of token ids"),
        ([np.ones((2, 2), np.int64)], {}, "document 0 is not a list of token ids"),
        (["a", "b"], {"ids": ["1"]}, "only 1 ids"),
        (["a"], {"ids": ["1", "2"]}, "more ids than the 1 texts"),
        ([{"text": "a", "id": "x"}], {"ids": ["1"]}, "document 0 has an id of its own"),
        ([{"text": "a", "id": 7}], {}, "the id of document 0 is of type int"),
        (["a", "\ud800"], {}, "documents 0 to 1 is not valid Unicode"),
        (["\ud800"], {}, "document 0 is not valid Unicode"),
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_named(texts: Any, more: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list(jobs(texts, **more))


def vectors(ordinals: list[int], dimension: int = 2) -> bytes:
    n = len(ordinals)
    table = pa.RecordBatch.from_arrays(
        [
            pa.array([str(each) for each in ordinals]),
            pa.array(ordinals, pa.int64()),
            pa.array([[float(each)] * dimension for each in ordinals], columns(dimension)["vector"]),
            pa.array([each + 1 for each in ordinals], pa.int32()),
            pa.array([each % 2 == 1 for each in ordinals]),
            pa.array([bytes(32)] * n, pa.binary(32)),
        ],
        names=list(columns(dimension)),
    )
    return bytes(VectorBatch(table).encode())


def look(*results: bytes, letters: tuple[int, ...] = ()) -> Look:
    return Look(
        status=RunStatus.COMPLETED,
        error=None,
        counters=RunCounters(),
        results=[(f"{number}-0", payload) for number, payload in enumerate(results)],
        letters=[
            (
                f"{number}-1",
                DeadLetter(ordinal=n, stage=Stage.TOKENIZE, code=DocumentErrorCode.TOO_LONG, message="m", id=str(n)),
            )
            for number, n in enumerate(letters)
        ],
    )


def test_pages_become_arrays_in_the_order_of_the_input() -> None:
    assembly = Assembly()
    assembly.add(pages(look(vectors([3, 1]), vectors([0]), letters=(4, 2)), Cursor()))
    assert assembly.documents == 5
    found = assembly.results(5, 0)
    assert found.vectors[:, 0].tolist()[:2] == [0.0, 1.0]
    assert np.isnan(found.vectors[[2, 4]]).all()
    assert (found.n_tokens.tolist(), found.truncated.tolist()) == ([1, 2, 0, 4, 0], [False, True, False, True, False])
    assert [failure.index for failure in found.failures] == [2, 4]


def test_a_page_resumes_behind_itself() -> None:
    found = pages(look(vectors([0]), vectors([1]), letters=(2,)), Cursor("9-9", "8-8"))
    assert [page.cursor for page in found] == ["0-0/8-8", "1-0/8-8", "1-0/0-1"]
    assert Cursor.parse("5-1") == Cursor("5-1", "0")
    for wrong in ("", "5", "a-b", "1-0/", "1-0/x", "1-0/2-0/3-0", "-"):
        with pytest.raises(UsageError):
            Cursor.parse(wrong)


@pytest.mark.parametrize("payloads", [[vectors([5])], [vectors([0]), vectors([1], dimension=3)]], ids=["row", "width"])
def test_results_that_do_not_fit_the_texts_are_refused(payloads: list[bytes]) -> None:
    assembly = Assembly()
    assembly.add(pages(look(*payloads), Cursor()))
    with pytest.raises(CodecError):
        assembly.results(2, 0)


def test_embeddings_are_an_array_to_numpy() -> None:
    found = Embeddings(np.ones((2, 3), np.float32), np.ones(2, np.int32), np.zeros(2, np.bool_))
    assert np.asarray(found) is found.vectors
    assert np.array(found, copy=True) is not found.vectors
    assert np.asarray(found, np.float64).dtype == np.float64
    assert len(found) == 2


@pytest.mark.parametrize("value", ["object", "circle", "depth"])
def test_metadata_that_json_cannot_hold_are_refused_by_name(value: str) -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    values = {"object": object(), "circle": circle, "depth": deep}
    given_documents = [{"text": "a", "m": 1}, {"text": "b", "m": values[value]}]
    with pytest.raises(UsageError, match=r"^m of document 1 cannot be written as JSON"):
        list(jobs(given_documents, metadata=["m"]))
