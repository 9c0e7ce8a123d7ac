"""Long texts as chunks, through whole runs: their vectors, resuming, updating, and what becomes of them after."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from commands import documents, embedq, in_process, write_corpus
from embedq_schemas.dead_letter import DeadLetter, Stage
from embedq_schemas.errors import DocumentErrorCode
from embedq_worker.tokenization import TextTokenizer

from embedq.dataset import open_dataset, pooled

CHUNKS = ("--on-long", "chunk", "--chunk-tokens", 40, "--chunk-overlap", 6)
Made = tuple[Path, list[dict[str, Any]]]
FAULTS = ("produce.enqueue.after", "tokenize.commit.after", "embed.commit.before", "publish.renamed", "finish.begun")


def corpus_of(count: int) -> list[dict[str, Any]]:
    """Every third document is long, and two share a text."""
    made = documents(count)
    for i in range(0, count, 3):
        made[i]["text"] = " ".join(
            f"Sentence {n} of document {i}. It has words, мир и 文章!" for n in range(2 + i % 7 * 4)
        )
    made[3]["text"] = made[0]["text"]
    return made


def command(corpus: Path, out: Path, model: Path, *more: object) -> tuple[object, ...]:
    fast = ("--dtype", "float32", "--job-documents", 8, "--file-bytes", 65536, "--flush-interval-s", 0.05)
    return ("run", corpus, "-o", out, "-m", model, "--metadata", "lang", *fast, *CHUNKS, *more)


def table(dataset: Path) -> pa.Table:
    """All rows in input order, without the facts of their files."""
    batches = list(open_dataset(dataset).batches(order="input"))
    return pa.Table.from_batches(batches).replace_schema_metadata(None).combine_chunks()


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A dataset of chunks with their texts."""
    folder = tmp_path_factory.mktemp("chunks")
    given = corpus_of(60)
    corpus = write_corpus(folder / "c.jsonl", given)
    done = embedq(*command(corpus, folder / "out", model, "--keep-text"))
    assert done.status == 0, done.err
    return folder / "out", given


def test_a_chunks_vector_is_that_of_its_slice_as_a_document(made: Made, model: Path, tmp_path: Path) -> None:
    out, given = made
    found = table(out).to_pylist()
    texts = {document["id"]: document["text"] for document in given}
    tokenizer = TextTokenizer.load(model / "tokenizer.json", max_length=1 << 20)
    lengths = dict(zip(texts, tokenizer.encode(pa.array(texts.values(), pa.string())).n_tokens.tolist(), strict=True))
    reached = dict.fromkeys(texts, 0)
    counts = dict.fromkeys(texts, 0)
    for row in found:
        assert row["text"] == texts[row["id"]][row["char_start"] : row["char_end"]]
        assert row["chunk_index"] == counts[row["id"]] < row["chunk_count"]
        assert row["char_start"] <= reached[row["id"]] < row["char_end"]
        assert row["n_tokens"] <= 40
        assert not row["truncated"]
        assert row["lang"] == ["en", None][int(row["id"][1:]) % 2]
        counts[row["id"]], reached[row["id"]] = counts[row["id"]] + 1, row["char_end"]
    assert all(row["chunk_count"] == counts[row["id"]] for row in found)
    assert reached == {name: len(text) for name, text in texts.items()}
    assert {name for name, count in counts.items() if count > 1} == {n for n, length in lengths.items() if length > 40}
    assert [row["ordinal"] for row in found] == list(range(len(found)))

    slices = [{"id": f"{row['id']}/{row['chunk_index']}", "text": row["text"]} for row in found]
    alone = write_corpus(tmp_path / "slices.jsonl", slices)
    done = embedq("run", alone, "-o", tmp_path / "alone", "-m", model, "--dtype", "float32")
    assert done.status == 0, done.err
    other = table(tmp_path / "alone")
    assert other["n_tokens"].to_pylist() == [row["n_tokens"] for row in found]
    vectors, wanted = (np.array(each) for each in ([row["vector"] for row in found], other["vector"].to_pylist()))
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)


def test_a_run_killed_at_many_steps_makes_the_same_chunks_each_once(made: Made, model: Path, tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "c.jsonl", made[1]), tmp_path / "out"
    arguments = command(corpus, out, model, "--keep-text")
    marks = tmp_path / "marks"
    marks.mkdir()
    faults = ",".join(f"{point}:kill" for point in FAULTS)
    # Some steps are the command's own, and end it; others are its workers', which it starts again.
    for _ in FAULTS:
        done = embedq(*arguments, EMBEDQ_FAULTS=faults, EMBEDQ_FAULTS_ONCE=str(marks))
        if done.status == 0:
            break
        assert done.status == -signal.SIGKILL, done.err
    assert done.status == 0, done.err
    assert len(list(marks.iterdir())) == len(FAULTS)
    same = table(out)
    wanted = table(made[0])
    assert same.drop_columns(["vector"]).equals(wanted.drop_columns(["vector"]))
    vectors = (np.array(each["vector"].to_pylist()) for each in (same, wanted))
    np.testing.assert_allclose(*vectors, atol=1e-6)


def test_an_update_computes_only_chunks_that_changed_and_equals_a_full_run(model: Path, tmp_path: Path) -> None:
    before = corpus_of(45)
    after = [dict(document) for document in before[1:]]
    # Its first chunks stay as they are, and so do those of documents behind it, at other ordinals.
    after[5]["text"] += " One more sentence at the end."
    after.insert(9, {"id": "new", "text": "A new one. " * 40, "lang": "de"})
    out, full = tmp_path / "out", tmp_path / "full"
    old, new = write_corpus(tmp_path / "old.jsonl", before), write_corpus(tmp_path / "new.jsonl", after)
    assert embedq(*command(old, out, model)).status == 0
    estimated = embedq(*command(new, out, model, "--incremental", "--dry-run"))
    done = embedq(*command(new, out, model, "--incremental"))
    assert done.status == 0, done.err
    assert embedq(*command(new, full, model)).status == 0
    kept, wanted = table(out), table(full)
    assert kept.drop_columns(["vector"]).equals(wanted.drop_columns(["vector"]))
    vectors = (np.array(each["vector"].to_pylist()) for each in (kept, wanted))
    np.testing.assert_allclose(*vectors, atol=1e-6)
    known = set(table(tmp_path / "out")["text_sha256"].to_pylist())
    was = {*embedded_texts(before, model)}
    computed = len([text for text in embedded_texts(after, model) if text not in was])
    summary = json.loads((out / "_SUCCESS").read_text())
    assert summary["copied"] == summary["succeeded"] - computed
    assert 0 < computed < 30 < len(known)
    assert f"to compute: {computed:,} texts" in estimated.out
    assert "0 bad or repeated ids" in estimated.out


def embedded_texts(given: list[dict[str, Any]], model: Path) -> list[str]:
    """The distinct chunks of a corpus, as the library cuts them."""
    from embedq_schemas.encoding import EncodingOptions, OnLong
    from embedq_worker.tokenization.chunking import Chunker

    encoding = EncodingOptions(on_long=OnLong.CHUNK, chunk_tokens=40, chunk_overlap=6)
    tokenizer = TextTokenizer.load(model / "tokenizer.json", max_length=48)
    chunks = Chunker(tokenizer, encoding)(pa.array([d["text"] for d in given], pa.string()))
    return list(dict.fromkeys(chunks.texts.to_pylist()))


def test_pooled_documents_have_the_mean_of_their_chunks(made: Made, tmp_path: Path) -> None:
    out, given = made
    chunks = table(out).to_pylist()
    by_id: dict[str, list[dict[str, Any]]] = {}
    for row in chunks:
        by_id.setdefault(row["id"], []).append(row)
    reader = pooled(open_dataset(out))
    assert reader.rows == len(given)
    for batch_rows in (3, None):
        found = [row for batch in reader.batches(batch_rows=batch_rows) for row in batch.to_pylist()]
        assert [row["id"] for row in found] == [document["id"] for document in given]
        for row in found:
            own = by_id[row["id"]]
            weights = np.array([chunk["n_tokens"] for chunk in own])
            mean = (np.array([chunk["vector"] for chunk in own]) * weights[:, None]).sum(0)
            np.testing.assert_allclose(row["vector"], mean / np.linalg.norm(mean), atol=1e-6)
            assert (row["chunk_count"], row["n_tokens"]) == (len(own), weights.sum())
            assert (row["ordinal"], row["lang"]) == (own[0]["ordinal"], own[0]["lang"])
    done = embedq("export", out, "--to", "npy", "-o", tmp_path / "npy", "--pool-chunks")
    assert done.status == 0, done.err
    vectors = np.load(tmp_path / "npy" / "vectors.npy")
    np.testing.assert_allclose(vectors, [row["vector"] for row in found], atol=1e-6)


def test_a_document_some_of_whose_chunks_have_no_vector_is_left_out_where_chunks_are_pooled(made: Made) -> None:
    whole = open_dataset(made[0])
    assert len(whole.files) > 1
    some = replace(whole, files=whole.files[1:])
    counts: dict[str, int] = {}
    for row in (row for batch in some.batches() for row in batch.to_pylist()):
        counts[row["id"]] = counts.get(row["id"], row["chunk_count"]) - 1
    reader = pooled(some)
    found = [row["id"] for batch in reader.batches(["id"]) for row in batch.to_pylist()]
    assert found == [document["id"] for document in made[1] if counts.get(document["id"]) == 0]
    assert (reader.rows, reader.left_out) == (len(found), sum(left > 0 for left in counts.values()))
    assert reader.left_out


def test_an_error_names_its_chunk(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    letter = DeadLetter(
        id="d6", ordinal=17, chunk=3, stage=Stage.EMBED, code=DocumentErrorCode.NOT_FINITE, message="it is NaN"
    )
    (out / "_errors" / "part-x.jsonl").write_bytes(letter.encode() + b"\n")
    assert in_process(capsys, "errors", out).out == "document 17, chunk 3\td6\tembed\tnot_finite\tit is NaN\n"


def test_one_very_long_text_is_sent_in_many_jobs(model: Path, tmp_path: Path) -> None:
    text = "It was a bright cold day in April, and I went. " * 9000
    given = [{"id": "a", "text": "before"}, {"id": "book", "text": text}, {"id": "z", "text": "after"}]
    corpus, out = write_corpus(tmp_path / "c.jsonl", given), tmp_path / "out"
    faults = {"EMBEDQ_FAULTS": "produce.enqueue.after:kill:3", "EMBEDQ_FAULTS_ONCE": str(tmp_path)}
    arguments = command(corpus, out, model, "--engine", "null", "--keep-text", "--job-documents", 1024)
    assert embedq(*arguments, **faults).status == -signal.SIGKILL
    done = embedq(*arguments)
    assert done.status == 0, done.err
    rebuilt: dict[str, str] = {}
    for row in table(out).to_pylist():
        rebuilt[row["id"]] = rebuilt.get(row["id"], "")[: row["char_start"]] + row["text"]
    assert rebuilt == {document["id"]: document["text"] for document in given}


def test_every_chunk_is_a_point_of_its_own_elsewhere(made: Made, tmp_path: Path) -> None:
    from qdrant_client import QdrantClient

    out, _ = made
    done = embedq("export", out, "--to", "qdrant", "-o", tmp_path / "qdrant")
    assert done.status == 0, done.err
    client = QdrantClient(path=str(tmp_path / "qdrant"))
    assert client.count("embeddings").count == open_dataset(out).rows
    client.close()
    inspected = json.loads(embedq("inspect", out, "--json").out)
    assert inspected["repeated_ids"] == 0


def test_what_cannot_be_cut_or_asked_for_is_said(
    made: Made, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", made[1])
    plain = ("run", corpus, "-o", tmp_path / "out", "-m", model)
    for more, words in (
        (("--chunk-tokens", 20), "long texts are not cut"),
        (("--on-long", "chunk", "--chunk-tokens", 49), "above the model's 48"),
        (("--on-long", "chunk", "--chunk-tokens", 9, "--prompt", "a long prompt"), "no room for text"),
        (("--on-long", "chunk", "--chunk-overlap", 25), "above half"),
        (("--on-long", "chunk", "--metadata", "chunk_index"), "chunk_index"),
    ):
        refused = in_process(capsys, *plain, *more)
        assert (refused.status, words in refused.sentence) == (2, True), refused.err
        assert not (tmp_path / "out").exists()
    refused = in_process(capsys, *command(corpus, made[0], model, "--keep-text", "--chunk-tokens", 30, "--incremental"))
    assert (refused.status, "chunk_tokens" in refused.sentence) == (2, True), refused.err
