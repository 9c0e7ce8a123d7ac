"""The long run: producers, tokenizers and embedders, killed at random together with their server and connections.

    python tests/chaos/harness.py --minutes 30 --seed 1 [--report docs/reliability.md]

Rounds follow one another until the time is over, on Valkey and on Redis in turn. In a round a corpus goes through the
whole pipeline (a real small model, real Parquet, a server with its append-only file) while a seeded dice kills
processes, stops and continues them, kills the server, cuts, half-closes and delays connections and loses replies.
Afterwards the checker reads every file. A history of what was done to whom, and of every commit and publication as the
run's counters showed them, is written beside the corpus; a round with a finding keeps its directory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from accounting import Account, Corpus, account, write_corpus  # noqa: E402
from crew import Crew, fork_server  # noqa: E402
from embedq_broker.connect import connect  # noqa: E402
from embedq_broker.keys import Keys  # noqa: E402
from embedq_broker.registry import Registry  # noqa: E402
from embedq_broker.settings import BrokerSettings  # noqa: E402
from embedq_producer.blocks import ReadOptions  # noqa: E402
from embedq_producer.feed import feed  # noqa: E402
from embedq_schemas.encoding import EncodingOptions, OnLong  # noqa: E402
from embedq_schemas.run import ParquetSink, RunSpec, RunState, RunStatus  # noqa: E402
from embedq_worker.engine.generate import generate_checkpoint  # noqa: E402
from embedq_worker.engine.settings import EngineSettings  # noqa: E402
from embedq_worker.settings import WorkerSettings  # noqa: E402
from proxy import Proxy  # noqa: E402
from redis.exceptions import RedisError  # noqa: E402
from servers import KINDS, Kind, Server  # noqa: E402

LEASE_S = 1.0
ROUND_S = 240.0
#: A longer time without a commit keeps the round's directory.
STALL_S = 20.0


@dataclass
class Totals:
    """What all rounds did and found."""

    rounds: int = 0
    process_kills: int = 0
    stops: int = 0
    server_kills: int = 0
    cuts: int = 0
    lost_replies: int = 0
    documents: int = 0
    rows: int = 0
    errors: int = 0
    unexpected_errors: int = 0
    skipped: int = 0
    deliveries: int = 0
    lost: int = 0
    doubled: int = 0
    problems: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)


def produce(url: str, spec_json: bytes, corpus: str) -> None:
    """A producer's process: sends its run, from wherever an earlier one was killed."""
    spec = RunSpec.decode(spec_json)
    registry = Registry(connect(url, role="producer"), Keys(spec.queue))
    settings = BrokerSettings(redis_url=url, queue=spec.queue, lease_s=LEASE_S, max_backlog_bytes=4 << 20)
    while True:
        try:
            registry.create(spec)
            feed(registry, spec, Path(corpus), ReadOptions(block_documents=64), settings)
            return
        except RedisError:
            time.sleep(0.2)


class Round:
    """One seeded round on one server."""

    def __init__(self, seed: int, kind: Kind, folder: Path, checkpoint: Path, engine: str, documents: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.history = (folder / "history.jsonl").open("w", buffering=1)
        self.server = Server(kind, tcp=True)
        self.server.start()
        self.proxy = Proxy(self.server.port)
        self.keys = Keys("chaos")
        self.direct = self.server.client()
        # Kills come many times a second here, so innocent batches are delivered often.
        self.broker = BrokerSettings(redis_url=self.proxy.url, queue="chaos", lease_s=LEASE_S, max_deliveries=100)
        worker = WorkerSettings(
            model=str(checkpoint),
            output_roots=(folder,),
            tokenizer_backend="huggingface",
            flush_interval_s=0.3,
            grace_s=5,
            prefetch=2,
        )
        self.crew = Crew(
            self.broker,
            worker,
            EngineSettings(kind=engine, max_batch_tokens=1024, threads=1, device="cpu", dtype="float32"),  # type: ignore[arg-type]
            tokenizers=2,
            embedders=2,
            log_file=folder / "workers.log",
            gives_back=self.random.random() < 0.5,
            seed=seed,
        )
        self.corpora: dict[str, Corpus] = {}
        self.producers: dict[str, Any] = {}
        self.specs: dict[str, RunSpec] = {}
        self.kills: list[float] = []
        self.commits: list[float] = []
        self.stopped: dict[int, float] = {}
        for index in range(2):
            run = f"run-{index}"
            self.corpora[run] = write_corpus(folder / f"{run}.jsonl", documents, prefix=run, bad_lines=3, long_texts=5)
            self.specs[run] = RunSpec(
                run=run,
                queue="chaos",
                encoding=EncodingOptions(max_length=64, on_long=OnLong.ERROR),
                sink=ParquetSink(path=str(folder / run), file_bytes=1 << 16),
                created_at=time.time(),
            )
        self._watching = True
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def note(self, event: str, **facts: object) -> None:
        self.history.write(json.dumps({"at": time.time(), "event": event, **facts}) + "\n")

    def run(self, totals: Totals) -> None:
        """Mistreat everything until the runs are over."""
        deadline = time.monotonic() + ROUND_S
        while time.monotonic() < deadline:
            self.crew.tend()
            over = self._tend_producers()
            if over:
                break
            self._throw(totals)
            time.sleep(self.random.uniform(0.05, 0.5))
        else:
            # A last chance without any mistreatment: what does not end now is stuck.
            self._calm()
            until = time.monotonic() + 60
            while time.monotonic() < until and not self._tend_producers():
                self.crew.tend()
                time.sleep(0.2)

    def _tend_producers(self) -> bool:
        for run, spec in self.specs.items():
            process = self.producers.get(run)
            if process is None or (not process.is_alive() and process.exitcode != 0):
                process = fork_server().Process(
                    target=produce, args=(self.proxy.url, spec.encode(), str(self.corpora[run].path)), daemon=True
                )
                process.start()
                self.producers[run] = process
        try:
            registry = Registry(self.direct, self.keys)
            return all((status := registry.status(run)) is not None and status.terminal for run in self.specs)
        except RedisError:
            return False

    def _throw(self, totals: Totals) -> None:
        for pid, until in list(self.stopped.items()):
            if time.monotonic() > until:
                del self.stopped[pid]
                self._signal(pid, signal.SIGCONT)
        dice = self.random.random()
        if dice < 0.62:
            pids = self.crew.pids() + [p.pid for p in self.producers.values() if p.is_alive()]
            pid = self.random.choice(pids)
            self.note("kill", pid=pid)
            self._signal(pid, signal.SIGKILL)
            self.kills.append(time.time())
            totals.process_kills += 1
        elif dice < 0.66:
            pid = self.random.choice(self.crew.pids())
            self.note("stop", pid=pid)
            self._signal(pid, signal.SIGSTOP)
            self.stopped[pid] = time.monotonic() + self.random.uniform(0.5, 2.5) * LEASE_S
            totals.stops += 1
        elif dice < 0.70:
            self.note("kill server", pid=self.server.pid)
            self.server.kill()
            time.sleep(self.random.uniform(0, 1))
            self.server.start()
            self.kills.append(time.time())
            totals.server_kills += 1
        elif dice < 0.88:
            cut = self.random.choice((self.proxy.cut, self.proxy.half_close))
            self.note(cut.__name__)
            cut()
            totals.cuts += 1
        elif dice < 0.98:
            request = self.random.choice((b"EVALSHA", b"XREADGROUP", b"EVALSHA", b"HMGET"))
            self.proxy.lose_reply(request)
            self.note("lose reply", request=request.decode())
        else:
            self.note("delay")
            self.proxy.delay_s = self.random.choice((0.0, 0.02, 0.1))

    def _calm(self) -> None:
        self.proxy.delay_s = 0
        for pid in self.stopped:
            self._signal(pid, signal.SIGCONT)
        self.stopped.clear()

    def _signal(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.note("already gone", pid=pid)

    def _watch(self) -> None:
        """Log progress as the run's counters show it, so that the time from a kill to the next commit can be told."""
        settled = -1
        while self._watching:
            try:
                with connect(self.server.url, blocking=True, socket_timeout_s=1) as client:
                    while self._watching:
                        values = [
                            client.hmget(self.keys.run(run), "ready", "succeeded", "failed", "published_files")
                            for run in self.specs
                        ]
                        now = sum(int(value or 0) for value in values for value in value)
                        if now != settled:
                            settled = now
                            self.commits.append(time.time())
                            self.note("progress", counters=[[int(v or 0) for v in value] for value in values])
                        time.sleep(0.02)
            except RedisError:
                time.sleep(0.05)

    def settle(self, totals: Totals) -> bool:
        """Check what came of the round; True if nothing is amiss."""
        self._calm()
        self._watching = False
        self._watcher.join()
        clean = True
        registry = Registry(self.direct, self.keys)
        for run, corpus in self.corpora.items():
            state: RunState = registry.state(run)
            found: Account = account(self.folder / run, corpus, state)
            if state.status is not RunStatus.COMPLETED:
                found.problems.append(f"the run is {state.status}: {state.error}")
            clean = clean and not found.problems
            totals.problems += [f"{self.folder.name}, {run}: {problem}" for problem in found.problems]
            totals.documents += len(corpus.ids)
            totals.rows += found.rows
            totals.errors += found.errors
            totals.unexpected_errors += max(0, found.errors - 8)
            totals.skipped += state.counters.skipped
            totals.lost += len(found.lost)
            totals.doubled += len(found.doubled)
            # Every document is read by the tokenizers and, where it has a vector, by the embedders, at least once.
            totals.deliveries += len(corpus.ids) + found.rows
        totals.recoveries += recovery_times(self.kills, self.commits)
        totals.lost_replies += self.proxy.lost
        totals.rounds += 1
        return clean

    def close(self) -> None:
        self._watching = False
        self.crew.close()
        for process in self.producers.values():
            process.kill()
            process.join()
        self.proxy.__exit__(None, None, None)
        self.direct.close()
        self.server.close()
        self.history.close()


def recovery_times(kills: list[float], commits: list[float]) -> list[float]:
    """Seconds from each kill to the next commit; kills after the last commit had nothing to recover."""
    times = []
    for kill in kills:
        later = next((at for at in commits if at > kill), None)
        if later is not None:
            times.append(later - kill)
    return times


def report(totals: Totals, *, seed: int, engine: str, minutes: float, redis: str) -> str:
    """docs/reliability.md."""
    recoveries = sorted(totals.recoveries) or [0.0]
    rows = {
        "Duration": f"{minutes:.1f} minutes, {totals.rounds} rounds, seeds {seed} to {seed + totals.rounds - 1}",
        "Processes killed (SIGKILL)": f"{totals.process_kills:,}",
        "Processes stopped and continued": f"{totals.stops:,}",
        "Servers killed": f"{totals.server_kills:,}",
        "Connections cut or half-closed (times, all at once)": f"{totals.cuts:,}",
        "Replies lost": f"{totals.lost_replies:,}",
        "Documents sent": f"{totals.documents:,}",
        "Rows": f"{totals.rows:,}",
        "Error rows": f"{totals.errors:,} (unexpected: {totals.unexpected_errors:,})",
        "Deliveries, at least": f"{totals.deliveries:,}",
        "**Lost**": f"**{totals.lost}**",
        "**Doubled**": f"**{totals.doubled}**",
        "Other findings": str(len(totals.problems)),
        "Recovery, kill to next commit: median": f"{statistics.median(recoveries):.2f} s (lease {LEASE_S:.0f} s)",
        "Recovery: 95th percentile": f"{recoveries[int(0.95 * (len(recoveries) - 1))]:.2f} s",
        "Engine": engine,
        "Machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, {redis}",
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=4000, help="documents per run; two runs a round")
    parser.add_argument("--engine", choices=("native", "null"), default="native", help="native: a real small model")
    parser.add_argument("--report", type=Path, help="page whose table of figures is replaced")
    arguments = parser.parse_args()
    totals = Totals()
    started = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="embedq-chaos-"))
    checkpoint = generate_checkpoint(base / "model", hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16)
    seed = arguments.seed
    while time.monotonic() - started < arguments.minutes * 60:
        folder = base / f"seed-{seed}"
        folder.mkdir()
        current = Round(seed, KINDS[seed % 2], folder, checkpoint, arguments.engine, arguments.documents)
        try:
            current.run(totals)
            clean = current.settle(totals)
        finally:
            current.close()
        took = (time.monotonic() - started) / 60
        print(
            f"{took:5.1f} min  seed {seed} {'ok' if clean else 'FINDINGS in ' + str(folder)}: "
            f"{totals.process_kills} kills, {totals.server_kills} server kills, {totals.cuts} cuts, "
            f"{totals.rows:,} rows, lost {totals.lost}, "
            f"doubled {totals.doubled}, unexpected errors {totals.unexpected_errors}, "
            f"recovery {statistics.median(totals.recoveries or [0]):.2f} s",
            flush=True,
        )
        for problem in totals.problems[-4:] if not clean else ():
            print("   ", problem, flush=True)
        stall = max((later - at for at, later in itertools.pairwise(current.commits)), default=0.0)
        if stall > STALL_S:
            print(f"    nothing was committed for {stall:.0f} s; see {folder}", flush=True)
        elif clean:
            shutil.rmtree(folder)
        seed += 1
    if arguments.report:
        minutes = (time.monotonic() - started) / 60
        table = report(totals, seed=arguments.seed, engine=arguments.engine, minutes=minutes, redis="Valkey and Redis")
        page = arguments.report.read_text()
        head, _, rest = page.partition("<!-- figures -->\n")
        tail = rest.partition("<!-- /figures -->")[2]
        arguments.report.write_text(f"{head}<!-- figures -->\n| | |\n|---|---|\n{table}\n<!-- /figures -->{tail}")
    if not totals.problems:
        shutil.rmtree(base)
    return 1 if totals.problems or totals.lost or totals.doubled else 0


if __name__ == "__main__":
    sys.exit(main())
