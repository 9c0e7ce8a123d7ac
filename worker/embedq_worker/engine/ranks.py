"""The other ranks of a tensor-parallel model: started, fed and ended by rank 0.

Rank 0 sends each batch down every rank's standard input and then computes its own share; ranks meet only inside the
forward pass. So an idle group holds no pending collective, a rank that loses rank 0 reads end of file and exits, and
rank 0 sees a lost rank at once: by its exit, or by its closed connection in the middle of a sum.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from embedq_schemas.errors import EngineError, ModelError

from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.group import Ranks
from embedq_worker.engine.settings import EngineSettings

_START_TIMEOUT = 600.0


@dataclass(frozen=True)
class RankJob:
    """All a rank needs to load its share; JSON on its command line. `folder` holds config.json and the weights."""

    folder: str
    causal: bool
    last_only: bool
    max_length: int
    rank: int
    size: int
    port: int
    device: str
    dtype: str
    threads: int
    settings: dict[str, Any]


class RankProcesses:
    """Ranks 1 to size - 1 of one model. Raises ModelError where the group does not form."""

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        *,
        causal: bool,
        last_only: bool,
        max_length: int,
        size: int,
        device: torch.device,
        dtype: str,
        threads: int,
    ) -> None:
        from torch._C._distributed_c10d import TCPStore

        # Port 0: the system picks a free one, so groups on one machine never collide.
        self._store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._group: Ranks | None = None
        self._ended = ""
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[deque[str]] = []
        for rank in range(1, size):
            name = f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else "cpu"
            job = RankJob(
                str(folder), causal, last_only, max_length, rank, size, self._store.port, name, dtype, threads,
                settings.model_dump(),
            )  # fmt: skip
            self._start(job)
        try:
            self._group = Ranks(self._store, 0, size, device)
        except RuntimeError as error:
            self.close()
            raise ModelError(f"the tensor-parallel group did not form: {self._reason() or error}") from None

    @property
    def group(self) -> Ranks:
        """Rank 0's end of the group."""
        assert self._group is not None, "the group forms in the constructor"
        return self._group

    def _reason(self) -> str:
        """The first rank's last words, if any rank said something."""
        return next((log[-1] for log in self._logs if log), self._ended)

    def _start(self, job: RankJob) -> None:
        command = [sys.executable, "-m", "embedq_worker.engine.rank", json.dumps(job.__dict__)]
        # This interpreter, this package, and arguments made here.
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        log: deque[str] = deque(maxlen=20)
        self._processes.append(process)
        self._logs.append(log)
        assert process.stderr is not None
        threading.Thread(target=_drain, args=(process.stderr, log), daemon=True, name=f"rank-{job.rank}-log").start()
        threading.Thread(target=self._watch, args=(job.rank,), daemon=True, name=f"rank-{job.rank}-watch").start()

    def _watch(self, rank: int) -> None:
        status = self._processes[rank - 1].wait()
        if not self._closing:
            self._ended = self._ended or f"rank {rank} ended with status {status}"
            # Rank 0 may be waiting for this rank inside a sum that nobody will complete.
            self._abort()

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def wait_ready(self) -> None:
        """Block until every rank has loaded its share. Raises ModelError with a rank's own reason."""
        deadline = time.monotonic() + _START_TIMEOUT
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            line = process.stdout.readline()
            if line.strip() != b"ready":
                self.close()
                reason = self._logs[rank - 1][-1] if self._logs[rank - 1] else "it gave no reason"
                raise ModelError(f"rank {rank} of the tensor-parallel group could not load its share: {reason}")
            if time.monotonic() > deadline:
                self.close()
                raise ModelError(f"the tensor-parallel group was not ready within {_START_TIMEOUT:.0f} s")

    def send(self, batch: PackedBatch) -> None:
        """Give every rank the batch. Raises EngineError where one is gone."""
        if self._ended:
            raise EngineError(f"the tensor-parallel group has ended: {self._ended}; restart the worker")
        header = len(batch.cu_seqlens).to_bytes(8, "little") + len(batch.input_ids).to_bytes(8, "little")
        payload = header + batch.cu_seqlens.astype("<i4").tobytes() + batch.input_ids.astype("<u4").tobytes()
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(payload)
                process.stdin.flush()
        except OSError as error:
            self.fail(f"a rank does not read: {error}")
            raise EngineError(f"the tensor-parallel group has ended: {self._ended}") from error

    def fail(self, reason: str) -> str:
        """End the whole group after an error; returns the first reason known."""
        # The watcher names the rank that died; give it a moment before settling for the symptom.
        for _ in range(20):
            if self._ended:
                break
            time.sleep(0.05)
        self._ended = self._ended or reason
        self.close()
        return self._ended

    def close(self) -> None:
        self._closing = True
        for process in self._processes:
            with suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._abort()


def _drain(stream: IO[bytes], log: deque[str]) -> None:
    for line in stream:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            log.append(text)
