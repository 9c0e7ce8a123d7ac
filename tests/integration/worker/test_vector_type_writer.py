"""The writer and compact vectors: when a run's ranges are found, by whom, and what cannot be stored."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import redis
from embedq_broker.consume import Share
from embedq_broker.registry import EnqueueOutcome
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.quantize import VectorType, encode_ranges, quantize, ranges_of
from embedq_schemas.run import RunSpec, RunStatus
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker import writer as writer_module
from embedq_worker.calibrate import CALIBRATION_ROWS
from embedq_worker.sinks.dataset import Dataset
from numpy.typing import NDArray
from writer_bench import Bench, until

INT8 = EncodingOptions(vector_type=VectorType.INT8)
HALF = CALIBRATION_ROWS // 2


@pytest.fixture
def bench(redis_client: redis.Redis, tmp_path: Path) -> Bench:
    return Bench(redis_client, tmp_path / "root")


def vectors(n: int, seed: int, dimension: int = 8) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).standard_normal((n, dimension)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return values


def submit(bench: Bench, n: int, seed: int) -> NDArray[np.float32]:
    values = vectors(n, seed)
    bench.writer.submit(bench.embedded(Share("r", n), vectors=values))
    return values


def laid_down(bench: Bench) -> NDArray[np.float32] | None:
    return Dataset(bench.root / "r").ranges()


def stored(bench: Bench) -> NDArray[np.int8]:
    """Of all files, by ordinal."""
    rows: dict[int, Any] = {}
    for part in (bench.root / "r").glob("part-*"):
        (batch,) = pq.ParquetFile(part).iter_batches()
        rows |= zip(batch.column("ordinal").to_pylist(), VectorBatch(batch).vectors, strict=True)
    return np.array([rows[ordinal] for ordinal in sorted(rows)])


def close_input(bench: Bench, spec: RunSpec, documents: int) -> None:
    """All that was sent has passed the tokenizers, and nothing follows."""
    sent = bench.registry.enqueue(spec, expected="", position="1", max_backlog_bytes=1 << 30, skipped=1, close=True)
    assert sent.outcome is EnqueueOutcome.OK
    for counter in ("input", "ready"):
        bench.client.hincrby(bench.keys.run("r"), counter, documents)


def test_rows_wait_for_a_thousand_and_the_ranges_are_those_of_all_that_waited(bench: Bench) -> None:
    bench.run(encoding=INT8)
    bench.make(flush_interval_s=0.01).start()
    first = submit(bench, HALF, 1)
    time.sleep(0.3)
    assert (laid_down(bench), bench.open_work(), bench.published()) == (None, 1, [])
    second = submit(bench, HALF, 2)
    until(lambda: bench.open_work() == 0, "a thousand rows do not give ranges")
    expected = ranges_of(np.concatenate((first, second)))
    np.testing.assert_array_equal(laid_down(bench), expected)
    # What comes later does not change them.
    third = submit(bench, 5, 3)
    until(lambda: bench.open_work() == 0, "rows wait although there are ranges")
    bench.close()
    np.testing.assert_array_equal(laid_down(bench), expected)
    everything = np.concatenate((first, second, third))
    np.testing.assert_array_equal(stored(bench), quantize(everything, VectorType.INT8, expected))


def test_rows_that_wait_are_stored_with_the_ranges_another_embedder_lays_down(bench: Bench) -> None:
    spec = bench.run(encoding=INT8)
    bench.make(flush_interval_s=0.01).start()
    mine = submit(bench, 3, 1)
    others = ranges_of(vectors(50, 9))
    dataset = Dataset(bench.root / "r")
    dataset.prepare(spec)
    assert dataset.claim_ranges(others) is not None
    until(lambda: bench.open_work() == 0, "ranges of another embedder are not seen")
    bench.close()
    np.testing.assert_array_equal(stored(bench), quantize(mine, VectorType.INT8, others))
    # Whoever comes second gets what was there first.
    np.testing.assert_array_equal(dataset.claim_ranges(ranges_of(mine)), others)


def test_ranges_outlive_the_server_and_the_process(bench: Bench, redis_client: redis.Redis) -> None:
    bench.run(encoding=INT8)
    bench.writer.start()
    submit(bench, CALIBRATION_ROWS, 1)
    bench.close()
    before = laid_down(bench)
    redis_client.flushall()

    again = Bench(redis_client, bench.root, "another")
    again.run(encoding=INT8)
    again.sent = CALIBRATION_ROWS
    again.make(flush_interval_s=0.01).start()
    few = submit(again, 3, 2)
    until(lambda: again.open_work() == 0, "the ranges that lie there are not used")
    again.close()
    assert before is not None
    np.testing.assert_array_equal(laid_down(again), before)
    np.testing.assert_array_equal(stored(again)[-3:], quantize(few, VectorType.INT8, before))


def test_of_many_that_propose_ranges_at_once_all_get_the_same(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    proposed = [ranges_of(vectors(20, seed)) for seed in range(16)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(dataset.claim_ranges, proposed))
    assert len({ranges.tobytes() for ranges in found}) == 1
    assert found[0].tobytes() in {ranges.tobytes() for ranges in proposed}
    assert [path.name for path in tmp_path.iterdir()] == ["_ranges.npy"]


def test_the_last_rows_of_a_small_run_give_its_ranges(bench: Bench) -> None:
    spec = bench.run(encoding=INT8)
    bench.make(flush_interval_s=60).start()
    values = submit(bench, 12, 1)
    close_input(bench, spec, 12)
    until(lambda: bench.open_work() == 0, "the end of the input gives no ranges")
    np.testing.assert_array_equal(laid_down(bench), ranges_of(values))
    bench.close()


def test_rows_whose_inputs_fill_the_queue_do_not_wait_for_more(bench: Bench) -> None:
    bench.run(encoding=INT8)
    bench.make(most=1).start()
    values = submit(bench, 4, 1)
    until(lambda: bench.open_work() == 0, "the queue stays full")
    np.testing.assert_array_equal(laid_down(bench), ranges_of(values))
    bench.close()


def test_rows_that_nothing_follows_for_long_do_not_wait_for_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_CALIBRATION_PATIENCE_S", 0.2)
    monkeypatch.setattr(writer_module, "_STARVED_S", 0.1)
    bench.run(encoding=INT8)
    bench.make(flush_interval_s=60).start()
    submit(bench, 4, 1)
    until(lambda: bench.open_work() == 0, "few rows wait for ever")
    bench.close()


def test_closing_gives_back_rows_too_few_for_ranges(bench: Bench) -> None:
    bench.run(encoding=INT8)
    bench.writer.start()
    submit(bench, 4, 1)
    bench.close()
    assert laid_down(bench) is None
    assert (bench.open_work(), bench.consumer.held()) == (1, 1)
    assert bench.counters() == (0, 0, 0, 0)
    assert bench.registry.state("r").status is RunStatus.VALIDATING


def test_a_directory_that_was_emptied_and_filled_anew_gets_no_second_set_of_ranges(bench: Bench) -> None:
    bench.run(encoding=INT8)
    bench.make(flush_interval_s=0.01).start()
    submit(bench, CALIBRATION_ROWS, 1)
    until(lambda: bench.open_work() == 0, "a thousand rows do not give ranges")
    (bench.root / "r" / "_ranges.npy").unlink()
    np.save(bench.root / "r" / "_ranges.npy", ranges_of(vectors(9, 4)))
    submit(bench, 3, 2)
    until(lambda: bench.registry.state("r").status is RunStatus.FAILED, "the run goes on with other ranges")
    assert "has other ranges than the vectors" in (bench.registry.state("r").error or "")
    bench.close()
    assert bench.open_work() == 0


def test_ranges_that_do_not_read_back_end_the_run_and_not_the_worker(bench: Bench) -> None:
    spec = bench.run(encoding=INT8)
    Dataset(bench.root / "r").prepare(spec)
    (bench.root / "r" / "_ranges.npy").write_bytes(b"\x93NUMPY garbage")
    bench.writer.start()
    submit(bench, 3, 1)
    until(lambda: bench.registry.state("r").status is RunStatus.FAILED, "the run goes on")
    assert "_ranges.npy cannot be read" in (bench.registry.state("r").error or "")
    bench.close()
    assert (bench.open_work(), bench.counters()[2]) == (0, 3)


@pytest.mark.parametrize("kind", VectorType)
def test_results_in_redis_are_of_the_type_asked_for(bench: Bench, kind: VectorType) -> None:
    values = vectors(6, 1)
    ranges = ranges_of(values)
    encoding = EncodingOptions(vector_type=kind, vector_ranges=encode_ranges(ranges) if kind.ranged else None)
    bench.run("s", stream=True, encoding=encoding)
    bench.writer.start()
    bench.writer.submit(bench.embedded(Share("s", 6), vectors=values))
    bench.close()
    entries: Any = bench.client.xrange(bench.keys.results("s"))
    ((_, fields),) = entries
    found = VectorBatch.decode(fields[b"payload"])
    assert found.vector_type is kind
    np.testing.assert_array_equal(found.vectors, quantize(values, kind, ranges))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "dataset"])
def test_a_type_that_does_not_fit_the_model_ends_the_run_and_not_the_worker(bench: Bench, stream: bool) -> None:
    # Of a producer that did not know the model: 6 dimensions, ranges of 8.
    ranges = encode_ranges(ranges_of(vectors(3, 1)))
    wide = EncodingOptions(vector_type=VectorType.UINT8, vector_ranges=ranges)
    bench.run("bits", stream=stream, encoding=EncodingOptions(vector_type=VectorType.BINARY))
    bench.run("wide", stream=stream, encoding=wide)
    bench.run("good", stream=stream)
    bench.writer.start()
    for name in ("bits", "wide", "good"):
        bench.writer.submit(bench.embedded(Share(name, 2), vectors=vectors(2, 1, dimension=6)))
    bench.close()
    errors = {name: bench.registry.state(name).error for name in ("bits", "wide", "good")}
    assert errors == {
        "bits": "binary vectors pack 8 components into a byte: 6 dimensions are no multiple of 8",
        "wide": "the ranges are [2, 8], those of 6 dimensions are [2, 6]",
        "good": None,
    }
    assert bench.open_work() == 0
    assert [bench.counters(name) for name in ("bits", "wide", "good")] == [(0, 0, 2, 0), (0, 0, 2, 0), (2, 0, 0, 2)]
