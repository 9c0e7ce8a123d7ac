"""The supervisor: starts a worker's processes, watches them, starts them again, and drains them.

A process that dies gives its leases back at once, through the supervisor, instead of after the lease time.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from embedq_broker import metrics
from embedq_broker.connect import connect
from embedq_broker.consume import Stage, release_consumer
from embedq_broker.keys import Keys
from embedq_broker.liveness import bury
from embedq_broker.settings import BrokerSettings
from embedq_schemas.errors import EmbedqError, UsageError
from redis.exceptions import RedisError

from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import ProcessConfig, WorkerSettings

log = logging.getLogger(__name__)

Role = Literal["tokenizer", "embedder"]

_BACKOFF_FIRST_S = 0.5
_BACKOFF_MOST_S = 15.0
_STEADY_S = 60.0
"""A process that lived this long starts again without waiting."""
_STARTS_WITHOUT_READY = 3
"""A process that never got ready this many times in a row will not; the worker ends and says why."""


class ProcessEndedError(EmbedqError):
    """A worker process ends again and again before it gets ready."""

    code = "process_ended"
    exit_code = 5


@dataclass(frozen=True)
class Slot:
    """One process that should be running."""

    role: Role
    index: int
    engine: EngineSettings


@dataclass
class _Child:
    slot: Slot
    consumer: str
    process: subprocess.Popen[str]
    started: float
    ready: bool = False
    failure: dict[str, object] | None = None


@dataclass
class _SlotState:
    slot: Slot
    child: _Child | None = None
    crashes: int = 0
    unready: int = 0
    start_at: float = field(default_factory=time.monotonic)


def plan_slots(*, tokenizers: int, embedders: int, gpus: Sequence[int], engine: EngineSettings) -> tuple[Slot, ...]:
    """The processes of one worker: replicas on each GPU, or one tensor-parallel group over all of them.

    Raises:
        UsageError: the GPUs do not divide into tensor-parallel groups.
    """
    slots = [Slot("tokenizer", index, engine) for index in range(tokenizers)]
    if not gpus:
        return (*slots, *(Slot("embedder", index, engine) for index in range(embedders)))
    degree = engine.tensor_parallel
    size = len(gpus) if degree == "auto" else int(degree)
    if len(gpus) % size:
        raise UsageError(f"{len(gpus)} GPUs do not divide into tensor-parallel groups of {size}")
    for index, start in enumerate(range(0, len(gpus), size)):
        slots.append(Slot("embedder", index, engine.model_copy(update={"device": f"cuda:{gpus[start]}"})))
    return tuple(slots)


class Supervisor:
    """Runs the processes of `slots`. For one thread; call `poll` a few times a second."""

    def __init__(
        self,
        slots: Sequence[Slot],
        broker: BrokerSettings,
        worker: WorkerSettings,
        *,
        ends_on_infrastructure: bool = False,
        log_level: str = "INFO",
        log_file: int | None = None,
        metrics_folder: Path | None = None,
    ) -> None:
        """
        Args:
            ends_on_infrastructure: a process that ends because of Redis or a disk ends the worker, instead of being
                started again: right where somebody waits for the outcome.
            log_file: descriptor that takes the processes' log lines; None: standard error.
            metrics_folder: where the processes write their counts; None: nowhere.
        """
        self._slots = [_SlotState(slot) for slot in slots]
        self._broker = broker
        self._worker = worker
        self._ends_on_infrastructure = ends_on_infrastructure
        self._log_level = log_level
        self._log_file = log_file
        self._metrics_folder = metrics_folder
        self._keys = Keys(broker.queue)
        self.restarts = 0

    @property
    def ready(self) -> bool:
        """Every process is up."""
        return all(state.child is not None and state.child.ready for state in self._slots)

    def pids(self, role: Role) -> list[int]:
        """Process ids of the living processes of `role`."""
        return [s.child.process.pid for s in self._slots if s.child is not None and s.slot.role == role]

    def poll(self) -> None:
        """Start what should run and does not; raises the EmbedqError that makes going on pointless."""
        for state in self._slots:
            child = state.child
            if child is not None and (status := child.process.poll()) is not None:
                state.child = None
                self._bury(child)
                self._after_end(state, child, status)
            if state.child is None and time.monotonic() >= state.start_at:
                state.child = self._start(state.slot)

    def drain(self) -> None:
        """Let every process finish and commit, within the grace period; then end what is left."""
        children = [state.child for state in self._slots if state.child is not None]
        for child in children:
            child.process.terminate()
        deadline = time.monotonic() + self._worker.grace_s + 5
        for child in children:
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not finish within its grace period and is killed", child.consumer)
                child.process.kill()
                child.process.wait()
            if child.process.returncode != 0:
                self._bury(child)
        for state in self._slots:
            state.child = None

    def kill(self) -> None:
        """End every process now: there is no server to drain to."""
        for state in self._slots:
            if state.child is not None:
                state.child.process.kill()
                state.child.process.wait()
                state.child = None

    def _start(self, slot: Slot) -> _Child:
        consumer = f"{socket.gethostname()}-{slot.role}-{slot.index}-{uuid.uuid4().hex[:8]}"
        config = ProcessConfig(
            role=slot.role,
            consumer=consumer,
            broker=self._broker,
            worker=self._worker,
            engine=slot.engine,
            log_level=self._log_level,
        )
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        # One that we inherited belongs to whoever started us.
        environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
        if self._metrics_folder is not None:
            environment["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_folder)
        if slot.role == "tokenizer":
            # Its one thread is the loop's; idle OpenMP pools of libraries would fight the embedder for cores.
            environment |= {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "embedq_worker.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            env=environment,
        )
        child = _Child(slot, consumer, process, time.monotonic())
        threading.Thread(target=_listen, args=(child,), daemon=True).start()
        assert process.stdin is not None
        try:
            process.stdin.write(config.model_dump_json() + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended at once; the next poll sees how
        return child

    def _after_end(self, state: _SlotState, child: _Child, status: int) -> None:
        lived_s = time.monotonic() - child.started
        error = _failure_of(child)
        if error is not None and (error.exit_code == 2 or self._ends_on_infrastructure):
            raise error
        state.unready = 0 if child.ready else state.unready + 1
        if state.unready >= _STARTS_WITHOUT_READY:
            raise error or ProcessEndedError(
                f"the {child.slot.role} process ended {state.unready} times before it was ready, "
                f"last {_describe(status)}"
            )
        state.crashes = 0 if lived_s > _STEADY_S else state.crashes + 1
        wait_s = 0.0 if state.crashes == 0 else min(_BACKOFF_FIRST_S * 2 ** (state.crashes - 1), _BACKOFF_MOST_S)
        state.start_at = time.monotonic() + wait_s
        self.restarts += 1
        metrics.restarts.labels(child.slot.role).inc()
        log.warning("%s ended %s; starting again in %.1f s", child.consumer, _describe(status), wait_s)

    def _bury(self, child: _Child) -> None:
        """Give back a dead process's leases now."""
        stage = Stage.TOKENIZE if child.slot.role == "tokenizer" else Stage.EMBED
        try:
            client = connect(self._broker.redis_url, role="supervisor", socket_timeout_s=5.0)
            try:
                release_consumer(client, self._keys, stage, child.consumer, lease_ms=self._broker.lease_ms)
                bury(client, self._keys, child.consumer)
            finally:
                client.close()
        except RedisError as error:
            log.warning("cannot release leases of %s, they run out by themselves: %s", child.consumer, error)


def _listen(child: _Child) -> None:
    """Take in a child's events until its standard output ends."""
    assert child.process.stdout is not None
    for line in child.process.stdout:
        try:
            event = json.loads(line)
        except ValueError:
            log.info("%s: %s", child.consumer, line.rstrip())
            continue
        if not isinstance(event, dict):
            continue
        if event.get("event") == "ready":
            child.ready = True
        elif event.get("event") == "failed":
            child.failure = event


def _failure_of(child: _Child) -> EmbedqError | None:
    """The error a child reported, as an exception of the same code and exit status."""
    # The event may still be on its way although the process is gone.
    deadline = time.monotonic() + 0.5
    while child.failure is None and child.process.returncode not in (0, 1) and time.monotonic() < deadline:
        if child.process.returncode < 0:
            break
        time.sleep(0.01)
    if child.failure is None:
        return None
    code, message = str(child.failure.get("code")), str(child.failure.get("message"))
    known = [*_leaves(EmbedqError)]
    kind = next((leaf for leaf in known if leaf.code == code), EmbedqError)
    return kind(message)


def _leaves(base: type[EmbedqError]) -> Sequence[type[EmbedqError]]:
    return [base, *(leaf for sub in base.__subclasses__() for leaf in _leaves(sub))]


def _describe(status: int) -> str:
    if status < 0:
        return f"by signal {signal.Signals(-status).name}"
    return f"with status {status}"
