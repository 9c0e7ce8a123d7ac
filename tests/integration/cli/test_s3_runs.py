"""`embedq run` and `embedq produce` to an S3 server: the dataset is the one on disk, and so are its guarantees."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import (
    Finished,
    assert_complete,
    documents,
    embedq,
    finish,
    in_process,
    json_lines,
    leftovers,
    rows,
    start,
    write_corpus,
)
from embedq_schemas.errors import OutputError
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_worker.sinks.dataset import dataset_at
from s3_server import KEYS, Bucket
from servers import Server
from waiting import wait_until

from embedq import ownership
from embedq.claim import claim
from embedq.dataset import open_dataset
from embedq.directory import local_state
from embedq.ownership import Ownership

SLOW = "embed.forward:delay:every:0.3"
GIVEN = documents(60)


class Run:
    """One `embedq run` command with its output on S3."""

    def __init__(self, bucket: Bucket, folder: Path, model: Path, given: Sequence[dict[str, Any]] = GIVEN) -> None:
        self.bucket, self.folder = bucket, folder
        self.given = given
        self.state = folder / "state"
        self.corpus = write_corpus(folder / "corpus.jsonl", given)
        self.output = bucket.at("vectors")
        self.arguments = ["run", self.corpus, "--model", model, "--engine", "null", "--metadata", "lang", "--keep-text"]
        self.arguments += ["--max-batch-tokens", 256, "--job-documents", 8, "--flush-interval-s", 0.2, "--lease-s", 1]

    def command(self, *more: object, state: Path | None = None) -> list[object]:
        return [*self.arguments, "-o", self.output, "--state", state or self.state, *more]

    def start(self, faults: str = "", *more: object, state: Path | None = None) -> subprocess.Popen[str]:
        variables = {"EMBEDQ_FAULTS": faults} if faults else {}
        return start(*self.command(*more, state=state), **variables)

    def complete(self, *more: object) -> Finished:
        """Run to the end, and look at every row."""
        done = embedq(*self.command(*more))
        assert done.status == 0, done.err
        self.check()
        return done

    def check(self) -> None:
        copy = self.bucket.copy("vectors", self.folder / "copy")
        assert_complete(copy, [document["id"] for document in self.given])
        shutil.rmtree(copy)
        assert self.bucket.uploads() == []
        assert self.bucket.keys("vectors/_owner/") == []
        assert not self.state.exists() or not any(self.state.iterdir())


@pytest.fixture
def run(bucket: Bucket, tmp_path: Path, model: Path) -> Run:
    return Run(bucket, tmp_path, model)


def test_a_run_to_s3_is_the_run_to_disk_row_for_row_and_is_read_by_every_command(
    run: Run, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(run.corpus.read_text() + "no JSON\n" + json.dumps({"id": "twin", "text": GIVEN[3]["text"]}) + "\n")
    run.arguments[1] = bad
    first = embedq(*run.command())
    assert first.status == 3, first.err
    assert first.out.startswith("completed: 61 vectors of 62 documents, 1 failed")
    assert f"what this run needs to resume is kept in {run.state}" in first.err
    local = tmp_path / "local"
    assert embedq(*run.arguments, "-o", local).status == 3
    copy = bucket.copy("vectors", tmp_path / "copy")
    assert rows(copy) == rows(local)
    schemas = [pq.read_schema(next(folder.glob("part-*.parquet"))) for folder in (copy, local)]
    assert schemas[0].remove_metadata() == schemas[1].remove_metadata()
    facts = [{k: v for k, v in schema.metadata.items() if k != b"embedq.run"} for schema in schemas]
    assert facts[0] == facts[1]
    summaries = [json.loads((folder / "_SUCCESS").read_text()) for folder in (copy, local)]
    counts = [{name: summary[name] for name in ("input", "succeeded", "failed", "copied")} for summary in summaries]
    assert counts[0] == counts[1]
    assert bucket.uploads() == []
    assert not any(run.state.iterdir())

    again = in_process(capsys, *run.command())
    assert (again.status, again.err.splitlines()[0]) == (3, f"{run.output} is already complete")
    # Readers, in this process.
    dataset = open_dataset(run.output)
    table = pa.Table.from_batches(dataset.batches(order="input"))
    assert table.to_pylist() == list(rows(local).values())
    inspected = in_process(capsys, "inspect", run.output, "--json")
    assert json.loads(inspected.out)["rows"] == 61
    assert json.loads(inspected.out)["errors"] == {"invalid_json": 1}
    exported = in_process(capsys, "export", run.output, "--to", "jsonl", "--output", tmp_path / "rows.jsonl")
    assert exported.status == 0, exported.err
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 61
    results = in_process(capsys, "results", run.output)
    assert {row["id"] for row in json_lines(results.out)} == set(rows(local))
    assert "invalid_json" in in_process(capsys, "errors", run.output).out
    assert "completed" in in_process(capsys, "status", run.output).out
    for refused in (("compact", run.output), run.command("--incremental"), run.command("--reindex")):
        done = in_process(capsys, *refused)
        assert done.status == 2
        assert done.sentence.startswith("error: usage: ")
    other = in_process(capsys, *run.command("--dimensions", 8))
    assert other.status == 2
    assert "made with other options (dimensions)" in other.sentence
    # Failed documents are sent again by the same command, and no others.
    assert in_process(capsys, "retry", run.output, "--state", run.state).out.startswith("1 failed documents")
    assert not bucket.keys("vectors/_SUCCESS")
    assert embedq(*run.command()).status == 3
    assert rows(bucket.copy("vectors", tmp_path / "retried")) == rows(local)


@pytest.mark.parametrize("lost", [pytest.param("nothing", marks=pytest.mark.long), "state"])
def test_a_killed_run_resumes_with_its_state_and_without(run: Run, bucket: Bucket, lost: str) -> None:
    process = run.start(SLOW)
    bucket.wait_for_parts("vectors", 2)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish_off(process)
    before = set(bucket.keys("vectors/part-"))
    assert len(before) >= 2
    if lost == "state":
        # As on another machine, once the holder is long dead.
        shutil.rmtree(run.state)
        for key in bucket.keys("vectors/_owner/"):
            bucket.client.delete_object(Bucket=bucket.name, Key=key)
    done = run.complete()
    if lost == "state":
        assert "the server does not know this run" in done.err
    assert before <= set(bucket.keys("vectors/part-")), "what was published is not computed again"


def test_two_runs_on_one_prefix_are_one_run_and_refusals(run: Run, bucket: Bucket, tmp_path: Path) -> None:
    process = run.start("embed.forward:delay:every:3")
    bucket.wait_for_parts("vectors")
    same_machine = embedq(*run.command())
    assert same_machine.status == 2
    assert f"error: run_conflict: another embedq run is writing into {run.output}" in same_machine.err
    other_machine = embedq(*run.command(state=tmp_path / "elsewhere"))
    assert other_machine.status == 2
    assert "error: run_conflict: another embedq run, on another machine, is writing into" in other_machine.err
    other_request = embedq(*run.command("--dimensions", 8, state=tmp_path / "elsewhere"))
    assert other_request.status == 2
    assert "made with other options" in other_request.err
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.status == 4
    assert "the same command resumes" in stopped.err
    assert bucket.keys("vectors/_owner/") == []
    run.complete()


@pytest.mark.long
@pytest.mark.parametrize("wakes", ["after its end", "while it goes on"])
def test_a_run_that_slept_while_another_machine_took_over_finds_out_and_adds_nothing(
    run: Run, bucket: Bucket, tmp_path: Path, wakes: str
) -> None:
    process = run.start("embed.forward:delay:every:1")
    bucket.wait_for_parts("vectors")
    asleep = [psutil.Process(process.pid), *leftovers(process)]
    for each in asleep:
        each.suspend()
    # As after long silence.
    for key in bucket.keys("vectors/_owner/"):
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
    before = len(bucket.keys("vectors/_manifest/"))
    faults = "embed.forward:delay:every:2" if wakes == "while it goes on" else ""
    other = run.start(faults, state=tmp_path / "elsewhere")
    if wakes == "while it goes on":
        bucket.wait_for_parts("vectors", before + 1)
    else:
        assert finish(other).status == 0
    for each in asleep:
        each.resume()
    ended = finish(process)
    assert ended.status == 2, ended.err
    assert f"another embedq run, on another machine, took over {run.output}" in ended.err
    if wakes == "while it goes on":
        assert finish(other).status == 0
    assert_complete(bucket.copy("vectors", tmp_path / "copy"), [document["id"] for document in run.given])
    assert bucket.uploads() == []


def test_a_producer_and_a_worker_write_below_the_workers_prefix_and_nowhere_else(
    run: Run, bucket: Bucket, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server() as server:
        at = ("--redis", server.url)
        command = ("--model", model, "--engine", "null", "--flush-interval-s", 0.2, "--output-root", bucket.at("mine/"))
        worker = start("worker", *at, *command)
        try:
            refused = embedq("produce", run.corpus, *at, "-o", bucket.at("others/vectors"), "--wait")
            assert refused.status == 1
            assert "is outside the output roots of this worker" in refused.err
            sent = embedq("produce", run.corpus, *at, "-o", bucket.at("mine/vectors/"), "--run", "nightly", "--wait")
            assert sent.status == 0, sent.err
        finally:
            worker.send_signal(signal.SIGTERM)
            finish(worker)
        results = in_process(capsys, "results", "nightly", *at)
        assert len(results.out.splitlines()) == len(run.given)
        other = in_process(capsys, "produce", run.corpus, *at, "-o", bucket.at("mine/vectors"), "--run", "other")
        assert other.status == 2
        assert f"{bucket.at('mine/vectors')} holds run nightly; give another" in other.sentence
    assert_complete(bucket.copy("mine/vectors", run.folder / "copy"), [document["id"] for document in run.given])
    assert bucket.keys("others/") == []
    assert bucket.uploads() == []


@pytest.mark.long
@pytest.mark.parametrize("point", ["copy.begun", "copy.staged", "copy.committed", "copy.published"])
def test_a_run_killed_while_it_copies_known_vectors_resumes(
    bucket: Bucket, tmp_path: Path, model: Path, point: str
) -> None:
    run = Run(bucket, tmp_path, model, [*GIVEN, *({**document, "id": f"twin-{document['id']}"} for document in GIVEN)])
    process = run.start(f"{point}:kill")
    process.communicate(timeout=90)
    assert process.returncode == -signal.SIGKILL
    finish_off(process)
    run.complete()


def test_a_prefix_that_holds_something_else_is_refused(
    run: Run, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="vectors/notes.txt", Body=b"mine")
    refused = in_process(capsys, *run.command())
    assert (refused.status, refused.out) == (2, "")
    assert f"{run.output} is not empty and holds no run" in refused.sentence
    assert bucket.keys() == ["vectors/notes.txt"]


def test_a_corpus_is_not_taken_for_the_output(run: Run, bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="vectors/in.jsonl", Body=run.corpus.read_bytes())
    bucket.client.put_object(Bucket=bucket.name, Key="vectors/part-1.jsonl", Body=run.corpus.read_bytes())
    sentences = {
        "vectors": "lies inside the corpus",
        "vectors/part-1.jsonl": "would be overwritten by the dataset",
        "vectors/in.jsonl": "is not empty and holds no run",
    }
    for source, sentence in sentences.items():
        run.arguments[1] = bucket.at(source)
        refused = in_process(capsys, *run.command())
        assert refused.status == 2
        assert sentence in refused.sentence


def test_access_denied_is_one_sentence_without_a_secret(
    run: Run, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.deny("s3:PutObject")
    refused = in_process(capsys, *run.command())
    assert (refused.status, refused.out) == (2, "")
    assert refused.sentence.startswith(f"error: output: cannot write {run.output}/")
    assert refused.sentence.endswith(": access is denied to these credentials")
    assert not any(secret in refused.err for secret in KEYS.values())
    assert bucket.keys() == []
    missing = in_process(capsys, *run.arguments, "-o", "s3://no-such-bucket-at-all/x")
    assert missing.status == 2
    assert "there is no such bucket" in missing.sentence


def test_a_holder_that_is_silent_for_long_is_followed_and_finds_out(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "RENEW_S", 3600.0)
    monkeypatch.setattr(ownership, "STALE_S", 1.0)
    dataset = dataset_at(bucket.at("vectors"))
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with Ownership(dataset, folders[0]) as first:
        first.confirm()
        with Ownership(dataset, folders[1]) as second:
            second.confirm()
            with pytest.raises(ownership.RunConflictError, match="took over"):
                first.confirm()
        # Its number is free again, and is not the first one's.
        with Ownership(dataset, folders[1]) as third:
            third.confirm()
            with pytest.raises(ownership.RunConflictError):
                first.confirm()
    assert bucket.keys() == []


def test_a_prefix_where_a_run_ended_before_it_wrote_anything_may_be_taken_by_another(
    bucket: Bucket, tmp_path: Path
) -> None:
    dataset = dataset_at(bucket.at("vectors"))
    state = local_state(dataset, tmp_path)
    first, second = (
        RunSpec(run=run, queue="q", sink=ParquetSink(path=str(dataset)), created_at=1.0, corpus=run)
        for run in ("first", "second")
    )
    assert claim(dataset, first, state) == first
    with pytest.raises(OutputError, match="give another prefix, or repeat the command"):
        claim(dataset, second, state)
    # Only a queue on this machine says that nobody is about to write.
    state.server.mkdir(parents=True)
    assert claim(dataset, second, state) == second
    dataset.store.replace("_errors/part-1.jsonl", b"{}")
    with pytest.raises(OutputError):
        claim(dataset, first, state)
    assert dataset.run_spec() == second


def test_a_state_is_kept_for_each_dataset_below_one_folder(bucket: Bucket, tmp_path: Path) -> None:
    places = {local_state(dataset_at(bucket.at(prefix)), tmp_path).folder for prefix in ("a", "b", "a/b")}
    assert len(places) == 3
    assert {place.parent for place in places} == {tmp_path}


def test_without_boto3_the_sentence_says_what_to_install(tmp_path: Path, model: Path) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError('not here')\n")
    corpus = write_corpus(tmp_path / "corpus.jsonl", GIVEN[:1])
    for command in (("run", corpus, "-m", model, "-o"), ("worker", "-m", model, "--output-root")):
        done = embedq(*command, "s3://bucket/x", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        assert done.status == 2
        assert done.sentence == "error: usage: s3:// needs boto3: pip install 'embedq[s3]'"


def finish_off(process: subprocess.Popen[str]) -> None:
    """Wait until what the killed command started has ended too."""
    wait_until(lambda: not leftovers(process), "the killed command's processes are gone")
