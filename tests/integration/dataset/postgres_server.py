"""A real PostgreSQL with pgvector for tests: on a socket of its own, as a user without rights, gone with the test."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from embedq_broker import guard

_NOBODY = 65534
_START_TIMEOUT_S = 30.0


class PostgresMissingError(Exception):
    """No PostgreSQL with the pgvector extension is installed."""


def installation() -> Path:
    """The directory above `bin` of a PostgreSQL with the extension `vector`: the package pgserver's, or a system's."""
    candidates = list(Path("/usr/lib/postgresql").glob("*"))
    package = importlib.util.find_spec("pgserver")
    if package is not None and package.origin is not None:
        candidates.insert(0, Path(package.origin).parent / "pginstall")
    for root in candidates:
        shares = [root / "share/postgresql", Path("/usr/share/postgresql") / root.name]
        if (root / "bin/initdb").exists() and any((share / "extension/vector.control").exists() for share in shares):
            return root
    raise PostgresMissingError("no PostgreSQL with pgvector: neither the package pgserver nor a system-wide one")


class PostgresServer:
    """Runs inside its `with` block; `url` names its database `postgres`."""

    def __init__(self) -> None:
        self._root = installation()
        self._guard: subprocess.Popen[bytes] | None = None
        # Not below pytest's temporary directory: only its owner may enter that.
        self._folder = Path(tempfile.mkdtemp(prefix="embedq-postgres-"))
        self.url = f"postgresql://tester@/postgres?host={self._folder}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop it and remove its directory."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        root = self._root
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root, and its programs may lie where nobody else can go.
            root = self._copied(root)
            os.chown(self._folder, _NOBODY, _NOBODY)
        data = self._folder / "data"
        options = ["--auth=trust", "--username=tester", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run([str(root / "bin/initdb"), "-D", str(data), *options])
        settings = ["-k", str(self._folder), "-h", "", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
        # Whatever ends the test process ends the server: the guard sees to it.
        quiet = os.open(self._folder / "server.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        guarded = [sys.executable, "-S", "-E", guard.__file__, str(os.getpid()), "10", "", str(quiet)]
        self._guard = subprocess.Popen(
            [*guarded, *_as_nobody([str(root / "bin/postgres"), "-D", str(data), *settings])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=quiet,
            pass_fds=(quiet,),
            start_new_session=True,
            cwd=self._folder,
        )
        os.close(quiet)
        self._wait()

    def _copied(self, root: Path) -> Path:
        if root.is_relative_to("/usr"):
            return root
        # The programs of a wheel find their libraries beside its package.
        packages = self._folder / "packages"
        for part in (root, *root.parents[1].glob("pgserver.libs")):
            shutil.copytree(part, packages / part.relative_to(root.parents[1]), symlinks=True)
        return packages / root.relative_to(root.parents[1])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(_as_nobody(command), cwd=self._folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def _wait(self) -> None:
        import psycopg

        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError as error:
                if self._guard is None or self._guard.poll() is not None or time.monotonic() > deadline:
                    log = (self._folder / "server.log").read_text()
                    raise RuntimeError(f"PostgreSQL did not start: {error}\n{log[-2000:]}") from None
                time.sleep(0.02)


def _as_nobody(command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "setpriv, of util-linux, is needed to run a server as another user than root"
    return [setpriv, f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", *command]
