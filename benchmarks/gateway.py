"""What does HTTP cost, and how does the gateway compare with vLLM's server?

    python benchmarks/gateway.py --corpus corpus.jsonl --tokenizer tokenizer.json [--vllm-python VENV/bin/python]

1. Knowledge base: 20 clients send one text a request, against the same texts in one bulk run on the same worker.
   Bounds: 0.85 of the bulk run's throughput; 95% of the requests within four times one token batch's time.
2. With --vllm-python: 10 clients send 20 texts of 1,000 tokens a request to the gateway and to vLLM's OpenAI server,
   both serving the same checkpoint. Bound: 1.5 times vLLM's requests per second.

The machine may be shared, so both sides take turns, and the median of their ratios counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from embedq_broker.connect import connect
from embedq_broker.embedded import EmbeddedServer
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats
from embedq_schemas.names import Lane
from embedq_worker.engine.generate import generate_checkpoint
from tokenizers import Tokenizer

from embedq import Client
from embedq.demo import write_corpus

QUEUE = "default"
START_S = 600.0
_HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """How long each request took, and all together; in seconds."""

    requests: tuple[float, ...]
    seconds: float
    tokens: int

    @property
    def per_second(self) -> float:
        return len(self.requests) / self.seconds

    @property
    def p95(self) -> float:
        return sorted(self.requests)[round(0.95 * (len(self.requests) - 1))]


async def send(port: int, bodies: Sequence[bytes], clients: int) -> Load:
    """Send every body once, over `clients` connections that stay open. Plain streams: a client library costs cores."""
    left = iter(bodies)
    taken: list[float] = []
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64 << 20)
        for body in left:
            start = time.perf_counter()
            writer.write(_HEAD % len(body) + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            content = await reader.readexactly(int(answer.partition("content-length:")[2].partition("\r\n")[0]))
            if " 200 " not in answer.partition("\r\n")[0]:
                raise SystemExit(f"{answer}{content.decode()}")
            taken.append(time.perf_counter() - start)
            tokens += json.loads(content)["usage"]["prompt_tokens"]
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(tuple(taken), time.perf_counter() - start, tokens)


def bodies(model: str, requests: Sequence[str | list[str]]) -> list[bytes]:
    """As OpenAI's client sends them."""
    return [json.dumps({"model": model, "input": r, "encoding_format": "base64"}).encode() for r in requests]


@contextmanager
def program(log: Path, command: Sequence[object], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*map(str, command)], stdout=file, stderr=file, env=os.environ | variables, start_new_session=True
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(port: int, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"not ready; its log ends with:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def knowledge_base(url: str, port: int, model: str, texts: list[str], options: argparse.Namespace) -> None:
    requests = bodies(model, texts)
    asyncio.run(send(port, requests[: 4 * options.clients], options.clients))
    ratios, loads, rates = [], [], []
    with Client(url, QUEUE) as client:
        for _ in range(options.rounds):
            start = time.perf_counter()
            results = client.submit(texts, lane=Lane.BULK).ordered()
            bulk_s = time.perf_counter() - start
            rates.append(float(results.n_tokens.sum()) / bulk_s)
            load = asyncio.run(send(port, requests, options.clients))
            loads.append(load)
            ratios.append(load.per_second / (len(texts) / bulk_s))
            print(
                f"bulk run {len(texts) / bulk_s:.1f} texts/s ({rates[-1]:.0f} tokens/s), {options.clients} clients "
                f"{load.per_second:.1f} texts/s, ratio {ratios[-1]:.3f}, p95 {load.p95 * 1000:.0f} ms",
                flush=True,
            )
    with connect(url, role="benchmark") as redis:
        batch_tokens = max(beat.max_batch_tokens for beat in heartbeats(redis, Keys(QUEUE)))
    batch_s = batch_tokens / statistics.median(rates)
    p95 = statistics.median(load.p95 for load in loads)
    print(f"\nknowledge base: {statistics.median(ratios):.3f} of the bulk run's throughput (bound 0.85);")
    print(f"p95 {p95:.3f} s, {p95 / batch_s:.2f} times a batch of {batch_tokens} tokens, {batch_s:.3f} s (bound 4)\n")


def against_vllm(port: int, rival_port: int, model: str, texts: list[str], options: argparse.Namespace) -> None:
    pieces = [texts[i : i + 20] for i in range(0, len(texts), 20)]
    requests = bodies(model, pieces)
    for each in (port, rival_port):
        asyncio.run(send(each, requests[:1], 1))
    ratios = []
    for _ in range(options.rounds):
        rival = asyncio.run(send(rival_port, requests, 10))
        ours = asyncio.run(send(port, requests, 10))
        ratios.append(ours.per_second / rival.per_second)
        print(
            f"gateway {ours.per_second:.3f} requests/s ({ours.tokens / ours.seconds:.0f} tokens/s), vLLM "
            f"{rival.per_second:.3f} requests/s ({rival.tokens / rival.seconds:.0f} tokens/s), ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"\n10 clients with 20 texts of 1,000 tokens: {statistics.median(ratios):.2f} times vLLM (bound 1.5)")


def long_texts(documents: Iterator[str], tokenizer: Tokenizer, count: int) -> list[str]:
    """Texts of 1,000 tokens, or one or two fewer where a cut falls inside a character."""
    found: list[str] = []
    ids: list[int] = []
    for document in itertools.cycle(list(documents)):
        ids += tokenizer.encode(document, add_special_tokens=False).ids
        while len(ids) >= 999:
            found.append(tokenizer.decode(ids[:999], skip_special_tokens=False).strip("\ufffd"))
            ids = ids[999:]
        if len(found) >= count:
            break
    return found[:count]


def make_checkpoint(options: argparse.Namespace, folder: Path) -> Path:
    path: Path = options.checkpoint or folder / "model"
    if not (path / "modules.json").exists():
        generate_checkpoint(
            path,
            hidden_size=options.hidden_size,
            layers=options.layers,
            heads=16,
            kv_heads=8,
            head_dim=128,
            intermediate_size=3 * options.hidden_size,
            vocab_size=151_669 if options.tokenizer else None,
            dtype="bfloat16",
            tokenizer_json=options.tokenizer,
        )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="JSON lines with a `text`; default: the library's docstrings")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of Qwen3; default: a small byte-level one")
    parser.add_argument("--checkpoint", type=Path, help="where the checkpoint is made, and found again")
    parser.add_argument(
        "--hidden-size", type=int, default=1024, help="of the checkpoint; default as Qwen3-Embedding-0.6B"
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--texts", type=int, default=400, help="texts of part 1")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-batch-tokens", default="auto")
    parser.add_argument(
        "--vllm-python", type=Path, help="interpreter of an environment with vLLM; without it no part 2"
    )
    parser.add_argument(
        "--vllm-all-cores",
        action="store_true",
        help="let all cores compute; by default its server keeps one for itself",
    )
    parser.add_argument("--long-texts", type=int, default=400, help="texts of part 2")
    options = parser.parse_args()
    # The programs it starts end with it, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, Path(scratch))


def measure(options: argparse.Namespace, scratch: Path) -> None:
    model = make_checkpoint(options, scratch)
    corpus = options.corpus or scratch / "corpus.jsonl"
    if options.corpus is None:
        write_corpus(corpus)
    with open(corpus, encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    texts = documents[:: max(1, len(documents) // options.texts)][: options.texts]
    port, rival_port = free_port(), free_port()
    embedq = (sys.executable, "-m", "embedq")
    with EmbeddedServer(scratch / "state") as server:
        worker = (*embedq, "worker", "--redis", server.url, "--model", model, "--device", "cpu")
        gateway = (*embedq, "serve", "--redis", server.url, "--port", port, "--data-dir", scratch / "data")
        log = scratch / "gateway.log"
        with (
            program(scratch / "worker.log", (*worker, "--max-batch-tokens", options.max_batch_tokens)),
            program(log, (*gateway, "--on-long", "truncate")) as process,
        ):
            wait_ready(port, "/ready", process, log)
            knowledge_base(server.url, port, model.name, texts, options)
            if options.vllm_python is None:
                print("vLLM: not measured (no --vllm-python)")
                return
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            pieces = long_texts(iter(documents), tokenizer, options.long_texts)
            with vllm(
                options.vllm_python, model, rival_port, scratch / "vllm.log", all_cores=options.vllm_all_cores
            ) as rival:
                wait_ready(rival_port, "/health", rival, scratch / "vllm.log")
                against_vllm(port, rival_port, model.name, pieces, options)


def vllm(python: Path, model: Path, port: int, log: Path, *, all_cores: bool) -> Any:
    command: tuple[object, ...] = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port)
    command += ("--served-model-name", model.name, "--runner", "pooling", "--dtype", "bfloat16")
    command += ("--max-model-len", 2048, "--max-num-batched-tokens", 2048, "--no-enable-prefix-caching")
    # Idle while the other side is measured.
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_SLEEP_WHEN_IDLE": "1"}
    if all_cores:
        settings["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return program(log, command, **settings)


if __name__ == "__main__":
    main()
