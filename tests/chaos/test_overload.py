"""Producers a hundred times as fast as the workers: they wait, and nothing grows."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from accounting import write_corpus
from crew import fork_server
from embedq_producer.blocks import ReadOptions
from embedq_producer.feed import feed
from embedq_schemas.run import ParquetSink, RunSpec
from pipeline import Pipeline

BACKLOG = 4 << 20
#: What allocators, caches and a forked process's own pages may take beyond a steady state.
SLACK = 24 << 20


def produce(url: str, spec_json: bytes, corpus: str) -> None:
    """A producer's process."""
    from embedq_broker.connect import connect
    from embedq_broker.keys import Keys
    from embedq_broker.registry import Registry
    from embedq_broker.settings import BrokerSettings

    spec = RunSpec.decode(spec_json)
    settings = BrokerSettings(redis_url=url, queue=spec.queue, max_backlog_bytes=BACKLOG)
    feed(Registry(connect(url, role="producer"), Keys(spec.queue)), spec, Path(corpus), ReadOptions(), settings)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(20, id="shortly"),
        pytest.param(600, marks=[pytest.mark.long, pytest.mark.timeout(900)], id="ten minutes"),
    ],
)
def test_memory_stays_flat_while_producers_outrun_workers_a_hundredfold(pipeline: Pipeline, seconds: int) -> None:
    pipeline.broker = pipeline.broker.model_copy(update={"max_backlog_bytes": BACKLOG})
    # Two corpora far larger than what the queue may hold and the workers can take in this time.
    corpora = [write_corpus(pipeline.folder / f"{i}.jsonl", 150_000, prefix=f"{i}") for i in range(2)]
    sinks = [ParquetSink(path=str(pipeline.folder / f"out-{i}"), file_bytes=1 << 16) for i in range(2)]
    specs = [
        pipeline.registry.create(pipeline.spec().model_copy(update={"run": f"run-{i}", "sink": sink}))
        for i, sink in enumerate(sinks)
    ]

    def total(counter: str) -> int:
        return sum(getattr(pipeline.registry.state(spec.run).counters, counter) for spec in specs)

    crew = pipeline.start(faults="embed.forward:delay:every:0.5", once=False)
    began = time.monotonic()
    producers = [
        fork_server().Process(target=produce, args=(pipeline.broker.redis_url, spec.encode(), str(corpus.path)))
        for spec, corpus in zip(specs, corpora, strict=True)
    ]
    for producer in producers:
        producer.start()
    try:
        pipeline.until(lambda: pipeline.registry.backlog_bytes() > 0.9 * BACKLOG, "a full queue")
        sent, done = total("input"), total("settled")
        assert sent >= 100 * done, f"{sent} sent while {done} were embedded in {time.monotonic() - began:.1f} s"
        samples: list[dict[str, int]] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pipeline.poll()
            pids = {"first producer": producers[0].pid, "second producer": producers[1].pid}
            pids |= {f"{member.role}": member.process.pid for member in crew.members}
            sample = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
            sample["server"] = int(pipeline.client.info("memory")["used_memory"])
            sample["backlog"] = pipeline.registry.backlog_bytes()
            samples.append(sample)
            time.sleep(0.25)
        assert all(producer.is_alive() for producer in producers), "a producer ended: the corpora are too small"
        # Of both runs: what one producer sent before the other began is embedded first.
        pipeline.until(lambda: total("settled") > done, "workers that have not stopped")
        warm = samples[: len(samples) // 4]
        for name in samples[0]:
            before, peak = max(s[name] for s in warm), max(s[name] for s in samples)
            assert peak <= before + SLACK, f"{name} grew from {before >> 20} to {peak >> 20} MiB"
        # A job is let in while there is room, whatever its size, and weighs more once it is tokens.
        assert max(s["backlog"] for s in samples) <= 1.5 * BACKLOG
    finally:
        for producer in producers:
            producer.kill()
            producer.join()
