"""Real servers for tests: start one, kill it, start it again on the same data, stop it.

Used by the fixtures in conftest.py, and by tests that need a server of their own to mistreat.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis
from embedq_broker import guard
from embedq_broker.connect import connect
from embedq_broker.embedded import find_server_binary

Kind = Literal["valkey", "redis"]
KINDS: tuple[Kind, ...] = ("valkey", "redis")
START_TIMEOUT_S = 30.0


class ServerMissingError(Exception):
    """No server program of this kind is installed; the message says which was looked for."""


def server_binary(kind: Kind) -> Path:
    """Return the program to run: the bundled valkey-server, or the redis-server on PATH."""
    if kind == "redis":
        found = shutil.which("redis-server")
        if found is None:
            raise ServerMissingError("redis-server is not on PATH")
        return Path(found)
    binary = find_server_binary()
    if binary.name != "valkey-server":
        raise ServerMissingError("no valkey-server is installed")
    return binary


def free_port() -> int:
    """Return a TCP port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A server with an append-only file in a temporary directory, on a unix socket or (`tcp`) a free port.

    `args` are further command line settings, e.g. `("--maxmemory", "64mb")`; they may be replaced between restarts.
    It ends with the test process even when that is killed.
    """

    def __init__(self, kind: Kind = "valkey", *, args: tuple[str, ...] = (), tcp: bool = False) -> None:
        self.kind = kind
        self.args = args
        self.binary = server_binary(kind)
        self.directory = Path(tempfile.mkdtemp(prefix="embedq-test-"))
        self.log_file = self.directory / "server.log"
        self.port = free_port() if tcp else 0
        self._socket = self.directory / "server.sock"
        self._guard: subprocess.Popen[bytes] | None = None
        self.pid = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self._socket}"

    @property
    def alive(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def client(self) -> redis.Redis:
        """Return a new client; the caller closes it."""
        return connect(self.url, role="test")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start and wait until commands are answered. Data written before a `kill` or `stop` is back."""
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self._socket)]
        settings += ["--dir", str(self.directory), "--logfile", str(self.log_file), "--save", ""]
        settings += ["--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]
        unlocked = os.open(os.devnull, os.O_RDONLY)
        guarded = [sys.executable, "-S", "-E", guard.__file__, str(os.getpid()), "10", "", str(unlocked)]
        try:
            self._guard = subprocess.Popen(
                [*guarded, str(self.binary), *settings, *self.args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(unlocked,),
                start_new_session=True,
            )
        finally:
            os.close(unlocked)
        assert self._guard.stdout is not None
        with self._guard.stdout as report:
            self.pid = int(report.readline() or 0)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with connect(self.url, role="test", blocking=True) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.AuthenticationError:
                    return  # it answers, and `args` gave it a password
                except redis.RedisError:
                    if not self.alive or time.monotonic() > deadline:
                        log = self.log_file.read_text() if self.log_file.exists() else "(no log)"
                        raise RuntimeError(f"{self.binary} did not start:\n{log[-2000:]}") from None
                    time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL the server and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        self._join()

    def stop(self) -> None:
        """Shut it down in good order, as SIGTERM does."""
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)
        self._join()

    def restart(self, *, args: tuple[str, ...] | None = None) -> None:
        """Stop if running, then start on the same data, with other settings if given."""
        self.stop()
        if args is not None:
            self.args = args
        self.start()

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its directory."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _join(self) -> None:
        if self._guard is None:
            return
        try:
            self._guard.wait(20)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self._guard.wait(20)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
