"""Whatever a corpus, a directory or a model is like: an error row or one sentence, and a documented exit status."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import (
    assert_complete,
    documents,
    embedq,
    finish,
    in_process,
    json_lines,
    leftovers,
    rows,
    start,
    wait_until,
    write_corpus,
)

HUGE = 50_000_000


def test_every_kind_of_bad_line_is_an_error_row_and_every_good_one_a_vector(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {f"key{i}": i for i in range(100_000)}
    lines = [
        b'\xef\xbb\xbf{"id":"bom","text":"after a byte order mark"}',
        b'{"id":"crlf","text":"ends in CR LF"}\r',
        b"",
        b" \t \r",
        b'{"id":"bytes","text":"\xff\xfe"}',
        b'{"id":"nul","text":"a\x00b"}',
        b'{"id":"escaped-nul","text":"a\\u0000b"}',
        b'{"id":"surrogate","text":"\\ud800"}',
        b'{"id":"pair","text":"\\ud83d\\ude00"}',
        b'{"id":"huge","text":"' + b"word " * (HUGE // 5) + b'"}',
        b'{"id":"no-text"}',
        b'{"id":"null","text":null}',
        b'{"id":"number","text":5}',
        b'{"id":"list","text":["a"]}',
        b'{"id":"twice","text":"first"}',
        b'{"id":"twice","text":"second"}',
        b'{"id":9007199254740993,"text":"beyond what a float holds"}',
        b'{"id":123456789012345678901234567890,"text":"beyond 64 bits"}',
        json.dumps({"id": "keys", "text": "many keys", **keys}).encode(),
        b'{"id":"broken","text":',
        b'["a list"]',
        b'{"id":"empty","text":""}',
        b'{"id":"","text":"an empty id"}',
        b'{"id":1.5,"text":"a fraction"}',
        b'{"id":"last","text":"without a newline"}',
    ]
    corpus, out = tmp_path / "bad.jsonl", tmp_path / "out"
    corpus.write_bytes(b"\n".join(lines))
    options = ("--metadata", "key99999", "--keep-text", "--on-duplicate-id", "error", "--engine", "null")

    done = embedq("run", corpus, "-o", out, "--model", model, *options)

    assert done.status == 3, done.err
    assert done.sentence == f"to see the failed documents: embedq errors {out}"
    found = rows(out)
    good = ["bom", "crlf", "escaped-nul", "pair", "huge", "twice", "keys", "empty", "last"]
    assert_complete(out, [*good, "9007199254740993", "123456789012345678901234567890"])
    assert found["escaped-nul"]["text"] == "a\0b"
    assert found["pair"]["text"] == "😀"
    assert found["twice"]["text"] == "first"
    assert found["keys"]["key99999"] == 99999
    assert found["huge"]["truncated"]
    assert found["huge"]["n_tokens"] > HUGE / 10
    assert not found["empty"]["truncated"]
    errors = {letter["line"]: letter for letter in json_lines(in_process(capsys, "errors", out, "--json").out)}
    assert {line: letter["code"] for line, letter in errors.items()} == {
        5: "invalid_utf8",
        6: "invalid_json",
        8: "invalid_utf8",
        11: "missing_text",
        12: "missing_text",
        13: "invalid_text",
        14: "invalid_text",
        16: "duplicate_id",
        20: "invalid_json",
        21: "invalid_json",
        23: "invalid_id",
        24: "invalid_id",
    }
    assert errors[14]["id"] == "list"
    table = in_process(capsys, "errors", out, "--code", "invalid_text").out.splitlines()
    assert [line.split("\t")[:4] for line in table] == [
        ["line 13", "number", "produce", "invalid_text"],
        ["line 14", "list", "produce", "invalid_text"],
    ]
    again = in_process(capsys, "run", corpus, "-o", out, "--model", model, *options)
    assert again.status == 3
    assert again.err.splitlines()[0] == f"{out} is already complete"


def test_a_bad_line_stops_a_strict_run_which_completes_without_strict(model: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "out"
    corpus.write_text('{"id":"a","text":"good"}\n{"id":"b","text":7}\n')
    command = ("run", corpus, "-o", out, "--model", model, "--engine", "null")
    stopped = embedq(*command, "--strict")
    assert stopped.status == 2
    assert stopped.sentence.startswith(f"error: input: The corpus {corpus}, line 2: ")
    done = embedq(*command)
    assert done.status == 3
    assert_complete(out, ["a"])


def test_an_empty_corpus_is_a_complete_run_of_nothing(model: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "empty.jsonl", tmp_path / "out"
    corpus.touch()
    done = embedq("run", corpus, "-o", out, "--model", model, "--engine", "null")
    assert done.status == 0
    assert done.sentence == f"the corpus {corpus} holds no documents"
    assert done.out.startswith("completed: 0 vectors of 0 documents")
    assert json.loads((out / "_SUCCESS").read_text())["input"] == 0


def test_a_corpus_that_is_none_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "empty").mkdir()
    for corpus, part in (
        (tmp_path / "missing.jsonl", "does not exist"),
        (tmp_path / "empty", "holds no file of a known format"),
        (pipe, "is a pipe"),
        (Path("/proc/self/mem"), "cannot be read"),
    ):
        for command in (("run", corpus, "-o", out, "--model", model), ("produce", corpus, "--redis", "redis://x:1")):
            shown = in_process(capsys, *command)
            assert shown.status == 2
            assert shown.sentence.startswith(f"error: input: The corpus {corpus} ")
            assert part in shown.sentence
    assert not out.exists()


def test_an_output_that_cannot_be_one_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", documents(1))
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("precious")
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "_run.json").write_text("{}")
    inside = tmp_path / "inside"
    inside.mkdir()
    hidden = write_corpus(inside / "part-1.jsonl", documents(1))
    for source, out, part in (
        (corpus, full, "is not empty and holds no run; give another directory, or empty it"),
        (corpus, corpus, f"{corpus} is a file, so"),
        (inside, inside / "out", "lies inside the corpus"),
        (corpus, corpus / "below", f"{corpus} is a file, so"),
        (corpus, Path("/proc/embedq"), "cannot write into /proc/embedq"),
        (corpus, stranger, "_run.json cannot be read"),
        (hidden, inside, "would be overwritten"),
    ):
        shown = in_process(capsys, "run", source, "-o", out, "--model", model)
        assert shown.status == 2, shown.err
        assert shown.sentence.startswith("error: output: ")
        assert part in shown.sentence
    assert (full / "thesis.txt").read_text() == "precious"
    assert len(corpus.read_text().splitlines()) == 1


def test_a_model_that_is_none_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", documents(1))
    empty = tmp_path / "empty"
    empty.mkdir()
    translator = tmp_path / "translator"
    translator.mkdir()
    (translator / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    for name, part in (
        (tmp_path / "missing", "no checkpoint folder at"),
        (corpus, "is a file; expected a checkpoint folder or a hub id"),
        (empty, "config.json is missing"),
        (translator, "is an encoder-decoder (t5)"),
        ("nobody/nothing", "no folder"),
        ("a b", "'a b'"),
    ):
        shown = in_process(capsys, "run", corpus, "-o", "out", "--model", name)
        assert shown.status == 2, shown.err
        assert shown.sentence.startswith("error: model: ")
        assert part in shown.sentence
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs a privilege this user has not")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> Path:
    """Take all the space that is left."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return ballast


def test_a_read_only_output_is_refused(
    model: Path, tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", documents(1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    shown = in_process(capsys, "run", corpus, "-o", small_disk / "out", "--model", model)
    assert shown.status == 2
    assert shown.sentence == (
        f"error: output: cannot write into {small_disk}/out: Read-only file system; give another directory"
    )


def test_a_full_disk_ends_the_run_with_a_sentence_and_the_same_command_completes_it_once_there_is_room(
    model: Path, tmp_path: Path, small_disk: Path
) -> None:
    given = documents(4000)
    corpus, out = write_corpus(tmp_path / "c.jsonl", given), small_disk / "out"
    pace = ("--flush-interval-s", 0.2, "--max-batch-tokens", 512, "--job-documents", 64, "--storage-patience-s", 0.5)
    command = ("run", corpus, "-o", out, "--model", model, *pace, "--log-level", "ERROR")
    run = start(*command)
    wait_until(lambda: (out / "_manifest.jsonl").exists() or run.poll() is not None, "the first file")
    ballast = fill(small_disk)
    ended = finish(run)
    assert ended.status == 5, ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith(
        ("error: storage: cannot write", "error: storage: cannot publish", "error: broker_unavailable: ")
    )
    assert leftovers(run, out) == []
    refused = embedq(*command)
    assert refused.status == 5, refused.err
    assert any(words in refused.err.splitlines()[-1] for words in ("No space left on device", "is its disk full?"))

    before = rows(out)
    assert len(before) < len(given)
    ballast.unlink()
    done = embedq(*command)
    assert done.status == 0, done.err
    assert_complete(out, [document["id"] for document in given])
    assert all(rows(out)[name]["vector"] == row["vector"] for name, row in before.items())
