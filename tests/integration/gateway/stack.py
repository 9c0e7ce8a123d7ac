"""A real gateway over a real server and a real worker: processes that a test may freeze, kill and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import waiting
from servers import Kind, Server

START_S = 60.0
HANG_S = 120.0


class Program:
    """One `embedq` command, whose output goes to a file."""

    def __init__(self, log: Path, *arguments: object, **variables: str) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDQ_")}
        environment = ours | {"EMBEDQ_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "embedq", *map(str, arguments)],
                stdout=file,
                stderr=file,
                cwd=log.parent,
                env=environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL it and every process it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then wait for its end."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP it and every process it started, for the length of the block."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")


class Caller:
    """Requests to the gateway at `url`."""

    url: str
    model: Path

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **arguments)

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **arguments)

    def delete(self, path: str) -> httpx.Response:
        return httpx.delete(self.url + path, timeout=30)

    def embed(self, inputs: Any, **fields: Any) -> dict[str, Any]:
        """Body of a successful answer of /v1/embeddings."""
        answer = self.post("/v1/embeddings", json={"input": inputs, "model": self.model.name, **fields})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def refused(self, status: int, path: str = "/v1/embeddings", **arguments: Any) -> dict[str, Any]:
        """The `error` of an answer that must have `status`."""
        return error_of(self.post(path, **arguments), status)


class Gateway(Caller):
    """One `embedq serve` on a free port."""

    def __init__(self, stack: Stack, data: Path, *options: object, **variables: str) -> None:
        self.model = stack.model
        self.data = data
        log = stack.folder / f"gateway-{len(stack.gateways)}.log"
        self.program = Program(
            log,
            *("serve", "--redis", stack.server.url, "--port", "0", "--data-dir", data, "--lease-s", "2"),
            *options,
            **variables,
        )
        stack.gateways.append(self)
        self.url = listening(self.program)

    def wait_ready(self) -> None:
        wait_until(lambda: self.get("/ready").status_code == 200, f"{self.url} is ready", START_S)


class Stack(Caller):
    """A server, a worker, and one or more gateways. Calls go to the gateway that was started last by `restart`."""

    def __init__(self, folder: Path, model: Path, *options: object, kind: Kind = "valkey", worker: bool = True) -> None:
        """`options` are flags of `embedq serve`; without `worker` a test starts one itself."""
        self.folder = folder
        self.model = model
        self.data = folder / "data"
        self.gateways: list[Gateway] = []
        self.server = Server(kind)
        self.worker: Program
        self.gateway: Gateway
        self._with_worker = worker
        self._options = options

    def __enter__(self) -> Self:
        self.server.start()
        try:
            if self._with_worker:
                self.start_worker()
            self.start_gateway()
            if self._with_worker:
                self.gateway.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.program.kill()
        if hasattr(self, "worker"):
            self.worker.kill()
        self.server.close()

    def start_worker(self, *options: object) -> None:
        self.worker = Program(
            self.folder / "worker.log",
            *("worker", "--redis", self.server.url, "--model", self.model, "--device", "cpu", "--lease-s", "2"),
            *options,
        )

    def start_gateway(self) -> None:
        """Start the gateway that this stack's own calls go to."""
        self.gateway = Gateway(self, self.data, *self._options)
        self.url = self.gateway.url

    def restart_gateway(self) -> None:
        """SIGKILL the gateway and start another on the same data."""
        self.gateway.program.kill()
        self.start_gateway()

    @contextmanager
    def another(self, *options: object, data: Path | None = None, **variables: str) -> Iterator[Gateway]:
        """A further gateway, with flags and perhaps a data directory of its own, for the length of the block."""
        gateway = Gateway(self, data or self.data, *options, **variables)
        gateway.wait_ready()
        try:
            yield gateway
        finally:
            gateway.program.kill()


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The `error` of an answer, whose shape is checked."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text[:500]}"
    body = json.loads(answer.content)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def listening(gateway: Program) -> str:
    """The URL that the gateway says it listens on."""

    def found() -> str:
        assert gateway.process.poll() is None, gateway.text()
        lines = [line for line in gateway.text().splitlines() if line.startswith("listening on ")]
        return lines[0].removeprefix("listening on ") if lines else ""

    url: str = wait_until(found, "the gateway listens", START_S)
    return url


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = HANG_S) -> Any:
    """As `waiting.wait_until`; a gateway that does not answer yet is waited for."""

    def answered() -> Any:
        try:
            return condition()
        except httpx.TransportError:
            return None

    return waiting.wait_until(answered, what, timeout_s)
