"""Texts that are known are not computed again: repeats within a corpus, and what an older dataset holds already."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from commands import assert_complete, embedq, finish, in_process, json_lines, rows, start, write_corpus
from embedq_broker.faults import POINTS
from embedq_schemas.text_hash import text_keys

from embedq.dataset import open_dataset

COPY = [point for point in POINTS if point.startswith("copy.")]
SWITCH = [point for point in POINTS if point.startswith("switch.")]


def corpus_of(count: int, distinct: int) -> list[dict[str, Any]]:
    """Documents of which the last `count - distinct` repeat earlier texts; ids and metadata are their own."""
    texts = [f"text {i} " + "people " * (i % 7) for i in range(distinct)]
    return [{"id": f"d{i}", "text": texts[i % distinct], "lang": ["en", None][i % 2], "n": i} for i in range(count)]


def edited(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A later state: some documents gone, some with another text, some with other metadata only, some new."""
    later = []
    for i, document in enumerate(documents):
        if i % 40 == 3:
            continue
        if i % 40 == 7:
            later.append(document | {"text": f"changed {i}"})
        elif i % 40 == 11:
            later.append(document | {"lang": "fr"})
        else:
            later.append(document)
        if i % 40 == 20:
            later.append({"id": f"new{i}", "text": f"new text {i}", "lang": "de", "n": -i})
    return later


def command(corpus: Path, out: Path, model: Path, *more: object) -> tuple[object, ...]:
    fast = ("--engine", "null", "--job-documents", 32, "--tokenizer-backend", "huggingface", "--file-bytes", 65536)
    return ("run", corpus, "-o", out, "-m", model, "--metadata", "lang", "--metadata", "n", *fast, *more)


def table(dataset: Path) -> pa.Table:
    """All rows in input order, without the facts of their files."""
    batches = list(open_dataset(dataset).batches(order="input"))
    return pa.Table.from_batches(batches).replace_schema_metadata(None).combine_chunks()


def summary(dataset: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((dataset / "_SUCCESS").read_text())
    return found


def tokens_of(found: pa.Table, texts: set[str]) -> int:
    """Tokens of `texts`, each counted once."""
    digests = {hashlib.sha256(text.encode()).digest() for text in texts}
    lengths = dict(zip(found["text_sha256"].to_pylist(), found["n_tokens"].to_pylist(), strict=True))
    return sum(min(48, lengths[digest]) for digest in digests)


def killed_at(points: Sequence[str], marks: Path, *arguments: object) -> Iterator[None]:
    """Repeat the command until it was killed once at each of `points`; yields after each kill."""
    marks.mkdir()
    faults = ",".join(f"{point}:kill" for point in points)
    for _ in points:
        ended = finish(start(*arguments, EMBEDQ_FAULTS=faults, EMBEDQ_FAULTS_ONCE=str(marks)))
        assert ended.status == -signal.SIGKILL, ended
        yield


def test_identical_texts_are_computed_once_however_often_the_command_is_killed(model: Path, tmp_path: Path) -> None:
    given = corpus_of(1000, 400)
    long = {"text": "many words " * 60, "lang": None, "n": 0}
    given += [long | {"id": f"long{i}"} for i in range(3)]
    out = tmp_path / "out"
    arguments = command(write_corpus(tmp_path / "c.jsonl", given), out, model, "--on-long", "error")

    assert len(list(killed_at(COPY, tmp_path / "marks", *arguments))) == len(COPY)
    done = embedq(*arguments)

    assert done.status == 3, done.err
    found = rows(out)
    assert_complete(out, [document["id"] for document in given[:1000]])
    for i, document in enumerate(given[:1000]):
        row = found[document["id"]]
        assert (row["ordinal"], row["lang"], row["n"]) == (i, document["lang"], document["n"])
        assert row["text_sha256"] == hashlib.sha256(document["text"].encode()).digest()
        assert row["vector"] == found[f"d{i % 400}"]["vector"]
    counts = summary(out)
    assert (counts["input"], counts["succeeded"], counts["failed"], counts["copied"]) == (1003, 1000, 3, 600)
    assert counts["tokens"] == tokens_of(table(out), {document["text"] for document in given[:1000]})
    # Repeats of a text that failed fail by themselves, for the same reason.
    letters = list(json_lines(embedq("errors", out, "--json").out))
    assert sorted((letter["id"], letter["code"]) for letter in letters) == [(f"long{i}", "too_long") for i in range(3)]


def test_an_incremental_run_computes_what_changed_and_equals_a_full_one_though_it_is_killed_at_every_step(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = corpus_of(1000, 900)
    after = edited(before)
    out, full = tmp_path / "out", tmp_path / "full"
    old, new = write_corpus(tmp_path / "old.jsonl", before), write_corpus(tmp_path / "new.jsonl", after)
    assert embedq(*command(old, out, model)).status == 0
    refused = in_process(capsys, *command(new, out, model))
    assert (refused.status, "--incremental" in refused.sentence) == (2, True)
    assert embedq(*command(new, full, model)).status == 0
    was, wanted = table(out), table(full)
    reader = open_dataset(out)

    arguments = command(new, out, model, "--incremental")
    seen = []
    for _ in killed_at([*COPY, *SWITCH], tmp_path / "marks", *arguments):
        # Whoever opens the dataset now finds one of its two states, whole.
        found = table(out)
        assert found.equals(was) or found.equals(wanted)
        seen.append(found.equals(wanted))
    done = embedq(*arguments)

    assert done.status == 0, done.err
    assert seen == sorted(seen)
    assert {True, False} == set(seen)
    assert_complete(out, [document["id"] for document in after])
    assert not (out / "_next").exists()
    assert table(out).equals(wanted)
    texts = {document["text"] for document in after} - {document["text"] for document in before}
    counts = summary(out)
    assert counts["tokens"] == tokens_of(wanted, texts)
    assert counts["copied"] == len(after) - sum(document["text"] in texts for document in after)
    # Who opened the old dataset still reads it.
    held = pa.Table.from_batches(list(reader.batches(order="input"))).replace_schema_metadata(None)
    assert held.combine_chunks().equals(was)
    again = in_process(capsys, *arguments)
    assert (again.status, again.sentence) == (0, f"{out} is already complete")


def test_files_whose_rows_all_stay_are_taken_over_as_they_are(model: Path, tmp_path: Path) -> None:
    before = corpus_of(1200, 1200)
    out = tmp_path / "out"
    corpus = tmp_path / "c.jsonl"
    assert embedq(*command(write_corpus(corpus, before), out, model)).status == 0
    inodes = {part.stat().st_ino for part in out.glob("part-*.parquet")}
    assert len(inodes) > 1

    after = [*before, {"id": "more", "text": "one more", "lang": None, "n": 1}]
    done = embedq(*command(write_corpus(corpus, after), out, model, "--incremental"))

    assert done.status == 0, done.err
    assert_complete(out, [document["id"] for document in after])
    assert inodes < {part.stat().st_ino for part in out.glob("part-*.parquet")}
    assert table(out)["id"].to_pylist() == [document["id"] for document in after]
    compacted = embedq("compact", out, "--grace-s", 0)
    assert compacted.status == 0, compacted.err
    assert table(out)["id"].to_pylist() == [document["id"] for document in after]
    # From a compacted dataset, and back to fewer documents.
    fewer = embedq(*command(write_corpus(corpus, before[:-600]), out, model, "--incremental"))
    assert fewer.status == 0, fewer.err
    assert summary(out)["tokens"] == 0
    assert_complete(out, [document["id"] for document in before[:-600]])


def test_an_update_that_would_leave_no_vector_is_refused_though_it_is_killed_and_the_dataset_stays(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = corpus_of(8, 8)
    out = tmp_path / "out"
    corpus = write_corpus(tmp_path / "c.jsonl", given)
    assert embedq(*command(corpus, out, model)).status == 0
    misspelt = command(corpus, out, model, "--incremental", "--text", "txet")
    emptied = command(write_corpus(tmp_path / "none.jsonl", []), out, model, "--reindex")
    for arguments, words in ((misspelt, "has a vector (missing_text: "), (emptied, "has a vector, so")):
        assert len(list(killed_at(["finish.done"], tmp_path / words[-8:].strip(), *arguments))) == 1
        assert (out / "_next" / "_SUCCESS").exists()
        refused = in_process(capsys, *arguments)
        assert (refused.status, words in refused.err) == (2, True), refused.err
        assert not (out / "_next").exists()
        assert_complete(out, [document["id"] for document in given])


def test_another_model_is_refused_until_reindex_which_readers_see_when_it_is_complete(
    model: Path, other_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = corpus_of(60, 50)
    out = tmp_path / "out"
    corpus = write_corpus(tmp_path / "c.jsonl", given)
    assert embedq(*command(corpus, out, model)).status == 0
    was = open_dataset(out).facts.fingerprint

    refused = in_process(capsys, *command(corpus, out, other_model, "--incremental", "--dimensions", 16))
    assert refused.status == 2
    assert "made with another model, dimensions" in refused.sentence
    assert "--reindex" in refused.sentence

    arguments = command(corpus, out, other_model, "--reindex", "--dimensions", 16)
    assert len(list(killed_at(["switch.begun"], tmp_path / "marks", *arguments))) == 1
    assert (open_dataset(out).facts.fingerprint, open_dataset(out).dimensions) == (was, 32)
    # What another command finds half way, it completes first.
    compacted = embedq("compact", out)
    assert compacted.status == 0, compacted.err
    reader = open_dataset(out)
    assert (reader.facts.fingerprint != was, reader.dimensions, reader.rows) == (True, 16, 60)
    again = in_process(capsys, *arguments)
    assert (again.status, again.sentence) == (0, f"{out} is already complete")


def test_texts_that_only_seem_to_be_known_are_computed_after_all(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = corpus_of(90, 60)
    corpus, out, full = write_corpus(tmp_path / "c.jsonl", given), tmp_path / "out", tmp_path / "full"
    assert embedq(*command(corpus, full, model)).status == 0
    # Keys of two bits: nearly all texts collide.
    for module in ("embedq_producer.repeats", "embedq.known"):
        monkeypatch.setattr(f"{module}.text_keys", lambda digests: text_keys(digests) & np.uint64(3))
    done = in_process(capsys, *command(corpus, out, model))
    assert done.status == 0, done.err
    assert_complete(out, [document["id"] for document in given])
    assert table(out).equals(table(full))
    assert summary(full)["copied"] == 30


def test_a_dry_run_counts_what_a_run_would_do_and_changes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = corpus_of(200, 160)
    after = edited(before)
    out = tmp_path / "out"
    old, new = write_corpus(tmp_path / "old.jsonl", before), write_corpus(tmp_path / "new.jsonl", after)
    fresh = in_process(capsys, *command(old, out, model, "--dry-run"))
    assert fresh.out.splitlines()[0].startswith("documents: 200: 0 unchanged, 0 changed, 200 new; 0 deleted;")
    assert "measured now" in fresh.out
    assert not out.exists()
    assert embedq(*command(old, out, model)).status == 0
    was = {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    told = in_process(capsys, *command(new, out, model, "--incremental", "--dry-run"))

    assert told.status == 0, told.err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == was
    # 5 of 200 are gone, 5 new, 5 have another text, 5 other metadata.
    assert told.out.splitlines()[0] == (
        "documents: 200: 185 unchanged, 10 changed, 5 new; 5 deleted; 0 bad or repeated ids"
    )
    done = embedq(*command(new, out, model, "--incremental"))
    assert done.status == 0, done.err
    assert told.out.splitlines()[1] == f"to compute: 10 texts, {summary(out)['tokens']:,} tokens"
    refused = in_process(capsys, *command(old, out, model, "--incremental", "--dry-run", "--prompt", "p: "))
    assert (refused.status, "made with another prompt" in refused.sentence) == (2, True)
