"""The writer: rows are staged, committed and published once, whatever the disk and other workers do meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from embedq_broker.consume import Consumer, Entry, Share, Stage
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_schemas.errors import DocumentErrorCode, StorageError
from embedq_schemas.manifest import read_manifest
from embedq_schemas.names import Lane
from embedq_schemas.run import ParquetSink, RunSpec, RunStatus, StreamSink
from embedq_schemas.token_batch import TokenBatch, make_token_batch
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.embed import Embedded, split_by_run
from embedq_worker.keeper import Progress
from embedq_worker.writer import Writer


def tokens(ids: list[str]) -> TokenBatch:
    n = len(ids)
    return make_token_batch(
        pa.RecordBatch.from_pydict({"id": ids, "ordinal": [int(each.rpartition("-")[2]) for each in ids]}),
        input_ids=np.zeros(n, np.uint32),
        offsets=np.arange(n + 1, dtype=np.int32),
        n_tokens=np.ones(n, np.int32),
        truncated=np.zeros(n, np.bool_),
        text_sha256=pa.array([bytes(32)] * n, pa.binary(32)),
        metadata=(),
    )


class Bench:
    """A writer with the embedder before it played by the test."""

    def __init__(self, client: redis.Redis, root: Path) -> None:
        self.client = client
        self.root = root
        self.keys = Keys("q")
        self.registry = Registry(client, self.keys)
        self.consumer = Consumer(client, self.keys, Stage.EMBED, "embedder", lease_ms=60_000)
        self.consumer.ensure_groups()
        self.progress = Progress()
        self.sent = 0
        self.writer = self.make()

    def make(self, *, flush_interval_s: float = 60.0, storage_patience_s: float = 5.0, most: int = 1 << 30) -> Writer:
        self.writer = Writer(
            self.client,
            self.consumer,
            self.progress,
            url="redis://test",
            roots=[self.root],
            file_metadata=lambda spec: {"embedq.run": spec.run},
            flush_interval_s=flush_interval_s,
            storage_patience_s=storage_patience_s,
            most_input_bytes=most,
        )
        return self.writer

    def run(self, name: str = "r", *, stream: bool = False, path: Path | None = None) -> RunSpec:
        sink = StreamSink() if stream else ParquetSink(path=str(path or self.root / name), file_bytes=1 << 16)
        return self.registry.create(RunSpec(run=name, queue="q", sink=sink, created_at=1.0))

    def embedded(self, *shares: Share, bad: tuple[int, ...] = (), dimension: int = 4) -> Embedded:
        """A batch read from the stream under lease, then embedded."""
        ids = []
        for share in shares:
            ids += [f"{share.run}-{self.sent + n}" for n in range(share.documents)]
            self.sent += share.documents
        batch = tokens(ids)
        fields = {"v": 1, "codec": "arrow", "payload": bytes(batch.encode())}
        fields |= {"run": ",".join(s.run for s in shares), "n": ",".join(str(s.documents) for s in shares)}
        self.client.xadd(self.keys.batches(Lane.BULK), fields)
        (entry,) = self.consumer.read(self.client, [Lane.BULK], count=1, block_ms=None)
        vectors = np.ones((len(ids), dimension), np.float32)
        reasons = dict.fromkeys(bad, (DocumentErrorCode.NOT_FINITE, "NaN"))
        return Embedded(entry, split_by_run(entry.shares, batch, vectors, reasons))

    def steal(self, entry: Entry) -> None:
        self.client.xclaim(entry.stream, Stage.EMBED, "thief", 0, [entry.id])

    def close(self) -> None:
        self.writer.close(20)

    def published(self, run: str = "r") -> list[str]:
        """Ids of all rows a reader of the manifest finds, as often as it finds them; there are no other files."""
        listed = {each.name for each in read_manifest(self.root / run).values()}
        files = sorted((self.root / run).glob("*.parquet"))
        assert listed <= {file.name for file in files}
        if not self.writer._thread.is_alive():
            assert listed == {file.name for file in files}
        files = [file for file in files if file.name in listed]
        return sorted(id for file in files for id in pq.ParquetFile(file).read().column("id").to_pylist())

    def counters(self, run: str = "r") -> tuple[int, int, int, int]:
        counters = self.registry.state(run).counters
        return counters.succeeded, counters.failed, counters.skipped, counters.tokens

    def open_work(self) -> int:
        return int(self.client.xlen(self.keys.batches(Lane.BULK)))


@pytest.fixture
def bench(redis_client: redis.Redis, tmp_path: Path) -> Bench:
    return Bench(redis_client, tmp_path / "root")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_batches_share_a_file_and_closing_writes_what_waits(bench: Bench) -> None:
    bench.run()
    bench.writer.start()
    for _ in range(3):
        bench.writer.submit(bench.embedded(Share("r", 2), bad=(1,)))
    assert bench.open_work() == 3
    bench.close()
    assert bench.published() == ["r-0", "r-2", "r-4"]
    assert len(read_manifest(bench.root / "r")) == 1
    assert bench.counters() == (3, 3, 0, 3)
    assert bench.registry.state("r").dead_letters == 3
    assert (bench.open_work(), bench.consumer.held()) == (0, 0)
    assert (bench.progress.documents, bench.progress.tokens) == (3, 3)
    (file,) = (bench.root / "r").glob("*.parquet")
    assert pq.read_metadata(file).metadata[b"embedq.run"] == b"r"


def test_a_full_file_is_written_at_once_and_so_is_one_whose_inputs_fill_the_queue(bench: Bench) -> None:
    bench.run()
    bench.writer.start()
    bench.writer.submit(bench.embedded(Share("r", 3), dimension=8192))
    until(lambda: len(bench.published()) == 3, "the full file was not written")
    bench.close()
    bench.make(most=10).start()
    bench.writer.submit(bench.embedded(Share("r", 1)))
    until(lambda: len(bench.published()) == 4, "the file was not written")
    bench.close()


def test_rows_do_not_wait_longer_than_the_interval(bench: Bench) -> None:
    bench.run()
    bench.make(flush_interval_s=0.05).start()
    bench.writer.submit(bench.embedded(Share("r", 1)))
    until(lambda: len(bench.published()) == 1, "the rows wait")
    bench.close()


def test_the_last_rows_of_a_run_do_not_wait_for_a_fuller_file(bench: Bench) -> None:
    spec = bench.run()
    bench.writer.start()
    bench.registry.enqueue(spec, expected="", position="1", max_backlog_bytes=1, settled=1, close=True)
    bench.writer.submit(bench.embedded(Share("r", 1)))
    until(lambda: len(bench.published()) == 1, "the rows wait")
    assert bench.registry.status("r") is RunStatus.FINALIZING
    bench.close()


def test_batches_that_another_worker_took_over_are_not_in_the_file(bench: Bench) -> None:
    bench.run()
    items = [bench.embedded(Share("r", 2)) for _ in range(3)]
    bench.writer.start()
    for item in items:
        bench.writer.submit(item)
    bench.steal(items[1].entry)
    bench.close()
    assert bench.published() == ["r-0", "r-1", "r-4", "r-5"]
    assert bench.counters() == (4, 0, 0, 4)
    assert bench.open_work() == 1
    assert list((bench.root / "r" / "_staging").iterdir()) == []


def test_a_file_of_which_every_batch_was_taken_over_is_not_written(bench: Bench) -> None:
    bench.run()
    item = bench.embedded(Share("r", 1))
    bench.writer.start()
    bench.writer.submit(item)
    bench.steal(item.entry)
    bench.close()
    assert bench.published() == []
    assert bench.counters() == (0, 0, 0, 0)
    assert list((bench.root / "r" / "_staging").iterdir()) == []


def test_results_for_streams_arrive_at_once_each_with_its_run(bench: Bench) -> None:
    bench.run("a", stream=True)
    bench.run("b", stream=True)
    bench.writer.start()
    bench.writer.submit(bench.embedded(Share("a", 2), Share("b", 3), bad=(0, 4)))
    until(lambda: bench.open_work() == 0, "nothing was committed")
    bench.close()
    for run, ids in (("a", ["a-1"]), ("b", ["b-2", "b-3"])):
        ((_, fields),) = bench.client.xrange(bench.keys.results(run))
        assert VectorBatch.decode(fields[b"payload"]).table.column("id").to_pylist() == ids
        assert bench.counters(run) == (len(ids), 1, 0, len(ids))


def test_documents_of_runs_that_ended_are_skipped_and_of_runs_that_are_gone_dropped(bench: Bench) -> None:
    bench.run("cancelled")
    bench.run("stopped", stream=True)
    bench.run("gone")
    for name in ("cancelled", "stopped", "gone"):
        bench.registry.enqueue(
            bench.registry.state(name).spec, expected="", position="1", max_backlog_bytes=1, settled=2
        )
    items = [bench.embedded(Share(name, 2)) for name in ("cancelled", "stopped", "gone")]
    for name in ("cancelled", "stopped"):
        bench.registry.cancel(name)
    bench.client.delete(bench.keys.run("gone"))
    bench.writer.start()
    for item in items:
        bench.writer.submit(item)
    bench.close()
    assert bench.open_work() == 0
    assert bench.published("cancelled") == []
    assert bench.counters("cancelled") == bench.counters("stopped") == (0, 0, 2, 0)
    assert bench.registry.status("stopped") is RunStatus.CANCELLED
    assert not bench.client.exists(bench.keys.run("gone"), bench.keys.results("stopped"))


def test_a_run_whose_directory_no_worker_may_use_fails_with_its_reason_and_frees_its_work(
    bench: Bench, tmp_path: Path
) -> None:
    bench.run("outside", path=tmp_path / "elsewhere")
    bench.run("good")
    bench.writer.start()
    bench.writer.submit(bench.embedded(Share("outside", 2)))
    bench.writer.submit(bench.embedded(Share("good", 1)))
    bench.close()
    state = bench.registry.state("outside")
    assert (state.status, state.counters.skipped) == (RunStatus.FAILED, 2)
    assert "outside the output roots" in str(state.error)
    assert not (tmp_path / "elsewhere").exists()
    assert bench.published("good") == ["good-2"]
    assert bench.open_work() == 0


def block(bench: Bench) -> Path:
    """Put a file where a directory must be."""
    in_the_way = bench.root / "r" / "_staging"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    return in_the_way


def test_a_disk_that_refuses_for_a_while_costs_time_and_no_rows(bench: Bench) -> None:
    bench.run()
    in_the_way = block(bench)
    bench.make(flush_interval_s=0.01).start()
    bench.writer.submit(bench.embedded(Share("r", 2)))
    until(lambda: bench.progress.state == "waiting for storage", "the writer does not say that it waits")
    assert bench.open_work() == 1
    in_the_way.unlink()
    until(lambda: bench.open_work() == 0, "the writer does not go on")
    bench.close()
    assert bench.published() == ["r-0", "r-1"]


def test_a_disk_that_refuses_for_good_ends_the_writer_with_the_work_still_under_lease(bench: Bench) -> None:
    bench.run()
    block(bench)
    bench.make(flush_interval_s=0.01, storage_patience_s=0.0).start()
    bench.writer.submit(bench.embedded(Share("r", 2)))
    with pytest.raises(StorageError):
        until(lambda: bool(bench.writer.check()), "the failure is not told")
    with pytest.raises(StorageError):
        bench.writer.submit(bench.embedded(Share("r", 1)))
    with pytest.raises(StorageError):
        bench.close()
    assert bench.open_work() == 2
    assert bench.counters() == (0, 0, 0, 0)


def test_a_full_server_is_waited_out_with_the_vectors_in_hand(bench: Bench) -> None:
    bench.run(stream=True)
    item = bench.embedded(Share("r", 2))
    bench.client.config_set("maxmemory", 1)
    try:
        bench.writer.start()
        bench.writer.submit(item)
        ticks = bench.progress.ticks
        until(lambda: bench.progress.ticks > ticks + 2, f"not tried again: {bench.writer._failure!r}")
        assert bench.open_work() == 1
    finally:
        bench.client.config_set("maxmemory", 0)
    until(lambda: bench.open_work() == 0, "the commit is not accepted")
    bench.close()
    assert bench.counters() == (2, 0, 0, 2)


def test_a_writer_that_ended_does_not_keep_its_process(bench: Bench) -> None:
    bench.run()
    block(bench)
    writer = Writer(
        bench.client,
        bench.consumer,
        bench.progress,
        url="redis://test",
        roots=[bench.root],
        file_metadata=lambda spec: {},
        flush_interval_s=0.01,
        storage_patience_s=0.3,
        most_input_bytes=1 << 30,
        depth=1,
    )
    writer.start()
    writer.submit(bench.embedded(Share("r", 1)))
    until(lambda: bench.progress.state == "waiting for storage", "the writer does not wait")
    writer.submit(bench.embedded(Share("r", 1)))
    ended: list[BaseException] = []

    def close() -> None:
        try:
            writer.close(5)
        except StorageError as error:
            ended.append(error)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(10)
    assert len(ended) == 1
