"""How fast is everything around the model? The whole pipeline with an engine that returns fixed vectors.

Reads a JSONL corpus, sends it through a real server with its append-only file on, tokenizes, packs, "embeds", and
writes a Parquet dataset: producer, tokenizer, embedder and server as separate processes, with leases, tokens, atomic
commits, fsync and verification. The clock runs from the first byte of the corpus to `_SUCCESS`; loading does not count.
In the same run Hugging Face `tokenizers` alone tokenizes a sample of the corpus, with all cores, for comparison.

    python benchmarks/pipeline.py [CORPUS.jsonl] [--tokenizer tokenizer.json] [--repeat 3] [--dimension 256]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from embedq_broker.connect import connect
from embedq_broker.embedded import EmbeddedServer
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.blocks import ReadOptions
from embedq_producer.feed import feed
from embedq_schemas.run import ParquetSink, RunSpec, RunStatus
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings
from embedq_worker.sinks.finish import finish_run
from embedq_worker.supervisor import Supervisor, plan_slots

from embedq.demo import write_corpus


def produce(url: str, spec_json: bytes, corpus: str, go: object) -> None:
    """The producer's process."""
    spec = RunSpec.decode(spec_json)
    registry = Registry(connect(url, role="producer"), Keys(spec.queue))
    registry.backlog_bytes()
    go.wait()  # type: ignore[attr-defined]
    settings = BrokerSettings(redis_url=url, queue=spec.queue)
    feed(registry, spec, Path(corpus), ReadOptions(), settings)
    go.clear()  # type: ignore[attr-defined]
    while not go.is_set():  # type: ignore[attr-defined]
        time.sleep(0.05)


def once(corpus: Path, checkpoint: Path, engine: EngineSettings, gpus: tuple[int, ...] = ()) -> dict[str, float]:
    """One run; returns its begin (perf_counter), wall seconds, counts, CPU seconds and resident MiB by process."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder, "state")) as server:
        out = Path(folder, "out")
        keys = Keys("bench")
        client = connect(server.url, role="bench")
        registry = Registry(client, keys)
        broker = BrokerSettings(redis_url=server.url, queue="bench")
        worker = WorkerSettings(model=str(checkpoint), output_roots=(Path(folder),))
        slots = plan_slots(tokenizers=1, embedders=1, gpus=gpus, engine=engine)
        supervisor = Supervisor(slots, broker, worker, ends_on_infrastructure=True, log_level="WARNING")
        spec = RunSpec(run="bench", queue="bench", sink=ParquetSink(path=str(out)), created_at=time.time())
        registry.create(spec)
        context = multiprocessing.get_context("spawn")
        go = context.Event()
        producer = context.Process(target=produce, args=(server.url, spec.encode(), str(corpus), go))
        try:
            producer.start()
            while not supervisor.ready:
                supervisor.poll()
                time.sleep(0.02)
            time.sleep(1.5)  # the tokenizer has seen the embedder's budget
            processes = {
                "producer": psutil.Process(producer.pid),
                "tokenizer": psutil.Process(supervisor.pids("tokenizer")[0]),
                "embedder": psutil.Process(supervisor.pids("embedder")[0]),
                "server": psutil.Process(server.pid),
            }
            before = {name: cpu(process) for name, process in processes.items()}
            started = time.perf_counter()
            go.set()
            while registry.status(spec.run) is not RunStatus.FINALIZING:
                time.sleep(0.02)
            while not finish_run(client, keys, spec.run, (Path(folder),)):
                time.sleep(0.005)
            wall = time.perf_counter() - started
            used = {f"cpu_{name}": cpu(process) - before[name] for name, process in processes.items()}
            memory = {f"rss_{name}": process.memory_info().rss / 2**20 for name, process in processes.items()}
            peak = float(client.info("memory")["used_memory_peak"]) / 2**20
            protocol = protocol_seconds(client.info("commandstats"))
            state = registry.state(spec.run)
            assert (out / "_SUCCESS").exists(), state
            go.set()
        finally:
            supervisor.drain()
            producer.kill()
            producer.join()
        c = state.counters
        assert c.failed == 0, c
        counts = {"documents": c.input, "tokens": c.tokens, "server_peak_mib": peak, "protocol_s": protocol}
        return {"began": started, "wall": wall, **counts, **used, **memory}


def protocol_seconds(stats: dict[str, dict[str, float]]) -> float:
    """Server time of all scripts, less that of the stream commands any queue would need: add, acknowledge, delete."""
    seconds = {name.removeprefix("cmdstat_"): value["usec"] / 1e6 for name, value in stats.items()}
    bare = sum(seconds.get(name, 0.0) for name in ("xadd", "xack", "xdel"))
    return sum(seconds.get(name, 0.0) for name in ("evalsha", "eval")) - bare


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def reference_rate(corpus: Path, tokenizer_file: Path, every: int) -> float:
    """Tokens/s of Hugging Face `tokenizers` alone on every n-th document, all cores, called as transformers does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    with corpus.open("rb") as lines:
        texts = [json.loads(line)["text"] for index, line in enumerate(lines) if index % every == 0]
    started = time.perf_counter()
    tokens = 0
    for start in range(0, len(texts), 1024):
        tokens += sum(len(encoding) for encoding in tokenizer.encode_batch(texts[start : start + 1024]))
    seconds = time.perf_counter() - started
    return tokens / seconds


def report(runs: list[dict[str, float]], references: list[float]) -> None:
    """Medians of all runs; ratios are taken within each run."""
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    wall, documents = median["wall"], median["documents"]
    rates = [run["tokens"] / run["wall"] for run in runs]
    ratio = statistics.median(rate / alone for rate, alone in zip(rates, references, strict=True))
    print(f"{documents:,.0f} documents, {median['tokens']:,.0f} tokens, {wall:.2f} s: medians of {len(runs)} runs")
    print(f"embedq pipeline  {statistics.median(rates):12,.0f} tokens/s {documents / wall:10,.0f} documents/s")
    print(f"tokenizers alone {statistics.median(references):12,.0f} tokens/s; the pipeline is {ratio:.1f}x as fast")
    total = sum(value for name, value in median.items() if name.startswith("cpu_"))
    for name in ("producer", "tokenizer", "embedder", "server"):
        used = median[f"cpu_{name}"]
        print(f"  {name:10} {used:6.2f} CPU s {used / total:6.0%} {median[f'rss_{name}']:8.0f} MiB resident")
    print(f"  {'all':10} {total:6.2f} CPU s, {total / wall:.2f} cores busy")
    allowed = BrokerSettings().max_backlog_bytes >> 20
    print(f"server memory peak {median['server_peak_mib']:.0f} MiB; the backlog may take {allowed} MiB")
    extra = median["protocol_s"]
    print(
        f"tokens, leases, atomic commits: {extra:.3f} s of server time beyond bare stream commands, {extra / wall:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="JSONL; default: the standard library's docstrings")
    parser.add_argument("--tokenizer", type=Path, help="such as Qwen3's tokenizer.json; default: a small generated one")
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--budget", type=int, default=16384, help="tokens per batch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sample", type=int, default=8, help="the reference tokenizes every n-th document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = args.corpus or Path(folder, "docstrings.jsonl")
        if args.corpus is None:
            write_corpus(corpus)
        checkpoint = generate_checkpoint(
            Path(folder, "model"), hidden_size=args.dimension, layers=1, dtype="bfloat16", tokenizer_json=args.tokenizer
        )
        runs, references = [], []
        for _ in range(args.repeat):
            runs.append(once(corpus, checkpoint, EngineSettings(kind="null", max_batch_tokens=args.budget)))
            references.append(reference_rate(corpus, checkpoint / "tokenizer.json", args.sample))
            rate = runs[-1]["tokens"] / runs[-1]["wall"]
            print(f"  {runs[-1]['wall']:.2f} s, {rate:,.0f} tokens/s; alone {references[-1]:,.0f} tokens/s", flush=True)
    report(runs, references)


if __name__ == "__main__":
    main()
