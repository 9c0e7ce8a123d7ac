"""Publishing, dead letters and the end of a run, over real servers and real directories, repeated and interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from embedq_broker import scripts
from embedq_broker.commit import Commit, CommitOutcome, CommitRecord, unpublished
from embedq_broker.consume import Consumer, Stage
from embedq_broker.keys import Keys
from embedq_broker.liveness import exclusive
from embedq_broker.registry import EnqueueOutcome, Registry
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.dead_letter import Stage as FailedStage
from embedq_schemas.errors import DocumentErrorCode, OutputError, StorageError
from embedq_schemas.manifest import MANIFEST_NAME, PublishedFile, read_manifest
from embedq_schemas.names import Lane
from embedq_schemas.run import ParquetSink, RunSpec, RunStatus
from embedq_schemas.token_batch import make_token_batch
from embedq_schemas.vector_batch import VectorBatch, make_vector_batch
from embedq_worker.hold import until_accepted
from embedq_worker.runs import RunCache
from embedq_worker.sinks import errors as errors_sink
from embedq_worker.sinks.dataset import open_dataset
from embedq_worker.sinks.errors import drain, read_errors
from embedq_worker.sinks.finish import finish_run, sweep_runs
from embedq_worker.sinks.parquet import stage
from embedq_worker.sinks.publish import publish
from servers import Server


def rows(ordinals: list[int]) -> VectorBatch:
    n = len(ordinals)
    tokens = make_token_batch(
        pa.RecordBatch.from_pydict({"id": [f"d{o}" for o in ordinals], "ordinal": ordinals}),
        input_ids=np.zeros(n, np.uint32),
        offsets=np.arange(n + 1, dtype=np.int32),
        n_tokens=np.ones(n, np.int32),
        truncated=np.zeros(n, np.bool_),
        text_sha256=pa.array([bytes(32)] * n, pa.binary(32)),
        metadata=(),
    )
    return make_vector_batch(tokens, np.ones((n, 4), np.float32))


class Run:
    """A parquet run whose token batches are one document each, driven by hand."""

    def __init__(self, client: redis.Redis, root: Path, name: str = "r") -> None:
        self.client = client
        self.keys = Keys("q")
        self.registry = Registry(client, self.keys)
        self.root = root
        self.spec = self.registry.create(
            RunSpec(run=name, queue="q", sink=ParquetSink(path=str(root / name)), created_at=1.0)
        )
        self.dataset = open_dataset(str(root / name), [root])
        self.dataset.prepare(self.spec)
        self.consumer = Consumer(client, self.keys, Stage.EMBED, f"embedder-{name}", lease_ms=60_000)
        self.consumer.ensure_groups()
        self._position = ""
        self._documents = 0

    def feed(self, *, documents: int = 0, dead: list[DeadLetter] | None = None, close: bool = False) -> None:
        """Documents go straight to the batches stage, one batch each."""
        position = str(int(self._position or 0) + 1)
        sent = self.registry.enqueue(
            self.spec,
            expected=self._position,
            position=position,
            max_backlog_bytes=1 << 30,
            settled=documents,
            dead=dead or [],
            close=close,
        )
        assert sent.outcome is EnqueueOutcome.OK
        self._position = position
        for _ in range(documents):
            self.client.xadd(
                self.keys.batches(Lane.BULK), {"v": 1, "codec": "arrow", "run": self.spec.run, "n": 1, "payload": "p"}
            )

    def commit_file(self, documents: int) -> CommitRecord:
        """Stage and commit one file, and stop before it is published, as a killed worker does."""
        entries = self.consumer.read(self.client, [Lane.BULK], count=documents, block_ms=None)
        assert len(entries) == documents
        commit = Commit(self.consumer, inputs=entries)
        ordinals = list(range(self._documents, self._documents + documents))
        self._documents += documents
        file = stage(self.dataset, commit.token, self.spec.run, [rows(ordinals)], {}, documents)
        commit.add_file(file, str(self.dataset.path))
        commit.count(self.spec.run, "succeeded", documents)
        assert commit.send(self.client).outcome is CommitOutcome.OK
        (record,) = (each for each in unpublished(self.client, self.keys) if each.file.token == file.token)
        return record

    def skip(self, documents: int) -> None:
        entries = self.consumer.read(self.client, [Lane.BULK], count=documents, block_ms=None)
        commit = Commit(self.consumer, inputs=entries)
        commit.count(self.spec.run, "skipped", documents)
        assert commit.send(self.client).outcome is CommitOutcome.OK

    def publish(self, record: CommitRecord, *, replay: bool = False) -> None:
        publish(self.client, self.keys, self.dataset, record, replay=replay)

    def finish(self) -> bool:
        return finish_run(self.client, self.keys, self.spec.run, [self.root])

    @property
    def status(self) -> RunStatus | None:
        return self.registry.status(self.spec.run)

    def ids(self) -> list[str]:
        """Of all published files, as a reader with a glob sees them."""
        files = sorted(self.dataset.path.glob("*.parquet"))
        return sorted(id for file in files for id in pq.ParquetFile(file).read().column("id").to_pylist())


@pytest.fixture
def run(redis_client: redis.Redis, tmp_path: Path) -> Run:
    return Run(redis_client, tmp_path)


def letter(ordinal: int) -> DeadLetter:
    return DeadLetter(
        ordinal=ordinal, stage=FailedStage.PRODUCE, code=DocumentErrorCode.MISSING_TEXT, message="no text ü"
    )


def test_a_published_file_has_its_name_its_line_and_no_record(run: Run) -> None:
    run.feed(documents=2)
    record = run.commit_file(2)
    assert run.ids() == []
    run.publish(record)
    assert run.ids() == ["d0", "d1"]
    assert read_manifest(run.dataset.path) == {record.file.token: record.file}
    assert list(unpublished(run.client, run.keys)) == []
    assert list(run.dataset.staging.iterdir()) == []
    assert run.registry.state("r").published_files == 1


@pytest.mark.parametrize("done", ["nothing", "renamed", "renamed and staged again", "listed", "torn", "all"])
def test_a_publication_interrupted_anywhere_is_finished_by_a_replay(run: Run, done: str) -> None:
    run.feed(documents=1)
    record = run.commit_file(1)
    staging, final = run.dataset.path / record.file.staging_name, run.dataset.path / record.file.name
    manifest = run.dataset.path / MANIFEST_NAME
    if done == "all":
        run.publish(record)
    elif done != "nothing":
        staging.rename(final)
    if done == "renamed and staged again":
        staging.write_bytes(b"leftover")
    if done == "listed":
        manifest.write_bytes(record.file.encode() + b"\n")
    if done == "torn":
        manifest.write_bytes(record.file.encode()[:20])
    for _ in range(2):
        run.publish(record, replay=True)
    assert run.ids() == ["d0"]
    assert read_manifest(run.dataset.path) == {record.file.token: record.file}
    assert manifest.read_bytes().count(record.file.encode()) == 1
    assert list(run.dataset.staging.iterdir()) == []
    assert run.registry.state("r").published_files == 1


def test_a_committed_file_that_somebody_removed_is_an_error_that_names_it(run: Run) -> None:
    run.feed(documents=1)
    record = run.commit_file(1)
    (run.dataset.path / record.file.staging_name).unlink()
    with pytest.raises(StorageError, match=f"part-{record.file.token}.parquet was committed, but"):
        run.publish(record, replay=True)
    assert [each.file for each in unpublished(run.client, run.keys)] == [record.file]


def test_a_file_that_was_staged_and_never_committed_is_never_published(run: Run) -> None:
    run.feed(documents=1, close=True)
    stage(run.dataset, "f" * 32, "r", [rows([77])], {}, 1)
    run.publish(run.commit_file(1))
    assert run.finish()
    assert run.ids() == ["d0"]
    assert list(run.dataset.staging.iterdir()) == []


def test_dead_letters_move_into_parts_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors_sink, "PART_ROWS", 3)
    letters = [letter(n) for n in range(7)]
    run.feed(dead=letters)
    moved = []
    while count := drain(run.client, run.registry, run.keys, run.dataset, "r"):
        moved.append(count)
    assert moved == [3, 3, 1]
    assert list(read_errors(run.dataset)) == letters
    assert run.registry.state("r").dead_letters == 0
    assert len(list(run.dataset.errors.iterdir())) == 3
    assert run.client.hget(run.keys.run("r"), "drain_range") is None


def test_a_move_repeated_after_a_crash_writes_the_same_part_though_letters_came_meanwhile(run: Run) -> None:
    run.feed(dead=[letter(0), letter(1)])

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("killed before the letters were dropped")

    real = scripts.call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts, "call", lambda c, name, *a, **k: crash() if name == "drain" else real(c, name, *a, **k))
        with pytest.raises(RuntimeError):
            drain(run.client, run.registry, run.keys, run.dataset, "r")
    run.feed(dead=[letter(2)])
    assert list(read_errors(run.dataset)) == [letter(0), letter(1)]
    assert drain(run.client, run.registry, run.keys, run.dataset, "r") == 2
    assert list(read_errors(run.dataset)) == [letter(0), letter(1)]
    assert drain(run.client, run.registry, run.keys, run.dataset, "r") == 1
    assert list(read_errors(run.dataset)) == [letter(n) for n in range(3)]
    assert drain(run.client, run.registry, run.keys, run.dataset, "r") == 0


def test_a_range_that_is_not_the_planned_one_drops_nothing(run: Run) -> None:
    run.feed(dead=[letter(0)])
    ((entry_id, _),) = run.registry.dead_letters("r")
    for span in ("", "1-1/2-2"):
        keys = [run.keys.dead("r"), run.keys.run("r"), run.keys.bytes, run.keys.held]
        assert scripts.call(run.client, "drain", keys, [span, "dead:r", entry_id]) == 0
    assert run.registry.state("r").dead_letters == 1
    run.client.delete(run.keys.run("r"))
    assert drain(run.client, run.registry, run.keys, run.dataset, "r") == 0
    assert not run.client.exists(run.keys.run("r"))


def test_dead_letters_of_a_full_server_can_be_moved_out(run: Run, server: Server) -> None:
    run.feed(dead=[letter(0)])
    with server.client() as client:
        client.config_set("maxmemory", 1)
        try:
            assert drain(run.client, run.registry, run.keys, run.dataset, "r") == 1
        finally:
            client.config_set("maxmemory", 0)
    assert list(read_errors(run.dataset)) == [letter(0)]


def test_a_run_is_finished_when_its_files_are_published_and_its_errors_written(run: Run) -> None:
    run.feed(documents=3, dead=[letter(9)])
    run.publish(run.commit_file(1))
    run.commit_file(1)
    assert not run.finish()
    run.feed(close=True)
    assert not run.finish()
    assert run.status is RunStatus.IN_PROGRESS
    assert not run.dataset.success.exists()
    run.skip(1)
    assert run.status is RunStatus.FINALIZING
    assert run.finish()
    assert run.finish()
    assert run.status is RunStatus.COMPLETED
    assert run.ids() == ["d0", "d1"]
    assert list(read_errors(run.dataset)) == [letter(9)]
    summary = json.loads(run.dataset.success.read_text())
    counts = {name: summary[name] for name in ("run", "input", "succeeded", "failed", "skipped", "files")}
    assert counts == {"run": "r", "input": 4, "succeeded": 2, "failed": 1, "skipped": 1, "files": 2}
    assert run.client.ttl(run.keys.run("r")) > 0


def test_a_cancelled_run_keeps_what_it_computed_and_has_no_success_marker(run: Run) -> None:
    run.feed(documents=2)
    run.commit_file(1)
    assert run.registry.cancel("r") is RunStatus.CANCELLING
    assert not run.finish()
    run.skip(1)
    assert run.finish()
    assert run.status is RunStatus.CANCELLED
    assert run.ids() == ["d0"]
    assert not run.dataset.success.exists()


def test_a_dataset_that_lost_rows_or_files_is_never_called_complete(run: Run) -> None:
    run.feed(documents=2)
    first = run.commit_file(1)
    run.publish(first)
    run.commit_file(1)
    run.feed(close=True)
    (run.dataset.path / first.file.name).unlink()
    assert run.finish()
    assert run.status is RunStatus.FAILED
    assert first.file.name in str(run.registry.state("r").error)
    assert not run.dataset.success.exists()


def test_a_manifest_that_lost_a_line_is_never_called_complete(run: Run) -> None:
    run.feed(documents=1, close=True)
    run.publish(run.commit_file(1))
    (run.dataset.path / MANIFEST_NAME).write_bytes(b"")
    assert run.finish()
    assert run.status is RunStatus.FAILED
    assert "holds 0 rows, 1 were committed" in str(run.registry.state("r").error)


def test_only_one_process_finishes_a_run_at_a_time(run: Run) -> None:
    run.feed(close=True)
    with exclusive(run.client, run.keys, "finish:r", ttl_ms=60_000):
        assert not run.finish()
    assert run.finish()


def test_a_run_outside_the_roots_is_finished_by_nobody(run: Run, tmp_path: Path) -> None:
    run.feed(close=True)
    with pytest.raises(OutputError):
        finish_run(run.client, run.keys, "r", [tmp_path / "elsewhere"])
    assert run.status is RunStatus.FINALIZING


def test_housekeeping_finishes_what_a_dead_worker_left_whatever_stands_in_the_way(run: Run, tmp_path: Path) -> None:
    outside = Run(run.client, tmp_path / "outside", "a-outside")
    broken = Run(run.client, tmp_path / "root", "b-broken")
    newer = Run(run.client, tmp_path / "root", "c-newer")
    good = Run(run.client, tmp_path / "root", "d-good")
    for each in (outside, broken, newer, good):
        each.feed(documents=1)
        each.commit_file(1)
        each.feed(close=True)
    (broken.dataset.path / MANIFEST_NAME).write_bytes(b'{"another":"thing"}\n')
    run.client.hset(run.keys.run("c-newer"), "spec", b'{"version":2}')
    run.client.xadd(run.keys.commits, {"dataset": str(tmp_path / "root" / "x\0"), "file": b"{"})
    unreachable = PublishedFile(token="1" * 32, run="other", rows=1, size_bytes=1, tokens=1, ordinals=(0, 0))
    for path in (tmp_path / "root" / "nul\0", tmp_path / "root" / "gone"):
        run.client.xadd(run.keys.commits, {"dataset": str(path), "file": unreachable.encode()})
    sweep_runs(run.client, run.keys, [tmp_path / "root"], older_than_ms=-1000)
    assert good.ids() == ["d0"]
    assert newer.ids() == ["d0"]
    assert outside.ids() == []
    assert outside.status is RunStatus.FINALIZING
    assert good.status is RunStatus.COMPLETED


def test_a_young_record_is_left_to_its_worker(run: Run) -> None:
    run.feed(documents=1)
    run.commit_file(1)
    sweep_runs(run.client, run.keys, [run.root], older_than_ms=60_000)
    assert len(list(unpublished(run.client, run.keys))) == 1
    sweep_runs(run.client, run.keys, [run.root], older_than_ms=-1000)
    assert run.ids() == ["d0"]


@pytest.fixture
def runs(run: Run) -> RunCache:
    return RunCache(run.registry, url="redis://test", give_up=lambda: True)


def test_a_run_of_a_newer_version_fails_once_with_its_reason_and_ends_no_worker(run: Run, runs: RunCache) -> None:
    assert runs.spec("r") == run.spec
    assert runs.spec("nobody") is None
    assert runs.wanted("r")
    assert not runs.wanted("nobody")
    Run(run.client, run.root, "newer")
    run.client.hset(run.keys.run("newer"), "spec", b'{"version":2,"novelty":1}')
    assert runs.spec("newer") is None
    assert run.registry.status("newer") is RunStatus.FAILED
    assert b"version 2" in run.client.hget(run.keys.run("newer"), "error")
    assert runs.spec("newer") is None


def test_a_status_is_asked_for_again_once_forgotten(run: Run, runs: RunCache) -> None:
    assert runs.wanted("r")
    run.registry.cancel("r")
    assert runs.wanted("r")
    runs.forget("r")
    assert not runs.wanted("r")


def test_what_the_server_refuses_for_a_while_is_sent_until_it_is_accepted() -> None:
    failures: list[Exception] = [
        redis.exceptions.ConnectionError("gone"),
        redis.exceptions.TimeoutError("slow"),
        redis.exceptions.OutOfMemoryError("full"),
        redis.exceptions.BusyLoadingError("loading"),
    ]

    def send() -> str:
        if failures:
            raise failures.pop(0)
        return "accepted"

    assert until_accepted(send, url="redis://h", give_up=lambda: False, first_s=0.001) == "accepted"
