"""A crew of tokenizer and embedder processes that start in milliseconds, so that a test can afford to kill many.

The processes run the same functions as those of a supervisor; they are forked from a server that has imported
everything. What a supervisor does after a death (giving the leases back) is done here too, or left out on purpose.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embedq_broker import faults
from embedq_broker.connect import connect, translate
from embedq_broker.consume import Stage, release_consumer
from embedq_broker.keys import Keys
from embedq_broker.liveness import bury
from embedq_broker.settings import BrokerSettings
from embedq_schemas.errors import EmbedqError
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import ProcessConfig, WorkerSettings
from redis.exceptions import RedisError

Role = Literal["tokenizer", "embedder"]
_PRELOAD = [
    "crew",
    "embedq_worker.tokenizer_process",
    "embedq_worker.embedder_process",
    "embedq_worker.engine.native",
    "torch",
    "tokenizers",
]


def fork_server() -> Any:
    """The multiprocessing context whose processes have everything imported."""
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def work(
    config_json: str, fault_text: str, seed: int, marks: str | None, log_file: str | None, environment: dict[str, str]
) -> None:
    """Body of a crew process."""
    os.environ.update(environment)
    config = ProcessConfig.model_validate_json(config_json)
    if log_file:
        os.dup2(os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    logging.basicConfig(level=config.log_level, format=f"%(asctime)s {config.consumer} %(levelname)s %(message)s")
    faults.arm(fault_text or None, seed=seed, once=marks)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    status = 0
    try:
        if config.role == "tokenizer":
            from embedq_worker.tokenizer_process import run_tokenizer as run
        else:
            from embedq_worker.embedder_process import run_embedder as run
        run(config, stop, lambda: None)
    except (EmbedqError, RedisError) as error:
        logging.error("%s", translate(error) if isinstance(error, RedisError) else error)
        status = 5
    except BaseException:
        logging.exception("ended")
        status = 1
    logging.shutdown()
    os._exit(status)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@dataclass
class Member:
    """One place in the crew, and the process that holds it now."""

    role: Role
    consumer: str = ""
    process: Any = None
    started: int = 0


class Crew:
    """Processes that are started again as soon as they end, when `tend` is called."""

    def __init__(
        self,
        broker: BrokerSettings,
        worker: WorkerSettings,
        engine: EngineSettings,
        *,
        tokenizers: int = 1,
        embedders: int = 1,
        fault_text: str = "",
        marks: Path | None = None,
        log_file: Path | None = None,
        gives_back: bool = True,
        seed: int = 0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._broker, self._worker, self._engine = broker, worker, engine
        self._fault_text, self._marks, self._log_file, self._seed = fault_text, marks, log_file, seed
        self._gives_back = gives_back
        #: The server that processes are forked from may be older than the variables of a test.
        self._environment = environment or {}
        self._context = fork_server()
        self.members = [Member("tokenizer") for _ in range(tokenizers)] + [Member("embedder") for _ in range(embedders)]
        self.deaths: list[tuple[float, Role, int]] = []
        self.tend()

    def tend(self) -> None:
        """Start what does not run."""
        for member in self.members:
            if member.process is not None and not member.process.is_alive():
                member.process.join()
                self.deaths.append((time.time(), member.role, member.process.exitcode))
                member.process = None
                if self._gives_back:
                    self._give_back(member)
            if member.process is None:
                self._start(member)

    def pids(self, role: Role | None = None) -> list[int]:
        return [m.process.pid for m in self.members if m.process is not None and role in (None, m.role)]

    def signal(self, number: int, role: Role | None = None) -> None:
        for pid in self.pids(role):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End every process, now."""
        for member in self.members:
            if member.process is not None:
                member.process.kill()
                member.process.join()
                member.process = None

    def _start(self, member: Member) -> None:
        member.consumer = f"{member.role}-{uuid.uuid4().hex[:8]}"
        member.started += 1
        config = ProcessConfig(
            role=member.role,
            consumer=member.consumer,
            broker=self._broker,
            worker=self._worker,
            engine=self._engine,
            log_level="WARNING",
        )
        log_file = str(self._log_file) if self._log_file else None
        marks = str(self._marks) if self._marks else None
        seed = self._seed * 1_000_003 + len(self.deaths)
        member.process = self._context.Process(
            target=work,
            args=(config.model_dump_json(), self._fault_text, seed, marks, log_file, self._environment),
            daemon=True,
        )
        member.process.start()

    def _give_back(self, member: Member) -> None:
        stage = Stage.TOKENIZE if member.role == "tokenizer" else Stage.EMBED
        keys = Keys(self._broker.queue)
        with contextlib.suppress(RedisError), connect(self._broker.redis_url, blocking=True, socket_timeout_s=2) as c:
            release_consumer(c, keys, stage, member.consumer, lease_ms=self._broker.lease_ms)
            bury(c, keys, member.consumer)
