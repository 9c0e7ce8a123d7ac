"""Does a hundred times the corpus cost a hundred times the time, and no more memory?

    python benchmarks/scale.py [--documents 10000000] [--small 100000] [--plot memory.svg] [--kill]

Generated documents of about ten words go through the real `embedq run`, with an engine that returns fixed vectors:
producer, tokenizer, embedder and server as separate processes, with leases, commits, fsync and verification.

1. A small corpus and the large one: time per document from the moment the model is loaded to `_SUCCESS`. By then all of
   the small corpus may have been sent, so that the comparison favours it. Bound: 1.10.
2. Resident memory of every process meanwhile, pages that several hold counted in shares, as a plot. The command's own
   grows by design: 8 bytes for every id and 8 for every text, by which repeats are told, and half as much again while
   they are merged. All others are to stay flat: what they take beyond a fifth of the run is printed.
3. With --kill: the large run is killed, server and all, when 60% are done, and repeated. What was committed must not be
   done again; what was under way is at most one window of uncommitted work.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
from embedq_broker.connect import connect
from embedq_broker.embedded import running_server_url
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats
from embedq_broker.registry import Registry
from embedq_schemas.errors import EmbedqError
from embedq_worker.engine.generate import generate_checkpoint
from redis.exceptions import RedisError

from embedq.dataset import open_dataset

COUNTERS_EVERY_S = 0.1
MEMORY_EVERY_S = 1.0
FILE_BYTES = 16 << 20
ROLES = {"run": "#1b6ca8", "tokenizer": "#c0392b", "embedder": "#2e8b57", "server": "#8e44ad"}
_WORDS = """queue token vector batch stream commit lease shard index corpus model layer worker packed exact""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Sample:
    """One moment of a command."""

    at: float  # Unix time, s
    ready: bool  # the model is loaded
    sent: int
    done: int
    memory: dict[str, int]  # bytes by role


def write_corpus(path: Path, documents: int) -> Path:
    """Texts of ten words, no two of them equal."""
    count = len(_WORDS)
    with path.open("w", encoding="utf-8") as file:
        for i in range(documents):
            words = " ".join(_WORDS[(i * 7 + k * k * (i % 13 + 1)) % count] for k in range(9))
            file.write(f'{{"id": "doc-{i}", "text": "{i} {words}"}}\n')
    return path


class Observer:
    """Looks at one command: its counters in its server, its processes' memory in the system."""

    def __init__(self, output: Path, command: psutil.Process) -> None:
        self._output, self._command = output, command
        self._client: redis.Redis | None = None
        self._keys = Keys("default")
        self._ready = False
        self._roles = {command.pid: "run"}
        self._memory_at, self._last_memory = 0.0, dict.fromkeys(ROLES, 0)

    def look(self) -> Sample:
        sent, done = self._counters()
        if time.time() - self._memory_at > MEMORY_EVERY_S:
            self._memory_at, self._last_memory = time.time(), self._memory()
        return Sample(time.time(), self._ready, sent, done, self._last_memory)

    def _counters(self) -> tuple[int, int]:
        if self._client is None and (url := running_server_url(self._output / "_state")) is not None:
            self._client = connect(url, role="benchmark")
        if self._client is not None:
            with suppress(RedisError, EmbedqError):
                for beat in heartbeats(self._client, self._keys):
                    self._roles[beat.pid] = beat.role
                    self._ready |= beat.role == "embedder" and beat.state != "starting"
                for state in Registry(self._client, self._keys).runs():
                    return state.counters.input, state.counters.settled
        return 0, 0

    def _memory(self) -> dict[str, int]:
        found = dict.fromkeys(ROLES, 0)
        with suppress(psutil.Error):
            for process in (self._command, *self._command.children(recursive=True)):
                with suppress(psutil.Error):
                    role = "server" if "server" in process.name() else self._roles.get(process.pid)
                    if role is not None:
                        found[role] += process.memory_full_info().pss
        return found


def embed(corpus: Path, output: Path, model: Path, until: Callable[[Sample], bool] = lambda _: False) -> list[Sample]:
    """Run the command to its end, or kill it and all it started once `until`."""
    command = [sys.executable, "-m", "embedq", "run", str(corpus), "-o", str(output), "-m", str(model)]
    command += ["--engine", "null", "--file-bytes", str(FILE_BYTES)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    observer, samples = Observer(output, psutil.Process(process.pid)), []
    while process.poll() is None:
        samples.append(observer.look())
        if until(samples[-1]):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return samples
        time.sleep(COUNTERS_EVERY_S)
    if process.returncode:
        raise SystemExit(f"embedq run ended with status {process.returncode}")
    done = int(open_dataset(output).summary["succeeded"])
    return [*samples, Sample((output / "_SUCCESS").stat().st_mtime, True, done, done, {})]


def per_document(samples: list[Sample]) -> float:
    """Microseconds, from when the model is loaded to the end."""
    first = next(sample for sample in samples if sample.ready)
    return (samples[-1].at - first.at) / samples[-1].done * 1e6


def between(samples: list[Sample], first: float, last: float) -> float:
    """Microseconds per document between two shares of the whole."""
    ends = [next(sample for sample in samples if sample.done >= share * samples[-1].done) for share in (first, last)]
    return (ends[1].at - ends[0].at) / (ends[1].done - ends[0].done) * 1e6


def plot(samples: list[Sample], path: Path) -> None:
    """Lines as SVG: memory by role over documents done."""
    width, height, left, bottom = 720, 320, 60, 40
    most = max(max(sample.memory.values(), default=0) for sample in samples) / 2**20
    total = samples[-1].done
    size = f'width="{width}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    parts.append(f'<rect {size} fill="white"/>')
    step = max(64, round(most / 4 / 64) * 64)
    for mark in range(0, int(most) + step, step):
        y = height - bottom - mark / (most + step) * (height - bottom - 10)
        parts.append(f'<line x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark} MiB</text>')
    for number, (role, colour) in enumerate(ROLES.items()):
        points = [
            f"{left + sample.done / total * (width - left - 10):.1f},"
            f"{height - bottom - sample.memory[role] / 2**20 / (most + step) * (height - bottom - 10):.1f}"
            for sample in samples
            if sample.memory.get(role)
        ]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(points)}"/>')
        parts.append(f'<text x="{left + 10 + 110 * number}" y="{height - 8}" fill="{colour}">{role}</text>')
    parts.append(f'<text x="{width - 10}" y="{height - 8}" text-anchor="end">{total:,} documents</text></svg>')
    path.write_text("\n".join(parts))


def report_memory(samples: list[Sample]) -> None:
    total = samples[-1].done
    early = [sample for sample in samples if 0 < sample.done <= total / 5]
    for role in ROLES:
        before = max((sample.memory[role] for sample in early), default=0)
        largest = max(sample.memory.get(role, 0) for sample in samples)
        print(
            f"  {role:10} {largest >> 20:6} MiB at most, {(largest - before) / 2**20:+7.1f} MiB after the first fifth"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3, help="runs of the small corpus; their median counts")
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--tokenizer", type=Path, help="such as Qwen3's tokenizer.json; default: a small generated one")
    parser.add_argument("--plot", type=Path, help="SVG file for the memory of the large run")
    parser.add_argument("--kill", action="store_true", help="also kill a large run at 60%% and resume it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(options, Path(name))


def measure(options: argparse.Namespace, folder: Path) -> None:
    model = generate_checkpoint(
        folder / "model", hidden_size=options.dimension, layers=1, dtype="bfloat16", tokenizer_json=options.tokenizer
    )
    small, large = (write_corpus(folder / f"{n}.jsonl", n) for n in (options.small, options.documents))
    few = [per_document(embed(small, folder / f"small-{i}", model)) for i in range(options.repeat)]
    samples = embed(large, folder / "large", model)
    many, base = per_document(samples), statistics.median(few)
    print(f"{options.small:,} documents: {base:.2f} us each; {options.documents:,}: {many:.2f} us each")
    print(f"ratio {many / base:.3f} (bound 1.10); {1e6 / many:,.0f} documents/s")
    early, late = between(samples, 0.05, 0.25), between(samples, 0.75, 0.95)
    print(f"within it: {early:.2f} us each from 5 to 25%, {late:.2f} us from 75 to 95%, ratio {late / early:.3f}")
    report_memory(samples)
    if options.plot:
        plot(samples, options.plot)
    if options.kill:
        kill_and_resume(options.documents, large, folder / "killed", model)


def kill_and_resume(documents: int, corpus: Path, output: Path, model: Path) -> None:
    killed = embed(corpus, output, model, until=lambda sample: sample.done >= 0.6 * documents)
    resumed = embed(corpus, output, model)
    reader = open_dataset(output)
    first = next(sample for sample in resumed if sample.done)
    window = reader.spec.sink.file_bytes // reader.row_bytes  # type: ignore[union-attr]
    print(f"killed with {killed[-1].done:,} done of {killed[-1].sent:,} sent; then at first sight {first.done:,} done")
    print(f"window of uncommitted work: {window:,} documents; rows at the end: {reader.rows:,}")
    if first.done < killed[-1].done or reader.rows != documents:
        raise SystemExit("committed work was lost, or done twice")


if __name__ == "__main__":
    main()
