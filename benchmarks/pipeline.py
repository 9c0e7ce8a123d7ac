"""How fast is everything around the model? The whole pipeline with an engine that returns fixed vectors.

Reads a JSONL corpus, sends it through a real server with its append-only file on, tokenizes, packs, "embeds", and
writes a Parquet dataset: producer, tokenizer, embedder and server as separate processes, with leases, tokens, atomic
commits, fsync and verification. The clock runs from the first byte of the corpus to `_SUCCESS`; loading does not count.
In the same run Hugging Face `tokenizers` alone tokenizes a sample of the corpus, with all cores, for comparison.

    python benchmarks/pipeline.py CORPUS.jsonl --tokenizer tokenizer.json [--repeat 3] [--dimension 256]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from embedq_broker.connect import connect
from embedq_broker.embedded import EmbeddedServer
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.blocks import ReadOptions
from embedq_producer.feed import feed
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings
from embedq_worker.sinks.finish import finish_run
from embedq_worker.supervisor import Supervisor, plan_slots


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


def once(corpus: Path, checkpoint: Path, dimension: int, budget: int, embedders: int) -> dict[str, float]:
    """One run; returns wall seconds, counts, and CPU seconds by process."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder, "state")) as server:
        out = Path(folder, "out")
        keys = Keys("bench")
        client = connect(server.url, role="bench")
        registry = Registry(client, keys)
        broker = BrokerSettings(redis_url=server.url, queue="bench")
        worker = WorkerSettings(model=str(checkpoint), output_roots=(Path(folder),))
        engine = EngineSettings(kind="null", max_batch_tokens=budget)
        slots = plan_slots(tokenizers=1, embedders=embedders, gpus=(), engine=engine)
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
            while not finish_run(client, keys, spec.run, (Path(folder),)):
                time.sleep(0.01)
            wall = time.perf_counter() - started
            used = {f"cpu_{name}": cpu(process) - before[name] for name, process in processes.items()}
            memory = {f"rss_{name}": process.memory_info().rss / 2**20 for name, process in processes.items()}
            peak = float(client.info("memory")["used_memory_peak"]) / 2**20
            state = registry.state(spec.run)
            assert (out / "_SUCCESS").exists(), state
            go.set()
        finally:
            supervisor.drain()
            producer.kill()
            producer.join()
        c = state.counters
        assert c.failed == 0, c
        return {"wall": wall, "documents": c.input, "tokens": c.tokens, "server_peak_mib": peak, **used, **memory}


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def reference_rate(corpus: Path, tokenizer_file: Path, every: int) -> tuple[float, float]:
    """(tokens/s, documents/s) of Hugging Face `tokenizers` alone on every n-th document, all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    with corpus.open("rb") as lines:
        texts = [json.loads(line)["text"] for index, line in enumerate(lines) if index % every == 0]
    started = time.perf_counter()
    tokens = 0
    for start in range(0, len(texts), 1024):
        tokens += sum(len(encoding) for encoding in tokenizer.encode_batch_fast(texts[start : start + 1024]))
    seconds = time.perf_counter() - started
    return tokens / seconds, len(texts) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, such as Qwen3's")
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--budget", type=int, default=16384, help="tokens per batch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sample", type=int, default=8, help="the reference tokenizes every n-th document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = generate_checkpoint(
            Path(folder, "model"), hidden_size=args.dimension, layers=1, dtype="bfloat16", tokenizer_json=args.tokenizer
        )
        runs, references = [], []
        measure: Callable[[], dict[str, float]] = lambda: once(args.corpus, checkpoint, args.dimension, args.budget, 1)  # noqa: E731
        for _ in range(args.repeat):
            runs.append(measure())
            references.append(reference_rate(args.corpus, args.tokenizer, args.sample))
            r = runs[-1]
            print(f"  {r['wall']:.2f} s, {r['tokens'] / r['wall']:,.0f} tokens/s; tokenizers alone {references[-1][0]:,.0f} tokens/s", flush=True)
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    tokens_s, documents_s = median["tokens"] / median["wall"], median["documents"] / median["wall"]
    reference = statistics.median(rate for rate, _ in references)
    ratio = statistics.median(run["tokens"] / run["wall"] / rate for run, (rate, _) in zip(runs, references, strict=True))
    print(f"documents {median['documents']:,.0f}, tokens {median['tokens']:,.0f}, wall {median['wall']:.2f} s (median of {len(runs)})")
    print(f"embedq pipeline      {tokens_s:12,.0f} tokens/s {documents_s:10,.0f} documents/s")
    print(f"tokenizers alone     {reference:12,.0f} tokens/s; the whole pipeline is {ratio:.1f}x as fast (median of ratios)")
    total = sum(value for name, value in median.items() if name.startswith("cpu_"))
    for name in ("producer", "tokenizer", "embedder", "server"):
        seconds = median[f"cpu_{name}"]
        print(f"  {name:10} {seconds:5.2f} CPU s  {seconds / total:4.0%}   {median[f'rss_{name}']:6.0f} MiB resident")
    print(f"  all        {total:5.2f} CPU s, {total / median['wall']:.2f} cores busy; server peak {median['server_peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
