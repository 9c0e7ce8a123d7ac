"""`embedq run` and `embedq produce` of any source: one dataset, whatever the documents came from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from commands import (
    TIMEOUT_S,
    assert_complete,
    documents,
    embedq,
    environment,
    finish,
    in_process,
    json_lines,
    leftovers,
    rows,
    start,
    wait_for_rows,
    wait_until,
    write_corpus,
)
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from source_kinds import KINDS, PACK, delimited, jsonl, parquet

GIVEN = [
    {"id": f"d{i}", "text": f"text {i} " + "word " * (i % 7), "lang": "en", "year": i, "meta": None} for i in range(50)
]
KEPT = ("--metadata", "lang", "--metadata", "year:int64", "--keep-text", "--engine", "null")


def dataset(folder: Path) -> list[dict[str, Any]]:
    found = rows(folder)
    return [{name: value for name, value in row.items() if name != "vector"} for row in found.values()]


def test_a_directory_of_several_kinds_and_a_csv_file_become_the_same_dataset(model: Path, tmp_path: Path) -> None:
    for kind in ("directory", "csv.zst"):
        source = KINDS[kind](tmp_path / "in" / kind, GIVEN)
        if source.is_dir():
            (source / "notes [draft].xyz").touch()
        done = embedq("run", source, "-o", tmp_path / kind, "--model", model, *KEPT)
        assert done.status == 0, done.err
        assert not source.is_dir() or "/notes [draft].xyz (1 in all)" in done.err
        assert_complete(tmp_path / kind, [str(document["id"]) for document in GIVEN])
    assert dataset(tmp_path / "directory") == dataset(tmp_path / "csv.zst")
    schema = pq.read_table(tmp_path / "directory").schema
    assert (schema.field("lang").type, schema.field("year").type) == (pa.string(), pa.int64())


def test_types_lists_and_made_texts_reach_the_dataset_and_its_errors_name_their_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text(
        '{"id":"a","title":"T","body":"B","tags":["x","y"],"score":1,"ok":true,"o":{"k":[1]}}\n'
        '{"id":"b","title":null,"body":"C","tags":[],"score":2.5}\n'
        '{"id":"c","title":"only","score":"high"}\n'
    )
    table = pa.table({"id": [7], "title": ["P"], "body": ["Q"], "tags": [["z"]], "score": pa.array([3], pa.int8())})
    pq.write_table(table, folder / "b.parquet")
    (folder / "c.parquet").write_bytes(b"PAR1 damaged")
    names = ("tags", "score", "ok", "o")
    asked = [word for name in ("tags", "score:double", "ok", "o") for word in ("--metadata", name)]
    done = embedq(
        "run", folder, "-o", out, "--model", model, "--engine", "null", "--keep-text", "--template", "{title}: {body}",
        *asked,
    )  # fmt: skip
    assert done.status == 3, done.err
    table = pq.read_table(out)
    types = [str(table.schema.field(name).type) for name in names]
    assert types == ["list<element: string>", "double", "bool", "string"]
    found = {name: [row[column] for column in ("text", *names)] for name, row in rows(out).items()}
    assert found == {
        "a": ["T: B", ["x", "y"], 1.0, True, '{"k":[1]}'],
        "b": [": C", [], 2.5, None, None],
        "7": ["P: Q", ["z"], 3.0, None, None],
    }
    errors = list(json_lines(in_process(capsys, "errors", out, "--json").out))
    assert [(letter["file"], letter["line"], letter["code"]) for letter in errors] == [
        ("a.jsonl", 3, "invalid_metadata"),
        ("c.parquet", 1, "unreadable_file"),
    ]
    assert in_process(capsys, "errors", out).out.startswith("a.jsonl, line 3\tc\tproduce\tinvalid_metadata\t")
    shown = list(json_lines(in_process(capsys, "results", out).out))
    assert {row["id"]: row["tags"] for row in shown}["a"] == ["x", "y"]

    (folder / "d.jsonl").write_text('{"id":"d","title":"new"}\n')
    other = in_process(
        capsys, "run", folder, "-o", out, "--model", model, "--engine", "null", "--keep-text",
        "--template", "{title}: {body}", *asked,
    )  # fmt: skip
    assert other.status == 2
    assert "made with other options (corpus)" in other.sentence


def test_a_misspelt_type_of_metadata_is_said_to_be_read_as_a_fields_name(model: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", [{"id": "a", "text": "x", "year": 1, "dc:title": "t"}])
    run = ("run", corpus, "-o", tmp_path / "out", "--model", model, "--engine", "null")
    done = embedq(*run, "--metadata", "year:integer", "--metadata", "dc:title", "--metadata", "year:int64")
    assert done.status == 0
    assert [line for line in done.err.splitlines() if line.startswith("--metadata")] == [
        "--metadata year:integer is read as a field of that name, for 'integer' is no type",
        "--metadata dc:title is read as a field of that name, for 'title' is no type",
    ]
    (row,) = dataset(tmp_path / "out")
    assert (row["year:integer"], row["dc:title"], row["year"]) == (None, "t", 1)


def test_standard_input_is_a_source_and_the_same_input_is_recognised(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def piped(content: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [
            sys.executable,
            "-m",
            "embedq",
            "run",
            "-",
            "-o",
            str(out),
            "--model",
            str(model),
            "--engine",
            "null",
        ]
        return subprocess.run(command, input=content, capture_output=True, timeout=TIMEOUT_S, env=environment())

    done = piped(PACK[".gz"](jsonl(GIVEN)))
    assert done.returncode == 0, done.stderr
    assert_complete(out, [str(document["id"]) for document in GIVEN])
    again = piped(PACK[".gz"](jsonl(GIVEN)))
    assert (again.returncode, b"already complete" in again.stderr) == (0, True), again.stderr
    other = piped(jsonl(GIVEN[1:]))
    assert (other.returncode, b"made with other options (corpus)" in other.stderr) == (2, True), other.stderr


def test_a_killed_run_of_a_pipe_goes_on_when_the_whole_pipe_is_repeated(model: Path, tmp_path: Path) -> None:
    many = documents(800)
    corpus = write_corpus(tmp_path / "many.jsonl", many)
    out = tmp_path / "out"
    # Little backlog, so that the kill finds the producer inside its source.
    pace = ("--flush-interval-s", 0.2, "--max-batch-tokens", 512, "--job-documents", 16, "--job-bytes", 4096)
    command = ["run", "-", "-o", out, "--model", model, "--metadata", "lang", *pace]

    def begin() -> subprocess.Popen[str]:
        with corpus.open() as content:
            return start(*command, stdin=content)

    run = begin()
    wait_for_rows(out, run)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    wait_until(lambda: not leftovers(run, out), "its processes are gone")
    before = rows(out)
    assert len(before) < len(many)
    done = finish(begin())
    assert done.status == 0, done.err
    assert_complete(out, [document["id"] for document in many])
    after = rows(out)
    assert all(after[name]["vector"] == row["vector"] for name, row in before.items())
    assert [row["lang"] for row in after.values()] == [document["lang"] for document in many]


def test_several_sources_are_sent_to_a_queue_in_their_order(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_bytes(delimited(GIVEN[:20]))
    (tmp_path / "b.parquet").write_bytes(parquet(GIVEN[20:]))
    command = ("produce", tmp_path / "a.csv", tmp_path / "*.parquet", "--redis", redis_url, "--metadata", "year:int64")
    sent = in_process(capsys, *command)
    assert sent.status == 0, sent.err
    (state,) = Registry(redis_client, Keys("default")).runs()
    assert (state.counters.input, state.input_closed) == (50, True)
    assert (state.spec.metadata, state.spec.metadata_types) == (("year",), ("int64",))
    assert in_process(capsys, *command).out == sent.out


def test_sources_and_columns_that_cannot_be_used_are_refused_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    table = folder / "c.parquet"
    table.write_bytes(parquet(GIVEN))
    for words, code, part in (
        ((table, "--text", "body"), "input", "has no column 'body'; it has: id, text, lang, year, meta"),
        ((table, "--metadata", "topic"), "input", "has no column 'topic'"),
        ((table, "--template", "{a!r}"), "usage", "--template"),
        ((table, "--format", "xml"), "usage", "--format must be 'auto', 'jsonl'"),
        ((folder, "-o", folder / "out"), "output", "lies inside the corpus"),
        ((table, tmp_path / "missing.csv"), "input", "does not exist"),
        ((tmp_path / "*.jsonl",), "input", "matches no file"),
        (("nonsense://bucket/a",), "usage", "nonsense"),
    ):
        given = words if "-o" in words else (*words, "-o", out)
        shown = in_process(capsys, "run", *given, "--model", model, "--engine", "null")
        assert shown.status == 2, shown.err
        assert shown.sentence.startswith(f"error: {code}: ")
        assert part in shown.sentence
    assert not out.exists()
