"""What does a small request cost? Concurrent callers with one text each, around an engine that returns fixed vectors.

Starts a real server with its append-only file on, a tokenizer and an embedder process, and sends texts through the
clients: N callers in a closed loop, each waiting for its vector before it sends the next text; then the same texts as
one bulk submission for comparison. Loading does not count.

    python benchmarks/client.py [--callers 20] [--seconds 5] [--tokenizer tokenizer.json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from embedq_broker.embedded import EmbeddedServer
from embedq_broker.settings import BrokerSettings
from embedq_schemas.names import Lane
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings
from embedq_worker.supervisor import Supervisor, plan_slots

from embedq import AsyncClient, Client

TEXT = "Document {}: an embedding maps a text to a point, so that texts of one meaning lie close together."


@contextmanager
def workers(folder: Path, tokenizer: Path | None, dimension: int) -> Iterator[tuple[BrokerSettings, dict[str, int]]]:
    """A server and worker processes; yields the settings of their queue and their process ids."""
    checkpoint = generate_checkpoint(
        folder / "model", hidden_size=dimension, layers=1, dtype="bfloat16", tokenizer_json=tokenizer
    )
    with EmbeddedServer(folder / "state") as server:
        settings = BrokerSettings(redis_url=server.url, queue="bench")
        slots = plan_slots(tokenizers=1, embedders=1, gpus=(), engine=EngineSettings(kind="null"))
        worker = WorkerSettings(model=str(checkpoint), output_roots=(folder,))
        supervisor = Supervisor(slots, settings, worker, ends_on_infrastructure=True, log_level="WARNING")
        try:
            while not supervisor.ready:
                supervisor.poll()
                time.sleep(0.02)
            time.sleep(1.5)  # the tokenizer has seen the embedder's budget
            pids = {"tokenizer": supervisor.pids("tokenizer")[0], "embedder": supervisor.pids("embedder")[0]}
            yield settings, pids | {"server": server.pid, "client": psutil.Process().pid}
        finally:
            supervisor.drain()


async def closed_loop(settings: BrokerSettings, callers: int, seconds: float) -> list[float]:
    """Seconds of each request of `callers` tasks on one AsyncClient."""
    taken: list[float] = []
    async with AsyncClient(settings=settings) as client:
        await client.embed(["warm"])
        end = time.perf_counter() + seconds

        async def caller(number: int) -> None:
            while (started := time.perf_counter()) < end:
                await client.embed([TEXT.format(f"{number}-{len(taken)}")])
                taken.append(time.perf_counter() - started)

        await asyncio.gather(*(caller(number) for number in range(callers)))
    return taken


def threaded_loop(settings: BrokerSettings, callers: int, seconds: float) -> list[float]:
    """The same with threads on one Client."""
    taken: list[float] = []
    with Client(settings=settings) as client:
        client.embed(["warm"])
        end = time.perf_counter() + seconds

        def caller(number: int) -> None:
            while (started := time.perf_counter()) < end:
                client.embed([TEXT.format(f"{number}-{len(taken)}")])
                taken.append(time.perf_counter() - started)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return taken


def bulk(settings: BrokerSettings, texts: int) -> float:
    """Seconds for one call with all texts."""
    with Client(settings=settings) as client:
        started = time.perf_counter()
        client.embed([TEXT.format(number) for number in range(texts)], lane=Lane.BULK)
        return time.perf_counter() - started


def report(what: str, callers: int, taken: list[float], seconds: float, cpu: dict[str, float]) -> None:
    low, high = statistics.median(taken), statistics.quantiles(taken, n=100)[98]
    rate = f"{len(taken) / seconds:8,.0f} requests/s"
    print(f"{what}, {callers} callers: {rate}, median {low * 1e3:6.1f} ms, p99 {high * 1e3:6.1f} ms")
    print("   CPU " + ", ".join(f"{name} {used / seconds:4.0%}" for name, used in cpu.items()), flush=True)


def cpu_of(pids: dict[str, int]) -> dict[str, float]:
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 20, 200, 2000])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--texts", type=int, default=50_000, help="of the bulk submission")
    parser.add_argument("--tokenizer", type=Path, help="such as Qwen3's tokenizer.json; default: a small generated one")
    parser.add_argument("--dimension", type=int, default=256)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        workers(Path(folder), args.tokenizer, args.dimension) as (settings, pids),
    ):
        for name, loop in (
            ("AsyncClient", lambda *a: asyncio.run(closed_loop(*a))),
            ("Client", threaded_loop),
        ):
            for callers in args.callers if name == "AsyncClient" else [n for n in args.callers if n <= 200]:
                before, started = cpu_of(pids), time.perf_counter()
                taken = loop(settings, callers, args.seconds)
                seconds = time.perf_counter() - started
                used = {who: value - before[who] for who, value in cpu_of(pids).items()}
                report(name, callers, taken, seconds, used)
        seconds = bulk(settings, args.texts)
        print(f"bulk: {args.texts / seconds:,.0f} texts/s")


if __name__ == "__main__":
    main()
