"""A whole pipeline in small: real processes under a supervisor, a real server, a real dataset, short leases."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from accounting import Account, Corpus, account
from crew import Crew
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.blocks import ReadOptions
from embedq_producer.feed import feed
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.names import LANES
from embedq_schemas.run import Durability, ParquetSink, RunSpec, RunState, RunStatus
from embedq_worker import supervisor as supervision
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings

EMBEDQ = str(Path(sys.executable).with_name("embedq"))
FAULT_VARIABLES = ("EMBEDQ_FAULTS", "EMBEDQ_FAULTS_ONCE", "EMBEDQ_FAULTS_SEED", "EMBEDQ_FAULTS_LOG")


class Pipeline:
    """One run on one server, with a worker whose processes a test may mistreat. Closed by the fixture `pipeline`."""

    def __init__(self, url: str, folder: Path, checkpoint: Path, corpus: Corpus) -> None:
        self.folder = folder
        self.corpus = corpus
        self.output = folder / "out"
        self.broker = BrokerSettings(redis_url=url, queue="chaos", lease_s=1.0)
        self.worker = WorkerSettings(
            model=str(checkpoint),
            output_roots=(folder,),
            tokenizer_backend="huggingface",
            flush_interval_s=0.2,
            grace_s=5,
            storage_patience_s=20,
        )
        self.engine = EngineSettings(kind="null", max_batch_tokens=256)
        self.encoding = EncodingOptions(max_length=64, on_long=OnLong.ERROR)
        self.durability = Durability.PROCESS
        self.client = connect(url, role="test")
        self.keys = Keys(self.broker.queue)
        self.registry = Registry(self.client, self.keys)
        self.crews: list[Crew] = []
        self.log_file = folder / "workers.log"
        self.marks = folder / "marks"
        self.marks.mkdir()
        #: Variables for the workers.
        self.environment: dict[str, str] = {}

    def spec(self) -> RunSpec:
        return RunSpec(
            run="run",
            queue=self.broker.queue,
            encoding=self.encoding,
            sink=ParquetSink(path=str(self.output), file_bytes=1 << 16),
            durability=self.durability,
            created_at=time.time(),
        )

    def create(self) -> RunSpec:
        return self.registry.create(self.spec())

    def produce(self, spec: RunSpec | None = None) -> None:
        """Send the corpus, in jobs of a few documents; as a run that exists, or as a new one."""
        feed(self.registry, spec or self.create(), self.corpus.path, ReadOptions(block_documents=8), self.broker)

    def start(
        self,
        *,
        tokenizers: int = 1,
        embedders: int = 1,
        faults: str = "",
        once: bool = True,
        url: str | None = None,
        gives_back: bool = True,
    ) -> Crew:
        """Start workers. `faults` reach them only; with `once` each fires once over all processes."""
        crew = Crew(
            self.broker.model_copy(update={"redis_url": url}) if url else self.broker,
            self.worker,
            self.engine,
            tokenizers=tokenizers,
            embedders=embedders,
            fault_text=faults,
            marks=self.marks if once else None,
            log_file=self.log_file,
            gives_back=gives_back,
            environment=self.environment,
        )
        self.crews.append(crew)
        return crew

    def log(self) -> str:
        """What the workers said."""
        return self.log_file.read_text() if self.log_file.exists() else ""

    def poll(self) -> None:
        for crew in self.crews:
            crew.tend()

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
        """Keep the workers running until `condition`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:.0f} s: {self.tell()}"
            self.poll()
            time.sleep(0.05)

    def fired(self, faults: str) -> bool:
        """Whether every fault of `faults` has fired."""
        return len(list(self.marks.iterdir())) >= len(faults.split(","))

    def finish(self, timeout_s: float = 45) -> RunState:
        """Wait for the run's end."""
        self.until(lambda: self.registry.state("run").status.terminal, "the end of the run", timeout_s)
        return self.registry.state("run")

    def killed_once_at_each(self, points: Sequence[str]) -> Account:
        """The account of a run whose workers were killed once at each of these steps."""
        faults = ",".join(f"{point}:kill" for point in points)
        # Innocent jobs get delivered as often as processes are killed here.
        self.broker = self.broker.model_copy(update={"max_deliveries": 50})
        self.produce()
        self.start(faults=faults)
        found = self.check(self.finish(120))
        # A kill after the last step may come after the run's end was seen.
        self.until(lambda: self.fired(faults), "passing every step")
        return found

    def check(self, state: RunState | None = None) -> Account:
        """Assert that the run is complete and that nothing is lost, doubled or miscounted."""
        state = state or self.finish()
        assert state.status is RunStatus.COMPLETED, (state.status, state.error)
        found = account(self.output, self.corpus, state)
        assert not found.problems, found.problems
        assert (self.output / "_SUCCESS").exists()
        assert not list((self.output / "_staging").iterdir())
        assert self.registry.backlog_bytes() == 0
        return found

    def tell(self) -> str:
        """What is known, for the message of a failed assertion."""
        with contextlib.suppress(Exception):
            streams = [key for lane in LANES for key in (self.keys.jobs(lane), self.keys.batches(lane))]
            lengths = {stream: self.client.xlen(stream) for stream in streams}
            return f"{self.log()[-3000:]}\n{self.registry.state('run')}, {lengths}, {os.listdir(self.marks)}"
        return "the server does not answer"

    def close(self) -> None:
        for crew in self.crews:
            crew.close()
        self.client.close()


@contextlib.contextmanager
def armed(faults: str, marks: Path | None = None) -> Iterator[None]:
    """Processes started inside the block, and those that these start again, pass armed fault points."""
    if not faults:
        yield
        return
    before = {name: os.environ.get(name) for name in FAULT_VARIABLES}
    os.environ["EMBEDQ_FAULTS"] = faults
    if marks is not None:
        os.environ["EMBEDQ_FAULTS_ONCE"] = str(marks)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ended processes again at once: the tests wait for restarts, not for backoff."""
    monkeypatch.setattr(supervision, "_BACKOFF_FIRST_S", 0.05)
    monkeypatch.setattr(supervision, "_BACKOFF_MOST_S", 0.1)
