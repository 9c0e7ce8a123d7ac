"""The writer: rows are staged, committed and published once, whatever the disk and other workers do meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import redis
from embedq_broker.consume import Share
from embedq_schemas.errors import StorageError
from embedq_schemas.manifest import read_manifest
from embedq_schemas.run import RunStatus
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.writer import Writer
from writer_bench import Bench, until


@pytest.fixture
def bench(redis_client: redis.Redis, tmp_path: Path) -> Bench:
    return Bench(redis_client, tmp_path / "root")


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
    until(lambda: bench.progress.shown()[0] == "waiting for storage", "the writer does not say that it waits")
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
    until(lambda: bench.progress.shown()[0] == "waiting for storage", "the writer does not wait")
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
