"""`embedq run`, killed, starved and robbed: the same command again finishes with every document exactly once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from accounting import Account, Corpus, account, write_corpus
from embedq_broker.connect import connect
from embedq_broker.embedded import running_server_url
from embedq_schemas.manifest import read_manifest
from embedq_worker.sinks.dataset import Dataset
from pipeline import EMBEDQ

from embedq.directory import finished_state

LONG = pytest.mark.long
FORWARD = "embed.forward:delay:every:0.15"


class Command:
    """One `embedq run` command, repeated as often as a test wants."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.corpus: Corpus = write_corpus(folder / "corpus.jsonl", 60, bad_lines=1, long_texts=2)
        self.output = folder / "out"
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.arguments = [EMBEDQ, "run", str(self.corpus.path), "-o", str(self.output), "-m", str(checkpoint)]
        self.arguments += ["--engine", "null", "--max-batch-tokens", "256", "--lease-s", "1", "--job-documents", "8"]
        self.arguments += ["--flush-interval-s", "0.2", "--grace-s", "5", "--max-length", "64", "--on-long", "error"]
        self.arguments += ["--tokenizer-backend", "huggingface"]

    def start(self, faults: str = "", *, once: bool = True) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if faults:
            environment |= {"EMBEDQ_FAULTS": faults}
        if faults and once:
            environment |= {"EMBEDQ_FAULTS_ONCE": str(self.marks)}
        return subprocess.Popen(
            self.arguments, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def complete(self) -> Account:
        """Run to the end and check every row."""
        process = self.start()
        out, err = process.communicate(timeout=90)
        assert process.returncode == 3, out + err  # completed, with failed documents
        state = finished_state(Dataset(self.output), Dataset(self.output).run_spec())  # type: ignore[arg-type]
        found = account(self.output, self.corpus, state)
        assert not found.problems, found.problems
        assert (found.rows, found.errors) == (58, 3)
        assert not (self.output / "_state").exists()
        return found

    def until_files(self, process: subprocess.Popen[str], count: int) -> None:
        deadline = time.monotonic() + 60
        while len(read_manifest(self.output)) < count:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def command(tmp_path: Path, checkpoint: Path) -> Command:
    return Command(tmp_path, checkpoint)


@pytest.mark.parametrize(
    "point",
    [
        "drain.written",
        "finish.marked",
        *(pytest.param(p, marks=LONG) for p in ("produce.enqueue.after", "finish.begun", "finish.done")),
    ],
)
def test_a_run_killed_at_a_step_resumes(command: Command, point: str) -> None:
    process = command.start(f"{point}:kill")
    process.communicate(timeout=90)
    assert process.returncode in (-signal.SIGKILL, 3)
    command.complete()


@pytest.mark.long
def test_a_run_killed_at_any_moment_resumes(command: Command) -> None:
    for files in (1, 2, 3):
        process = command.start(FORWARD, once=False)
        command.until_files(process, files)
        process.kill()
        process.communicate()
    command.complete()


@pytest.mark.parametrize("cut_bytes", [3_000, pytest.param(300, marks=LONG), pytest.param(20_000, marks=LONG)])
def test_a_server_that_lost_the_end_of_its_append_only_file_doubles_and_loses_nothing(
    command: Command, cut_bytes: int
) -> None:
    process = command.start(FORWARD, once=False)
    command.until_files(process, 3)
    process.kill()
    process.communicate()
    wait_for_end(command.output)
    log = max(command.output.glob("_state/appendonlydir/*.incr.aof"), key=lambda path: path.stat().st_size)
    os.truncate(log, max(0, log.stat().st_size - cut_bytes))
    command.complete()


def test_a_run_that_was_taken_up_from_its_dataset_may_be_killed_again(command: Command) -> None:
    process = command.start(FORWARD, once=False)
    command.until_files(process, 3)
    process.kill()
    process.communicate()
    wait_for_end(command.output)
    shutil.rmtree(command.output / "_state")
    # Before its producer has passed what the files hold.
    process = command.start("produce.enqueue.after:kill:2", once=False)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    wait_for_end(command.output)
    command.complete()


def test_a_flushed_server_ends_the_command_and_the_same_command_resumes(command: Command) -> None:
    process = command.start(FORWARD, once=False)
    command.until_files(process, 2)
    url = running_server_url(command.output / "_state")
    assert url is not None
    with connect(url) as client:
        client.flushall()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert "the same command resumes" in err
    command.complete()


@pytest.mark.parametrize("damage", ["truncated", pytest.param("removed", marks=LONG)])
def test_published_files_that_went_bad_are_made_again_by_the_same_command(command: Command, damage: str) -> None:
    process = command.start(FORWARD, once=False)
    command.until_files(process, 2)
    process.kill()
    process.communicate()
    victim = next(command.output.glob("part-*.parquet"))
    if damage == "removed":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size - 50)
    command.complete()


def test_jobs_trimmed_by_hand_end_the_command_and_the_same_command_sends_them_again(command: Command) -> None:
    process = command.start(FORWARD, once=False)
    command.until_files(process, 1)
    url = running_server_url(command.output / "_state")
    assert url is not None
    with connect(url) as client:
        for kind in ("jobs", "batches"):
            client.xtrim(f"embedq:{{default}}:{kind}:bulk", maxlen=0, approximate=False)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "documents are in no stream any more" in err
    command.complete()


def test_two_runs_on_one_directory_at_once_are_one_run_and_one_refusal(command: Command) -> None:
    processes = [command.start(), command.start()]
    outputs = [process.communicate(timeout=90) for process in processes]
    statuses = sorted(process.returncode for process in processes)
    # The later one is refused, or finds the directory complete.
    assert statuses in ([2, 3], [0, 3], [3, 3]), outputs
    state = finished_state(Dataset(command.output), Dataset(command.output).run_spec())  # type: ignore[arg-type]
    assert not account(command.output, command.corpus, state).problems


def test_failed_documents_are_sent_again_after_retry_and_no_others(command: Command) -> None:
    # The embedder ends on one document until the fault is gone.
    command.arguments += ["--max-deliveries", "1"]
    process = command.start("embed.forward@doc-17:raise:every", once=False)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3, out + err
    before = {path.name for path in command.output.glob("part-*.parquet")}
    retry = [EMBEDQ, "retry", str(command.output), "--code"]
    none = subprocess.run([*retry, "duplicate_id"], capture_output=True, text=True, timeout=60, check=True)
    assert "no such failed documents" in none.stdout
    assert (command.output / "_SUCCESS").exists()
    some = subprocess.run([*retry, "max_deliveries"], capture_output=True, text=True, timeout=60, check=True)
    assert some.stdout.startswith("1 failed documents")
    assert not (command.output / "_SUCCESS").exists()
    command.complete()
    fresh = {path.name for path in command.output.glob("part-*.parquet")} - before
    assert [read_manifest(command.output)[name[5:-8]].ordinals for name in fresh] == [(17, 17)]


def wait_for_end(output: Path) -> None:
    """Wait until the killed command's server has ended too."""
    deadline = time.monotonic() + 15
    while running_server_url(output / "_state") is not None or (output / "_state" / "server.sock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
