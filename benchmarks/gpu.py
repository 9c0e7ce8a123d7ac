"""Is the GPU engine right, and how close to the GPU's limit is it?

    python benchmarks/gpu.py            # one GPU, under four minutes
    python benchmarks/gpu.py --toy      # the same script at toy size; also what runs where there is no GPU

In order: every attention backend against float32 on fresh inputs, and its time; tokens/s and model FLOP utilisation of
Qwen3-Embedding shapes over text lengths, beside transformers with SDPA; kernel time by kind; the whole pipeline from a
corpus to a dataset, with the device's idle share by the driver's counter. Utilisation above 100% means the measurement
is wrong, and fails the run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedq_worker.bench import MatrixRate
from embedq_worker.checkpoint import Checkpoint, decoder_of, load_checkpoint
from embedq_worker.engine import Engine, EngineSettings, PackedBatch, load_engine
from embedq_worker.engine.attention.choose import HeadShape, candidates, check, seconds
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.tuning import uniform_batch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Shape:
    """A Qwen3-Embedding size. Fewer layers leave the rates as they are and the run short."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int


FULL = (
    Shape("0.6B", 1024, 28, 16, 8, 128, 3072),
    Shape("4B", 2560, 12, 32, 8, 128, 9728),
    Shape("8B", 4096, 8, 32, 8, 128, 12288),
)
TOY = (Shape("toy", 128, 2, 4, 2, 32, 256), Shape("toy-wide", 256, 2, 4, 2, 64, 512))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy shapes; the default where there is no GPU")
    parser.add_argument("--shapes", nargs="+", choices=[shape.name for shape in FULL], help="default: all")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens a text")
    parser.add_argument("--batch-tokens", type=int, help="tokens a batch; default 16384, toy 1024")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-queue", action="store_true")
    parser.add_argument("--corpus", type=Path, help="JSONL for the queue; default: the standard library's docstrings")
    parser.add_argument("--tokenizer", type=Path, help="such as Qwen3's tokenizer.json; default: a small generated one")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    toy = options.toy or not gpu
    options.lengths = options.lengths or ([16, 64, 256] if toy else [128, 512, 2048, 8192])
    options.batch_tokens = options.batch_tokens or (1024 if toy else 16_384)
    if not gpu:
        torch.set_num_threads(2)
    print(f"device: {torch.cuda.get_device_name() if gpu else 'cpu, no GPU'}; {'toy' if toy else 'full'} shapes")
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    backends(device)
    failures = kinds(device)
    shapes = TOY if toy else [shape for shape in FULL if shape.name in (options.shapes or [shape.name])]
    for shape in shapes:
        with tempfile.TemporaryDirectory() as scratch:
            failures += measure(shape, Path(scratch), options, device, first=shape is shapes[0])
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def backends(device: torch.device) -> None:
    """Every backend this machine could have, whether it computes attention right, and how fast."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, factory in candidates(device, dtype).items():
        for shape in (HeadShape(16, 8, 128), HeadShape(12, 2, 64, causal=False), HeadShape(8, 8, 128, windows=(33,))):
            reason = check(name, factory, shape, device, dtype)
            print(f"attention {name:10} {shape}: {reason or 'right'}")
            if reason:
                break
        else:
            lengths = (128, 512, 2048, 8192) if device.type == "cuda" else (64, 256)
            times = {n: seconds(factory(), HeadShape(16, 8, 128), device, dtype, length=n) for n in lengths}
            print("          " + ", ".join(f"{n} tokens a text: {1e3 * t:.3f} ms" for n, t in times.items()))


#: Every branch of the engine at a size that takes seconds: what differs from Qwen3-Embedding.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3, last token": {},
    "qwen2, bias, mean, bidirectional": {"family": "qwen2", "pooling": "mean", "causal": False},
    "qwen3, dense head, cls": {"pooling": "cls", "dense": (96,)},
    "qwen2, grouped by seven": {"family": "qwen2", "hidden_size": 448, "heads": 14, "kv_heads": 2, "head_dim": 32},
    "qwen3, head_dim 128": {"hidden_size": 256, "heads": 2, "kv_heads": 1, "head_dim": 128},
}


def kinds(device: torch.device) -> list[str]:
    """Small models of each kind on the device, against the float32 engine on the CPU, on fresh texts."""
    rng, failures = np.random.default_rng(), []
    for name, options in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = load_checkpoint(str(generate_checkpoint(Path(folder, "m"), max_length=4096, **options)))
            texts = [rng.integers(0, checkpoint.vocab_size, n).tolist() for n in (1, 2, 17, 64, 300, 1500)]
            wanted = vectors_of(checkpoint, texts, "cpu", "float32")
            exact = float(np.abs(vectors_of(checkpoint, texts, str(device), "float32") - wanted).max())
            close = float((vectors_of(checkpoint, texts, str(device), "bfloat16") * wanted).sum(1).min())
            print(f"{name:34} float32 differs by {exact:.1e} at most; bfloat16 cosine at least {close:.5f}")
            if exact > 1e-4 or close < 0.999:
                failures.append(f"{name}: the device's vectors differ from the CPU's")
    return failures


def vectors_of(checkpoint: Checkpoint, texts: list[list[int]], device: str, dtype: Any) -> NDArray[np.float32]:
    engine = load_engine(checkpoint, EngineSettings(device=device, dtype=dtype, max_batch_tokens=4096))
    try:
        return engine.encode(PackedBatch.of(texts))
    finally:
        engine.close()


def measure(
    shape: Shape, scratch: Path, options: argparse.Namespace, device: torch.device, *, first: bool
) -> list[str]:
    path = generate_checkpoint(
        scratch / "model",
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        dtype="bfloat16",
        max_length=max(options.lengths),
        tokenizer_json=options.tokenizer,
    )
    checkpoint = load_checkpoint(str(path))
    settings = EngineSettings(
        device=str(device),
        dtype="bfloat16" if device.type == "cuda" else "auto",
        attention=options.attention,
        max_batch_tokens=options.batch_tokens,
        threads=None if device.type == "cuda" else 2,
    )
    engine = load_engine(checkpoint, settings)
    print(f"\n{shape.name}: " + " ".join(f"{k}={v}" for k, v in engine.description.items() if v))
    failures = [] if options.no_transformers else against_transformers(path, checkpoint, engine, options, device)
    failures += utilisation(shape, checkpoint, engine, options)
    if first:
        kernels(checkpoint, engine, options, device)
    engine.close()
    if first and not options.no_queue:
        through_queue(path, options, device)
    return failures


def utilisation(shape: Shape, checkpoint: Checkpoint, engine: Engine, options: argparse.Namespace) -> list[str]:
    """Tokens/s by text length, and FLOP/s over the matrix rate measured around each batch."""
    config, rate, failures = decoder_of(checkpoint), MatrixRate(checkpoint, engine, rows=options.batch_tokens), []
    rate.measure()
    for length in options.lengths:
        tokens = max(length, options.batch_tokens // length * length)
        batch = uniform_batch(tokens, length, vocab_size=config.vocab_size)
        engine.encode(batch)
        shares, speeds = [], []
        for _ in range(5):
            before = rate.measure()
            seconds = timed(lambda batch=batch: engine.encode(batch))
            speeds.append(tokens / seconds)
            shares.append(flops(checkpoint, length) * tokens / seconds / ((before + rate.measure()) / 2))
        share = statistics.median(shares)
        speed = statistics.median(speeds)
        print(f"{shape.name:>8} {length:5} tokens a text: {speed:12,.0f} tokens/s, utilisation {share:.3f}")
        # At toy size a whole layer fits the cache, which the matrix measure's larger inputs do not.
        if share > 1 and shape in FULL:
            failures.append(f"{shape.name} at {length} tokens: utilisation {share:.2f} is above 1")
    return failures


def flops(checkpoint: Checkpoint, length: int) -> float:
    """Of one token in a text of `length` tokens: products, and causal attention's two."""
    config = decoder_of(checkpoint)
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length
    return 2 * config.parameters + attention


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def against_transformers(
    path: Path, checkpoint: Checkpoint, engine: Engine, options: argparse.Namespace, device: torch.device
) -> list[str]:
    """transformers with SDPA: its float32 vectors for correctness, its bfloat16 speed on equal texts."""
    from transformers import AutoModel

    rng = np.random.default_rng()
    lengths = [1, 7, 33, *(length for length in options.lengths if length <= 512)]
    texts = [rng.integers(0, checkpoint.vocab_size, length).tolist() for length in lengths]
    model = AutoModel.from_pretrained(str(path), dtype=torch.float32, attn_implementation="sdpa").to(device).eval()
    found = engine.encode(PackedBatch.of(texts))
    with torch.inference_mode():
        wanted = [model(torch.tensor([ids], device=device)).last_hidden_state[0, -1].float().cpu() for ids in texts]
    expected = torch.stack([vector / vector.norm() for vector in wanted]).numpy()
    worst = float((found * expected).sum(1).min())
    print(f"smallest cosine with transformers in float32, fresh inputs: {worst:.5f}")
    model = model.to(torch.bfloat16)
    length = min(512, max(options.lengths))
    count = max(1, options.batch_tokens // length)
    ids = torch.zeros(count, length, dtype=torch.long, device=device)
    with torch.inference_mode():
        timed(lambda: model(ids))
        seconds = statistics.median(timed(lambda: model(ids)) for _ in range(3))
    batch = uniform_batch(count * length, length, vocab_size=checkpoint.vocab_size)
    ours = statistics.median(timed(lambda: engine.encode(batch)) for _ in range(3))
    print(f"transformers, SDPA, no padding, {length} tokens a text: {count * length / seconds:,.0f} tokens/s; "
          f"embedq is {seconds / ours:.2f}x")  # fmt: skip
    return [] if worst >= 0.999 else [f"cosine {worst:.5f} with transformers is below 0.999"]


def kernels(checkpoint: Checkpoint, engine: Engine, options: argparse.Namespace, device: torch.device) -> None:
    """Where the time of one batch goes, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    length = min(512, max(options.lengths))
    batch = uniform_batch(options.batch_tokens, length, vocab_size=checkpoint.vocab_size)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        engine.encode(batch)
    kinds: Counter[str] = Counter()
    for event in profiler.key_averages():
        micros = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        kinds[kind_of(event.key)] += micros
    total = sum(kinds.values()) or 1
    print("kernel time: " + ", ".join(f"{kind} {micros / total:.1%}" for kind, micros in kinds.most_common()))


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in {
        "attention": ("flash", "fmha", "attention", "prefill"),
        "products": ("gemm", "nvjet", "cutlass", "linear", "addmm", "::mm", "cublas"),
        "copies": ("memcpy", "memset", "copy_"),
    }.items():
        if any(word in name for word in words):
            return kind
    return "between products"


def through_queue(path: Path, options: argparse.Namespace, device: torch.device) -> None:
    """The whole pipeline, from a corpus to a dataset, and the share of that time in which the GPU ran no kernel."""
    from pipeline import once

    from embedq.demo import write_corpus

    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or Path(folder, "docstrings.jsonl")
        if options.corpus is None:
            write_corpus(corpus)
        engine = EngineSettings(
            device="auto" if device.type == "cuda" else "cpu",
            attention=options.attention,
            max_batch_tokens=options.batch_tokens,
            threads=None if device.type == "cuda" else 1,
        )
        with busy_samples(device) as samples:
            run = once(corpus, path, engine, gpus=(0,) if device.type == "cuda" else ())
        rate = run["tokens"] / run["wall"]
        print(
            f"through the queue: {run['documents']:,.0f} documents, {run['tokens']:,.0f} tokens, {rate:,.0f} tokens/s"
        )
        # The first and the last tenth hold the pipeline's filling and the files' last fsync.
        first, last = (run["began"] + run["wall"] * part for part in (0.1, 0.9))
        inside = [busy for at, busy in samples if first <= at <= last]
        print(
            f"device idle, by the driver's counter: {1 - statistics.mean(inside):.1%}"
            if inside
            else "idle share: no GPU"
        )


@contextmanager
def busy_samples(device: torch.device) -> Iterator[list[tuple[float, float]]]:
    """(time, share of the last moments in which a kernel ran), sampled from the driver while the block runs."""
    samples: list[tuple[float, float]] = []
    if device.type != "cuda":
        yield samples
        return
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.1):
            samples.append((time.perf_counter(), pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
