"""`embedq run`: a corpus becomes a dataset, in one go, after an interruption, after any kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
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
    wait_for_rows,
    wait_until,
    write_corpus,
)
from embedq_broker.connect import connect
from embedq_broker.embedded import running_server_url

MANY = documents(4000)


def reference(model: Path, texts: list[str], *, prompt: str, dimensions: int, max_length: int) -> tuple[Any, list[int]]:
    """transformers' vectors (float32 [n, dimensions], normalised), one text at a time, and the true token counts."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    decoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    vectors, counts = [], []
    with torch.inference_mode():
        for text in texts:
            counts.append(len(tokenizer(prompt + text)["input_ids"]))
            ids = tokenizer(prompt + text, truncation=True, max_length=max_length, return_tensors="pt")
            last = decoder(**ids).last_hidden_state[0, -1, :dimensions]
            vectors.append(torch.nn.functional.normalize(last, dim=0).numpy())
    return np.stack(vectors), counts


def cosines(found: list[list[float]], expected: Any) -> Any:
    a = np.array(found, np.float64)
    return (a * expected).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(expected, axis=1)


def test_every_document_gets_the_vector_transformers_gives_it_and_the_columns_asked_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = documents(80)
    out = tmp_path / "out"
    command = ("run", write_corpus(tmp_path / "c.jsonl", given), "-o", out, "--model", model, "--dtype", "float32")
    asked = ("--metadata", "lang", "--keep-text", "--dimensions", 16, "--prompt-name", "query", "--max-length", 24)

    first = embedq(*command, *asked)

    assert first.status == 0, first.err
    assert first.out.startswith("completed: 80 vectors of 80 documents, 0 failed, 0 skipped")
    assert first.err == ""
    assert_complete(out, [document["id"] for document in given])
    table = list(rows(out).values())
    prompt = "Instruct: find it\nQuery:"
    texts = [document["text"] for document in given]
    expected, counts = reference(model, texts, prompt=prompt, dimensions=16, max_length=24)
    assert cosines([row["vector"] for row in table], expected).min() >= 0.9999
    assert [row["n_tokens"] for row in table] == counts
    assert [row["truncated"] for row in table] == [count > 24 for count in counts]
    assert {True, False} == {row["truncated"] for row in table}
    assert [row["text"] for row in table] == texts
    assert [row["lang"] for row in table] == [document["lang"] for document in given]
    part = next(out.glob("part-*"))
    columns = ["id", "ordinal", "vector", "n_tokens", "truncated", "text_sha256", "lang", "text"]
    assert sorted(pq.read_schema(part).names) == sorted(columns)
    facts = {key.decode(): value.decode() for key, value in pq.read_metadata(part).metadata.items()}
    assert facts["embedq.prompt"] == prompt
    assert facts["embedq.dimensions"] == "16"
    assert facts["embedq.pooling"] == "lasttoken"
    assert facts["embedq.normalized"] == "true"
    assert facts["embedq.dtype"] == "float32"
    assert len(facts["embedq.fingerprint"]) == 64

    again = in_process(capsys, *command, *asked)
    assert (again.status, again.sentence) == (0, f"{out} is already complete")
    assert "tokens/s" not in again.out
    differing = in_process(capsys, *command, *asked[:-2])
    assert differing.status == 2
    assert "made with other options (max_length)" in differing.sentence
    assert_complete(out, [document["id"] for document in given])

    state = json.loads(in_process(capsys, "status", out, "--json").out)["runs"][0]
    assert (state["status"], state["succeeded"], state["input"]) == ("completed", 80, 80)
    shown = in_process(capsys, "status", out).out
    assert state["run"] in shown
    assert str(out) in shown
    results = list(json_lines(in_process(capsys, "results", out, "--follow").out))
    # As few digits as tell one float32 from the next.
    printed = {row["id"]: np.asarray(row["vector"], np.float32).tolist() for row in results}
    assert printed == {row["id"]: row["vector"] for row in table}
    assert in_process(capsys, "errors", out).out == ""
    assert in_process(capsys, "cancel", out).out == f"run {state['run']}: completed\n"

    moved = out.rename(tmp_path / "moved")
    elsewhere = in_process(capsys, *command[:3], moved, *command[4:], *asked)
    assert elsewhere.status == 2
    assert f"made with other options (made as {out})" in elsewhere.sentence


def test_a_literal_prompt_and_unnormalised_vectors(model: Path, tmp_path: Path) -> None:
    given = documents(20)
    corpus, out = write_corpus(tmp_path / "c.jsonl", given), tmp_path / "out"
    done = embedq("run", corpus, "-o", out, "-m", model, "--dtype", "float32", "--prompt", "p: ", "--no-normalize")
    assert done.status == 0, done.err
    found = [row["vector"] for row in rows(out).values()]
    texts = [document["text"] for document in given]
    expected, _ = reference(model, texts, prompt="p: ", dimensions=32, max_length=48)
    assert cosines(found, expected).min() >= 0.9999
    assert np.abs(np.linalg.norm(found, axis=1) - 1).min() > 0.01


def long_command(model: Path, tmp_path: Path) -> tuple[object, ...]:
    """A run of some seconds that publishes a file every tenth of a second."""
    corpus = tmp_path / "many.jsonl"
    if not corpus.exists():
        write_corpus(corpus, MANY)
    pace = ("--flush-interval-s", 0.2, "--max-batch-tokens", 512, "--job-documents", 64)
    return ("run", corpus, "-o", tmp_path / "out", "--model", model, *pace)


def test_an_interrupted_run_says_so_and_the_same_command_completes_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = long_command(model, tmp_path)
    run = start(*command)
    wait_for_rows(out, run)
    going = json.loads(in_process(capsys, "status", out, "--json").out)
    assert going["runs"][0]["status"] == "in_progress"
    assert going["workers"]
    second = in_process(capsys, *command)
    assert second.status == 2
    assert second.sentence == f"error: run_conflict: another embedq run is writing into {out}"

    # As a terminal does it: to the whole foreground group.
    os.killpg(run.pid, signal.SIGINT)
    stopped = finish(run)

    assert stopped.status == 4
    assert leftovers(run, out) == []
    before = rows(out)
    assert 0 < len(before) < len(MANY)
    # What was under way at the signal was still committed, and is counted.
    assert stopped.sentence.startswith(f"incomplete: stopped: {len(before):,} of the ")
    assert stopped.sentence.endswith("the same command resumes")
    asked = in_process(capsys, "status", out)
    assert asked.status == 0
    assert f"{len(before):,} succeeded" in asked.out
    assert f"interrupted; the embedq run command that made {out} resumes it" in asked.out
    assert in_process(capsys, "errors", out).status == 0

    run = start(*command)
    wait_until(lambda: running_server_url(out / "_state"), "the server is up")
    follower = start("results", out, "--follow")
    done = finish(run)
    assert done.status == 0, done.err
    assert_complete(out, [document["id"] for document in MANY])
    after = rows(out)
    assert all(after[name]["vector"] == row["vector"] for name, row in before.items())
    followed = finish(follower)
    assert followed.status == 0, followed.err
    assert sorted(row["id"] for row in json_lines(followed.out)) == sorted(after)


@pytest.mark.parametrize("whole_group", [True, False], ids=["all its processes", "the command alone"])
def test_a_killed_run_leaves_no_process_and_the_same_command_completes_it(
    model: Path, tmp_path: Path, whole_group: bool
) -> None:
    out = tmp_path / "out"
    command = long_command(model, tmp_path)
    run = start(*command, "--lease-s", 600)
    wait_for_rows(out, run)

    (os.killpg if whole_group else os.kill)(run.pid, signal.SIGKILL)
    run.wait()

    wait_until(lambda: not leftovers(run, out), "its processes are gone")
    assert not (out / "_SUCCESS").exists()
    before = rows(out)
    assert len(before) < len(MANY)
    # Nobody waits for the leases of the dead.
    run = start(*command, "--lease-s", 600)
    done = finish(run)
    assert done.status == 0, done.err
    assert_complete(out, [document["id"] for document in MANY])
    assert all(rows(out)[name]["vector"] == row["vector"] for name, row in before.items())
    assert leftovers(run, out) == []


def test_a_cancelled_run_ends_with_what_it_has(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run = start(*long_command(model, tmp_path))
    wait_for_rows(out, run)
    assert in_process(capsys, "cancel", out).out.endswith(": cancelling\n")
    ended = finish(run)
    assert ended.status == 1, ended.err
    assert ended.out.startswith("cancelled: ")
    assert 0 < len(rows(out)) < len(MANY)
    assert not (out / "_SUCCESS").exists()
    again = embedq(*long_command(model, tmp_path))
    assert again.status == 1
    assert again.out.startswith("cancelled: ")


def test_a_run_whose_model_cannot_be_served_leaves_its_directory_to_the_next(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mamba9"}))
    corpus, out = write_corpus(tmp_path / "c.jsonl", documents(5)), tmp_path / "out"
    refused = embedq("run", corpus, "-o", out, "--model", broken, "--log-level", "ERROR")
    assert refused.status == 2
    assert refused.err.splitlines()[-1].startswith("error: model: ")
    assert "mamba9" in refused.err.splitlines()[-1]
    done = embedq("run", corpus, "-o", out, "--model", model)
    assert done.status == 0, done.err
    assert_complete(out, [f"d{i}" for i in range(5)])


def test_an_embedded_server_that_is_killed_ends_the_command_at_once_and_the_same_command_completes_it(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = long_command(model, tmp_path)
    run = start(*command)
    wait_for_rows(out, run)
    url = running_server_url(out / "_state")
    assert url is not None
    with connect(url) as client:
        os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
    stopped = finish(run, timeout_s=12)
    assert stopped.status == 5
    last = stopped.err.splitlines()[-1]
    assert last.startswith(
        "error: broker_unavailable: The embedded server ended unexpectedly: it was killed by SIGKILL"
    )
    assert leftovers(run, out) == []
    done = finish(start(*command))
    assert done.status == 0, done.err
    assert_complete(out, [document["id"] for document in MANY])


def test_a_loop_of_links_as_output_is_a_wrong_output(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refused = in_process(capsys, "run", write_corpus(tmp_path / "c.jsonl", documents(1)), "-o", loop, "--model", model)
    assert refused.status == 2
    assert refused.sentence.startswith(f"error: output: {loop} cannot be used: Too many levels of symbolic links")
