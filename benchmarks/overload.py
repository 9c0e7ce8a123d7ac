"""How long does a service's text wait behind a bulk corpus?

    python benchmarks/overload.py [--submissions 200000] [--callers 64]

Interactive submissions, one text each, are made twice by the same number of callers: a tenth of them to an idle
queue, all of them to one whose bulk lane is kept full by a producer. A real small model runs one token batch at a
time, and the time of one is measured in the busy queue. Interactive work must wait for at most the batch that is
running, so the 95th percentile may grow by two batches at most; more than that fails the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from embedq_broker.connect import connect
from embedq_broker.embedded import EmbeddedServer
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.client import AsyncClient
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings
from embedq_worker.supervisor import Supervisor, plan_slots
from pipeline import produce


async def submit(url: str, count: int, callers: int) -> list[float]:
    """Seconds of each of `count` embeddings of one text, from `callers` at a time."""
    seconds: list[float] = []
    numbers = iter(range(count))
    async with AsyncClient(url, "bench") as client:

        async def call() -> None:
            for number in numbers:
                begun = time.perf_counter()
                await client.embed([f"question {number}: what is in the corpus about this?"])
                seconds.append(time.perf_counter() - begun)

        await asyncio.gather(*(call() for _ in range(callers)))
    return seconds


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def bulk_rate(registry: Registry) -> float:
    """Tokens/s of the bulk run, between commits some seconds apart."""

    def next_commit(after: int) -> tuple[float, int]:
        while (tokens := registry.state("bulk").counters.tokens) == after:
            time.sleep(0.01)
        return time.perf_counter(), tokens

    begun, first = next_commit(0)
    at, tokens = begun, first
    while at < begun + 5:
        at, tokens = next_commit(tokens)
    return (tokens - first) / (at - begun)


def write_bulk(path: Path, documents: int) -> None:
    with path.open("w") as out:
        for number in range(documents):
            out.write(json.dumps({"id": str(number), "text": f"document {number} " + "of many words " * 40}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--submissions", type=int, default=200_000)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder, "state")) as server:
        checkpoint = generate_checkpoint(Path(folder, "model"), hidden_size=128, layers=4)
        broker = BrokerSettings(redis_url=server.url, queue="bench")
        worker = WorkerSettings(model=str(checkpoint), output_roots=(Path(folder),))
        engine = EngineSettings(max_batch_tokens=args.batch_tokens, device="cpu", threads=1)
        slots = plan_slots(tokenizers=1, embedders=1, gpus=(), engine=engine)
        supervisor = Supervisor(slots, broker, worker, log_level="WARNING")
        registry = Registry(connect(server.url, role="bench"), Keys("bench"))
        context = multiprocessing.get_context("spawn")
        go = context.Event()
        sink = ParquetSink(path=str(Path(folder, "out")), file_bytes=1 << 18)
        spec = RunSpec(run="bulk", queue="bench", sink=sink, created_at=time.time())
        corpus = Path(folder, "bulk.jsonl")
        write_bulk(corpus, 400_000)
        producer = context.Process(target=produce, args=(server.url, spec.encode(), str(corpus), go))
        try:
            while not supervisor.ready:
                supervisor.poll()
                time.sleep(0.02)
            time.sleep(1.5)  # the tokenizer has seen the embedder's budget
            asyncio.run(submit(server.url, args.callers * 4, args.callers))
            idle = asyncio.run(submit(server.url, args.submissions // 10, args.callers))
            registry.create(spec)
            producer.start()
            go.set()
            while registry.backlog_bytes() < broker.max_backlog_bytes / 2:
                time.sleep(0.05)
            alone = bulk_rate(registry)
            busy = asyncio.run(submit(server.url, args.submissions, args.callers))
            still = registry.state("bulk").counters
        finally:
            producer.kill()
            supervisor.drain()
    assert still.succeeded < 400_000, "the bulk corpus ended before the submissions did"
    batch = args.batch_tokens / alone
    for name, seconds in (("idle queue", idle), ("behind bulk", busy)):
        middle, most, worst = (percentile(seconds, share) * 1e3 for share in (0.5, 0.95, 0.99))
        print(
            f"{name:12} {len(seconds):,} submissions, {args.callers} callers: "
            f"median {middle:.1f} ms, 95% {most:.1f} ms, 99% {worst:.1f} ms"
        )
    extra = percentile(busy, 0.95) - percentile(idle, 0.95)
    print(f"one token batch of the bulk corpus: {batch * 1e3:.1f} ms; 95% grew by {extra / batch:.2f} batches")
    return 0 if extra <= 2 * batch else 1


if __name__ == "__main__":
    sys.exit(main())
