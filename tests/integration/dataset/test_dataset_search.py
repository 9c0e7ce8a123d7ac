"""`embedq search`: exact, with the dataset's own model, prompt and dimensions, or a refusal."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from dataset_helpers import PROMPTS, Command, Made
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import UsageError
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.engine import EngineSettings
from embedq_worker.engine.generate import generate_checkpoint
from handmade_dataset import add_file, complete, make_dataset, new_dataset, rows_of, vectors_of

from embedq.dataset import open_dataset
from embedq.dataset.questions import embed_questions, query_prompt
from embedq.dataset.search import nearest

FLOAT32 = ("--dtype", "float32", "--threads", "1")


def test_the_answers_are_those_of_a_full_comparison(made: Made, embedq: Command) -> None:
    from sentence_transformers import SentenceTransformer

    questions = ["queue of people", "мир 文章", "zwölf models"]
    reference = SentenceTransformer(str(made.model), device="cpu")
    expected = made.vectors @ reference.encode(questions, prompt_name="query").T
    Path("questions.txt").write_text("\n\n".join(questions))
    said = embedq(
        "search", made.path, "--questions", "questions.txt", "-k", 7, "--model", made.model, "--json", *FLOAT32
    )
    assert said.status == 0, said.err
    answers = list(map(json.loads, said.out.splitlines()))
    assert [answer["question"] for answer in answers] == questions
    for column, answer in enumerate(answers):
        best = np.argsort(-expected[:, column], kind="stable")[:7]
        assert [hit["rank"] for hit in answer["results"]] == list(range(1, 8))
        assert [hit["id"] for hit in answer["results"]] == [made.ids[row] for row in best]
        np.testing.assert_allclose([hit["score"] for hit in answer["results"]], expected[best, column], atol=1e-5)
        for hit, row in zip(answer["results"], best, strict=True):
            assert (hit["text"], hit["lang"]) == (made.documents[row]["text"], made.documents[row]["lang"])


def test_a_document_finds_itself_when_it_is_embedded_as_a_document(made: Made, embedq: Command) -> None:
    text = made.documents[7]["text"]
    said = embedq("search", made.path, text, "-k", 1, "--prompt", "", "--model", made.model, *FLOAT32)
    line = " ".join(text.split())
    assert said.out == f"   1  1.0000  d7  {line[:100]}{'...' if len(line) > 100 else ''}\n"


def test_questions_may_come_from_standard_input(made: Made, embedq: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    said = embedq("search", made.path, "--questions", "-", "-k", 1, "--model", made.model, *FLOAT32)
    assert said.out.count("\n   1  ") == 2
    assert said.out.startswith("\none\n")


def test_another_model_is_refused(made: Made, embedq: Command, tmp_path: Path) -> None:
    other = generate_checkpoint(tmp_path / "other", hidden_size=32, layers=2, max_length=48, seed=1)
    said = embedq("search", made.path, "a question", "--model", other)
    assert said.status == 2
    assert said.err.startswith("error: model_mismatch: ")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("question",), "made with a model in a folder named 'model'; say with --model where it is"),
        ((), "give one question, or --questions"),
        (("question", "--questions", "-"), "give one question, or --questions"),
        (("--questions", "nowhere.txt"), "the questions in nowhere.txt cannot be read"),
        (("question", "--prompt", "a", "--instruction", "b"), "exclude each other"),
        (("question", "--prompt-name", "none"), "the model has no prompt 'none'; it has: passage, query"),
    ],
    ids=["no model", "no question", "two questions", "no file", "two prompts", "no prompt"],
)
def test_what_is_missing_or_too_much_is_named(
    arguments: tuple[str, ...], sentence: str, made: Made, embedq: Command
) -> None:
    model = ("--model", made.model) if "--prompt" in arguments or "--prompt-name" in arguments else ()
    said = embedq("search", made.path, *arguments, *model)
    assert said.status == 2
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


def test_the_query_prompt_is_the_checkpoints_unless_another_is_asked_for(made: Made, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(made.model))
    assert query_prompt(checkpoint) == PROMPTS["query"]
    assert query_prompt(checkpoint, name="passage") == PROMPTS["passage"]
    assert query_prompt(checkpoint, prompt="") == ""
    # No space after `Query:` where the checkpoint has none, one where it has one.
    assert query_prompt(checkpoint, instruction="count\nsheep") == "Instruct: count\nsheep\nQuery:"
    spaced = generate_checkpoint(tmp_path / "m", hidden_size=32, prompts={"query": "Instruct: x\nQuery: "})
    assert query_prompt(load_checkpoint(str(spaced)), instruction="y") == "Instruct: y\nQuery: "
    bare = load_checkpoint(str(generate_checkpoint(tmp_path / "n", hidden_size=32, prompts={"passage": "p"})))
    assert query_prompt(bare) == ""
    with pytest.raises(UsageError, match="takes no instruction"):
        query_prompt(bare, instruction="y")


def test_many_questions_take_several_batches_and_equal_those_taken_alone(made: Made) -> None:
    checkpoint = load_checkpoint(str(made.model))
    settings = EngineSettings(dtype="float32", threads=1, max_batch_tokens=64)
    texts = [document["text"] for document in made.documents[:20]]
    together = embed_questions(checkpoint, settings, texts)
    np.testing.assert_allclose(together, made.vectors[:20], atol=1e-5)
    cut = embed_questions(checkpoint, settings, texts, encoding=EncodingOptions(dimensions=8))
    expected = made.vectors[:20, :8] / np.linalg.norm(made.vectors[:20, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["unit vectors", "others"])
def test_files_row_groups_and_threads_do_not_show_in_the_ranking(
    scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 100 rows of 8 dimensions.
    monkeypatch.setattr("embedq_worker.sinks.parquet.ROW_GROUP_BYTES", 3200)
    files = [list(range(500)), list(range(500, 503)), list(range(503, 900))]
    dataset = open_dataset(make_dataset(tmp_path / "d", files, scale=scale))
    queries = vectors_of([17, 502, 899, 1234])
    scores = vectors_of(range(900)).astype(np.float64) @ queries.T.astype(np.float64)
    for k, threads in ((1, 1), (10, 3), (2000, 2)):
        for column, hits in enumerate(nearest(dataset, queries, k, threads=threads)):
            best = np.sort(scores[:, column])[::-1][:k]
            assert len(hits) == min(k, 900)
            np.testing.assert_allclose([hit.score for hit in hits], best, atol=1e-6)
            np.testing.assert_allclose([scores[hit.row["ordinal"], column] for hit in hits], best, atol=1e-6)
            assert len({hit.row["id"] for hit in hits}) == len(hits)
    assert [hits[0].row["ordinal"] for hits in nearest(dataset, queries, 1, threads=1)][:3] == [17, 502, 899]


def test_equal_scores_go_to_the_earlier_row(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    for name in ("a", "b", "c"):
        add_file(path, rows_of([5, 5], ids=[f"{name}1", f"{name}2"]))
    complete(path, 6, 3)
    for threads in (1, 3):
        (hits,) = nearest(open_dataset(path), vectors_of([5]), 3, threads=threads)
        assert [hit.row["id"] for hit in hits] == ["a1", "a2", "b1"]


def test_an_incomplete_dataset_is_searched_only_on_request(made: Made, embedq: Command, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made.path, copy)
    (copy / "_SUCCESS").unlink()
    command = ("search", copy, "question", "--model", made.model, "-k", 1, *FLOAT32)
    said = embedq(*command)
    assert said.status == 4
    assert said.err.startswith("incomplete: ")
    assert embedq(*command, "--partial").status == 0
