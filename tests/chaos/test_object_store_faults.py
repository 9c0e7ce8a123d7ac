"""A dataset on S3 under every fault: killed at each step, replies lost, the server away, uploads aborted by hand."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounting import Corpus, account, write_corpus
from embedq_schemas.run import RunStatus
from embedq_worker.sinks import s3
from embedq_worker.sinks.dataset import dataset_at
from pipeline import EMBEDQ, hurry
from proxy import Proxy
from s3_pipeline import S3Pipeline
from s3_server import KEYS, Bucket, use
from servers import Server
from test_kill_points import ERRORS, ROWS, WORKER_POINTS

from embedq.directory import finished_state

STORE_POINTS = [p for p in WORKER_POINTS if p.startswith(("stage.", "embed.commit", "publish.", "drain.", "finish."))]
FORWARD = "embed.forward:delay:every:0.4"


@pytest.fixture
def pipeline(
    own_server: Server,
    tmp_path: Path,
    checkpoint: Path,
    corpus: Corpus,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[S3Pipeline]:
    hurry(monkeypatch)
    built = S3Pipeline(own_server.url, tmp_path, checkpoint, corpus, bucket)
    try:
        yield built
    finally:
        built.close()


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[Proxy]:
    """Between the workers and the S3 server."""
    with Proxy(int(bucket.environment["AWS_ENDPOINT_URL"].rpartition(":")[2])) as proxy:
        yield proxy


def through(proxy: Proxy) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}


def test_workers_killed_once_at_every_step_that_concerns_the_store_lose_and_double_nothing(
    pipeline: S3Pipeline,
) -> None:
    found = pipeline.killed_once_at_each(STORE_POINTS)
    assert (found.rows, found.errors) == (ROWS, ERRORS)


@pytest.mark.long
@pytest.mark.parametrize("point", STORE_POINTS)
def test_a_worker_killed_at_one_step_loses_and_doubles_nothing(pipeline: S3Pipeline, point: str) -> None:
    faults = f"{point}:kill"
    pipeline.start(faults=faults)
    pipeline.produce()
    pipeline.until(lambda: pipeline.fired(faults), f"passing {point}")
    found = pipeline.check()
    assert (found.rows, found.errors) == (ROWS, ERRORS)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_lost_replies_cuts_and_outages_at_random_lose_and_double_nothing(
    pipeline: S3Pipeline, proxy: Proxy, tmp_path: Path, seed: int
) -> None:
    pipeline.corpus = write_corpus(tmp_path / "many.jsonl", 4000, bad_lines=3, long_texts=4)
    pipeline.environment = pipeline.environment | through(proxy)
    pipeline.broker = pipeline.broker.model_copy(update={"max_deliveries": 100})
    pipeline.worker = pipeline.worker.model_copy(update={"flush_interval_s": 0.05})
    pipeline.produce()
    faults = [f"{point}:kill:0.03" for point in STORE_POINTS] + ["embed.forward:delay:every:0.05"]
    crew = pipeline.start(faults=",".join(faults), once=False, embedders=2)
    dice = random.Random(seed)
    done = threading.Event()

    def mistreat() -> None:
        while not done.wait(dice.random()):
            act = dice.random()
            if act < 0.3:
                proxy.lose_reply(dice.choice([b"partNumber=1", b"<CompleteMultipartUpload", b"/_manifest/"]))
            elif act < 0.6:
                proxy.cut()
            elif act < 0.7:
                proxy.refuse(True)
                done.wait(1.5)
                proxy.refuse(False)

    mistreating = threading.Thread(target=mistreat)
    mistreating.start()
    try:
        state = pipeline.finish(250)
    finally:
        done.set()
        mistreating.join()
    found = pipeline.check(state)
    assert (found.rows, found.errors) == (3996, 7)
    assert crew.deaths
    assert proxy.lost


def test_a_server_that_is_away_for_some_seconds_is_waited_out_with_the_vectors_in_hand(
    pipeline: S3Pipeline, proxy: Proxy
) -> None:
    pipeline.environment = pipeline.environment | through(proxy)
    pipeline.produce()
    crew = pipeline.start(faults=FORWARD, once=False)
    pipeline.until(lambda: pipeline.files() > 0, "the first file")
    proxy.refuse(True)
    pipeline.until(lambda: "holding finished vectors" in pipeline.log(), "the outage to be noticed")
    time.sleep(1.5)
    proxy.refuse(False)
    pipeline.check()
    assert crew.deaths == []
    assert "no answer of the object store" in pipeline.log()


def test_lost_replies_are_asked_for_again_and_nothing_is_doubled(pipeline: S3Pipeline, proxy: Proxy) -> None:
    pipeline.environment = pipeline.environment | through(proxy)
    proxy.lose_reply(*[b"partNumber=1", b"<CompleteMultipartUpload", b"/_manifest/"] * 2)
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False)
    pipeline.check()
    assert proxy.lost == 6


def test_an_upload_aborted_by_hand_before_its_publication_never_counts(pipeline: S3Pipeline, bucket: Bucket) -> None:
    pipeline.broker = pipeline.broker.model_copy(update={"lease_s": 0.5})
    pipeline.produce()
    crew = pipeline.start(faults="publish.before:stop")
    pipeline.until(lambda: pipeline.fired("publish.before"), "the first publication")
    record = next(iter(pipeline.registry.unpublished("run")))
    for key, upload in bucket.uploads():
        if record.file.token in key:
            bucket.abort(key, upload)
    for pid in crew.pids("embedder"):
        os.kill(pid, signal.SIGKILL)
    state = pipeline.finish()
    assert state.status is RunStatus.FAILED
    assert record.file.token in str(state.error)
    assert not bucket.keys(f"{pipeline.prefix}/{record.file.name}")
    assert not bucket.keys(f"{pipeline.prefix}/_SUCCESS")


def test_a_run_outside_the_roots_fails_and_writes_nothing(pipeline: S3Pipeline, bucket: Bucket) -> None:
    pipeline.prefix = "elsewhere/vectors"
    pipeline.produce()
    pipeline.start()
    state = pipeline.finish()
    assert state.status is RunStatus.FAILED
    assert "outside the output roots of this worker" in str(state.error)
    assert (bucket.keys(), bucket.uploads()) == ([], [])


def test_access_that_is_denied_in_the_middle_fails_the_run_with_its_reason(
    pipeline: S3Pipeline, bucket: Bucket
) -> None:
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False)
    pipeline.until(lambda: pipeline.files() > 0, "the first file")
    bucket.deny("s3:PutObject")
    state = pipeline.finish()
    assert state.status is RunStatus.FAILED
    assert "access is denied to these credentials" in str(state.error)
    assert not any(secret in pipeline.log() + str(state.error) for secret in KEYS.values())


class Command:
    """One `embedq run` command, repeated as often as a test wants."""

    def __init__(self, folder: Path, checkpoint: Path, corpus: Corpus, bucket: Bucket) -> None:
        self.folder, self.corpus, self.bucket = folder, corpus, bucket
        self.arguments = [EMBEDQ, "run", str(corpus.path), "-o", bucket.at("out"), "-m", str(checkpoint)]
        self.arguments += ["--state", str(folder / "state"), "--engine", "null", "--max-batch-tokens", "256"]
        self.arguments += ["--lease-s", "1", "--job-documents", "8", "--flush-interval-s", "0.2", "--grace-s", "5"]
        self.arguments += ["--max-length", "64", "--on-long", "error", "--tokenizer-backend", "huggingface"]

    def start(self, faults: str = "") -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"EMBEDQ_FAULTS": faults} if faults else {})
        return subprocess.Popen(
            self.arguments,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def complete(self) -> None:
        """Run to the end and check every row."""
        process = self.start()
        out, err = process.communicate(timeout=90)
        assert process.returncode == 3, out + err
        dataset = dataset_at(self.bucket.at("out"))
        spec = dataset.run_spec()
        assert spec is not None
        state = finished_state(dataset, spec)
        assert state is not None
        found = account(self.bucket.copy("out", self.folder / "copy"), self.corpus, state)
        assert not found.problems, found.problems
        assert (found.rows, found.errors) == (ROWS, ERRORS)
        assert self.bucket.uploads() == []
        assert not any((self.folder / "state").iterdir())


@pytest.fixture
def command(tmp_path: Path, checkpoint: Path, corpus: Corpus, bucket: Bucket) -> Command:
    return Command(tmp_path, checkpoint, corpus, bucket)


@pytest.mark.long
@pytest.mark.parametrize("point", ["drain.written", "finish.begun", "finish.marked", "finish.done"])
def test_a_run_killed_at_a_step_resumes(command: Command, point: str) -> None:
    process = command.start(f"{point}:kill")
    process.communicate(timeout=90)
    assert process.returncode in (-signal.SIGKILL, 3)
    command.complete()


def test_a_run_whose_upload_was_aborted_by_hand_is_completed_by_the_same_command(
    command: Command, bucket: Bucket
) -> None:
    process = command.start("publish.before:stop")
    deadline = time.monotonic() + 60
    while not bucket.uploads():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    for key, upload in bucket.uploads():
        bucket.abort(key, upload)
    # The stopped process too: it would hold our ends of the pipes.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    command.complete()


def test_a_creation_whose_reply_is_lost_is_one_creation(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in use(bucket.environment | through(proxy), monkeypatch):
        store = s3.store_at(bucket.at("out"))
        proxy.lose_reply(b"created once")
        # Asked again, the store says that it exists, as it does to one who came second.
        with pytest.raises(FileExistsError):
            store.create("_run.json", b"created once")
        assert proxy.lost == 1
        assert store.read("_run.json") == b"created once"
