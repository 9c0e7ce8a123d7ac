"""`embedq produce` and `embedq worker` as processes of their own, against real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
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
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.sinks.dataset import Dataset
from servers import Server

from embedq.dataset import open_dataset

MANY = documents(4000, words=60)
PACE = ("--flush-interval-s", 0.1, "--max-batch-tokens", 512, "--lease-s", 2, "--window-jobs", 1)


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of the test's own, where the kind makes no difference."""
    with Server() as server:
        yield server


@pytest.fixture
def start_worker() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `embedq worker`; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(server: Server, model: Path, *arguments: object, cwd: Path) -> subprocess.Popen[str]:
        started.append(start("worker", "--redis", server.url, "--model", model, *arguments, cwd=cwd))
        return started[-1]

    yield start_one
    for worker in started:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
        worker.communicate()


def test_a_producer_and_a_worker_killed_half_way_lose_and_double_nothing(
    server: Server, model: Path, tmp_path: Path, start_worker: Callable[..., subprocess.Popen[str]]
) -> None:
    corpus, out = write_corpus(tmp_path / "c.jsonl", MANY), tmp_path / "out"
    command = ("produce", corpus, "--redis", server.url, "--output", out, "--run", "nightly")
    slow = ("--max-backlog-bytes", 1 << 20, "--job-documents", 64)
    producer = start(*command, *slow)
    with server.client() as client:
        registry = Registry(client, Keys("default"))
        full = wait_until(lambda: registry.backlog_bytes() > 900_000 and registry.state("nightly"), "the queue is full")
        assert 0 < full.counters.input < len(MANY)
        producer.kill()
        producer.communicate()

        first = start_worker(server, model, *PACE, cwd=tmp_path)
        waiting = start(*command, *slow, "--wait")
        wait_for_rows(out, first)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        assert len(rows(out)) < len(MANY)
        second = start_worker(server, model, *PACE, cwd=tmp_path)
        done = finish(waiting)

        assert done.status == 0, done.err
        assert done.err.splitlines()[0] == "resuming run nightly"
        assert done.out == "run nightly: 4,000 documents sent, status completed\n"
        assert_complete(out, [document["id"] for document in MANY])
        os.kill(second.pid, signal.SIGTERM)
        assert finish(second).status == 0
        assert leftovers(second) == []
        assert registry.backlog_bytes() == 0


def test_results_stay_in_redis_two_queues_serve_two_models_and_neither_takes_the_others(
    own_server: Server,
    model: Path,
    other_model: Path,
    tmp_path: Path,
    start_worker: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = ("--redis", own_server.url)
    given = documents(60)
    corpus = write_corpus(tmp_path / "c.jsonl", [*given, {"id": "bad"}])
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    sent = in_process(capsys, "produce", corpus, *url, "--queue", "a", "--run", "first")
    assert (sent.status, sent.out) == (0, "run first: 61 documents sent, status in_progress\n")
    assert sent.sentence == "to see the vectors: embedq results first"
    follower = start("results", "first", *url, "--queue", "a", "--follow")
    start_worker(own_server, model, "--queue", "a", cwd=workplace)
    start_worker(own_server, other_model, "--queue", "b", cwd=workplace)

    followed = finish(follower)
    assert followed.status == 0, followed.err
    by_id = {row["id"]: row["vector"] for row in json_lines(followed.out)}
    assert all(float(str(np.float32(number))) == number for vector in by_id.values() for number in vector)
    assert sorted(by_id) == sorted(document["id"] for document in given)
    cursor = followed.sentence.removeprefix("cursor: ")
    rest = in_process(capsys, "results", "first", *url, "--queue", "a", "--after", cursor)
    assert (rest.status, rest.out) == (0, "")
    wrong = in_process(capsys, "results", "first", *url, "--queue", "a", "--after", "yesterday")
    assert (wrong.status, wrong.sentence) == (
        2,
        "error: usage: --after 'yesterday' is not a cursor that an earlier call printed",
    )
    errors = list(json_lines(in_process(capsys, "errors", "first", *url, "--queue", "a", "--json").out))
    assert [(letter["id"], letter["line"], letter["code"]) for letter in errors] == [("bad", 61, "missing_text")]

    other = in_process(capsys, "produce", corpus, *url, "--queue", "b", "--run", "first", "--wait")
    assert other.status == 3
    assert "60 vectors of 61 documents, 1 failed" in other.err
    assert "to see the failed documents: embedq errors first\n" in other.err
    others = json_lines(in_process(capsys, "results", "first", *url, "--queue", "b").out)
    assert all(row["vector"] != by_id[row["id"]] for row in others)
    differing = in_process(capsys, "produce", corpus, *url, "--queue", "b", "--run", "first", "--prompt", "p")
    assert differing.status == 2
    assert "choose another --run" in differing.sentence

    mismatch = f"queue a is bound to another model ({model.name}, "
    for refused in (
        embedq("worker", *url, "--queue", "a", "--model", other_model, "--log-level", "ERROR"),
        in_process(capsys, "run", corpus, "-o", "out", *url, "--queue", "a", "--model", other_model),
    ):
        assert refused.status == 2
        assert refused.err.splitlines()[-1].startswith(f"error: model_mismatch: {mismatch}")
        assert "use another --queue" in refused.err
    assert not (tmp_path / "out").exists()

    outside = in_process(
        capsys, "produce", corpus, *url, "--queue", "a", "--output", tmp_path / "outside", "--run", "out", "--wait"
    )
    assert outside.status == 1
    assert outside.sentence.startswith(f"error: run_failed: {tmp_path}/outside is outside the output roots")
    assert not (tmp_path / "outside").exists()
    inside = in_process(
        capsys, "produce", corpus, *url, "--queue", "a", "--output", workplace / "in", "--run", "in", "--wait"
    )
    assert inside.status == 3, inside.err
    assert_complete(workplace / "in", by_id)
    written = in_process(capsys, "results", "in", *url, "--queue", "a")
    assert {row["id"]: row["vector"] for row in json_lines(written.out)}.keys() == by_id.keys()

    shown = in_process(capsys, "status", *url, "--queue", "a")
    assert all(name in shown.out for name in ("first", "out  failed", "in  completed", "embedder", "tokenizer"))
    known = json.loads(in_process(capsys, "status", "first", *url, "--queue", "a", "--json").out)
    assert [state["run"] for state in known["runs"]] == ["first"]
    assert all(beat["consumer"] in shown.out for beat in known["workers"])
    assert known["model"]["model_id"] == model.name
    for command in ("status", "results", "errors", "cancel"):
        unknown = in_process(capsys, command, "nobody", *url, "--queue", "a")
        assert (unknown.status, unknown.sentence) == (2, "error: run_not_found: queue a knows no run nobody")


def test_a_producer_cuts_long_texts_with_the_models_tokenizer(
    own_server: Server,
    model: Path,
    tmp_path: Path,
    start_worker: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    longer = generate_checkpoint(tmp_path / "longer", hidden_size=32, layers=2, max_length=96)
    given = documents(40, words=60)
    corpus, out = write_corpus(tmp_path / "c.jsonl", given), tmp_path / "out"
    command = ("produce", corpus, "--redis", own_server.url, "--output", out, "--on-long", "chunk")
    refused = in_process(capsys, *command)
    assert (refused.status, "--model" in refused.sentence) == (2, True)
    start_worker(own_server, model, *PACE, cwd=tmp_path)
    done = embedq(*command, "--model", model, "--wait", "--keep-text")
    assert done.status == 0, done.err
    found: dict[str, str] = {}
    for batch in open_dataset(out).batches(order="input"):
        for row in batch.to_pylist():
            # An eighth of 48 tokens is repeated.
            found[row["id"]] = found.get(row["id"], "")[: row["char_start"]] + row["text"]
            assert not row["truncated"]
    assert found == {document["id"]: document["text"] for document in given}
    assert open_dataset(out).rows > 2 * len(given)
    other = in_process(capsys, *command, "--run", "other", "--model", longer)
    assert (other.status, "is not what queue default serves" in other.sentence) == (2, True)


def test_a_cancelled_run_is_skipped_and_counted(
    own_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ("--redis", own_server.url)
    corpus = write_corpus(tmp_path / "c.jsonl", documents(10))
    in_process(capsys, "produce", corpus, *url, "--run", "r")
    assert in_process(capsys, "cancel", "r", *url).out == "run r: cancelling\n"
    again = in_process(capsys, "produce", corpus, *url, "--run", "r")
    assert again.status == 2
    assert again.sentence == "error: run_conflict: run r is cancelling; start a new one under another name with --run"


def test_a_directory_of_another_run_is_refused_before_anything_is_sent_and_never_read_as_its_own(
    own_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ("--redis", own_server.url)
    corpus = write_corpus(tmp_path / "c.jsonl", documents(10))
    out = tmp_path / "out"
    assert in_process(capsys, "produce", corpus, *url, "-o", out, "--run", "late").status == 0
    spec = RunSpec(run="early", queue="default", sink=ParquetSink(path=str(out)), created_at=1.0)
    Dataset(out).prepare(spec)
    refused = in_process(capsys, "produce", corpus, *url, "-o", out, "--run", "third")
    assert refused.status == 2
    assert refused.sentence == f"error: output: {out} holds run early; give another directory"
    assert "third" not in in_process(capsys, "status", *url).out
    foreign = in_process(capsys, "results", "late", *url)
    assert foreign.sentence == f"error: output: {out} holds run early, not late"


def test_waiting_without_a_worker_says_so(own_server: Server, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", documents(3))
    waiting = start("produce", corpus, "--redis", own_server.url, "--wait")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().strip() == "waiting: no worker is alive on queue default"
    waiting.send_signal(signal.SIGINT)
    assert finish(waiting).status == 4


def test_a_server_that_cannot_be_used_is_one_sentence_in_every_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", documents(1))
    with Server(args=("--requirepass", "right"), tcp=True) as guarded:
        wrong = guarded.url.replace("redis://", "redis://:guessed@")
        gone = "redis://127.0.0.1:9/0"
        commands = (
            ("run", corpus, "-o", "out", "--model", model),
            ("worker", "--model", model),
            ("produce", corpus),
            ("status",),
            ("results", "r"),
            ("errors", "r"),
            ("cancel", "r"),
        )
        for url, code, part, some in (
            # Each waits some seconds for a server that may be starting.
            (gone, "broker_unavailable", "Redis at redis://127.0.0.1:9/0 cannot be reached: Connection refused", 2),
            (wrong, "broker_auth", f"Redis at redis://:***@127.0.0.1:{guarded.port}/0 refused access", len(commands)),
        ):
            for command in commands[:some]:
                shown = in_process(capsys, *command, "--redis", url)
                assert shown.status == 5, shown.err
                assert shown.sentence.startswith(f"error: {code}: {part}")
                assert "guessed" not in shown.err
        assert not (tmp_path / "out").exists()


def test_a_full_server_makes_the_producer_wait_and_say_so_and_nothing_is_lost(
    own_server: Server, model: Path, tmp_path: Path, start_worker: Callable[..., subprocess.Popen[str]]
) -> None:
    corpus, out = write_corpus(tmp_path / "c.jsonl", MANY), tmp_path / "out"
    with own_server.client() as client:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", used + 500_000)
        command = ("produce", corpus, "--redis", own_server.url, "--output", out, "--run", "r", "--job-documents", 64)
        producer = start(*command)
        registry = Registry(client, Keys("default"))
        wait_until(lambda: client.exists(Keys("default").run("r")), "the run exists")
        assert producer.stderr is not None
        told = producer.stderr.readline()
        assert told.startswith("the queue is full (the server is at maxmemory); waiting until workers")
        assert registry.state("r").counters.input < len(MANY)
        producer.send_signal(signal.SIGINT)
        stopped = finish(producer)
        assert stopped.status == 4
        assert "the same command resumes" in stopped.err
        client.config_set("maxmemory", 1)
        refused = embedq(*command[:-3], "other")
        assert refused.status == 5
        assert refused.sentence.startswith(f"error: broker_out_of_memory: Redis at {own_server.url} is out of memory")
        client.config_set("maxmemory", used + 4_000_000)
        start_worker(own_server, model, *PACE, cwd=tmp_path)
        done = embedq(*command, "--wait")
        assert done.status == 0, done.err
        assert_complete(out, [document["id"] for document in MANY])
