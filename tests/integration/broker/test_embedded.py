"""The embedded server: it recovers its data, and it never outlives its owner, however either of them ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from embedq_broker.connect import connect
from embedq_broker.embedded import EmbeddedServer, find_server_binary, running_server_url
from embedq_schemas.errors import BrokerError, BrokerUnavailableError, RunConflictError, StorageError
from servers import KINDS, ServerMissingError, server_binary

KEY = "embedq:{q}:key"
OWNER = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from pathlib import Path
from embedq_broker.connect import connect
from embedq_broker.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), binary=Path(sys.argv[2]))
server.start()
connect(server.url).set("embedq:{q}:key", "kept")
if sys.argv[3] == "stop in a child":
    child = os.fork()
    if child == 0:
        server.stop()
        os._exit(0)
    os.waitpid(child, 0)
print(server.pid, server.guard_pid, server.url, flush=True)
if sys.argv[3] == "exit":
    sys.exit()
if sys.argv[3] == "fork":  # a child that holds copies of all of the owner's descriptors
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
time.sleep(600)
"""


@pytest.fixture(params=KINDS)
def binary(request: pytest.FixtureRequest) -> Path:
    try:
        return server_binary(request.param)
    except ServerMissingError as missing:
        pytest.skip(str(missing))


def ended(pid: int) -> bool:
    """Whether the process is gone; a zombie that its new parent has not collected yet counts as gone."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return not shown or shown.startswith("Z")


def assert_all_end(*pids: int) -> None:
    deadline = time.monotonic() + 25
    while not all(ended(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if not ended(pid)]}"
        time.sleep(0.02)


class Owner:
    """Another process that owns an embedded server, so that this one can mistreat it."""

    def __init__(self, state_dir: Path, binary: Path, mode: str = "wait") -> None:
        command = [sys.executable, "-c", OWNER, str(state_dir), str(binary), mode]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        self.server, self.guard, self.url = int(words[0]), int(words[1]), words[2]
        self.child = int(self.process.stdout.readline()) if mode == "fork" else None

    def close(self) -> None:
        for pid in (self.child, self.process.pid):
            if pid is not None and not ended(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def owner(tmp_path: Path, binary: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path / "state", binary)
    yield owner
    owner.close()


def value_after_restart(state_dir: Path, binary: Path) -> object:
    with EmbeddedServer(state_dir, binary=binary) as server, connect(server.url) as client:
        return client.get(KEY)


def test_a_second_start_recovers_the_data(tmp_path: Path, binary: Path) -> None:
    with EmbeddedServer(tmp_path, binary=binary) as server, connect(server.url) as client:
        client.set(KEY, "kept")
        pids = (server.pid, server.guard_pid)
    assert_all_end(*pids)
    assert value_after_restart(tmp_path, binary) == b"kept"


def test_it_is_private_durable_and_never_evicts(tmp_path: Path, binary: Path) -> None:
    with EmbeddedServer(tmp_path, binary=binary, maxmemory=64 << 20) as server, connect(server.url) as client:
        settings = client.config_get("*")
        assert settings["port"] == "0"
        assert settings["appendonly"] == "yes"
        assert settings["appendfsync"] == "everysec"
        assert settings["save"] == ""
        assert settings["maxmemory"] == str(64 << 20)
        assert settings["maxmemory-policy"] == "noeviction"
        assert (tmp_path / "server.sock").stat().st_mode & 0o077 == 0
        assert "eady to accept connections" in server.log_file.read_text()


@pytest.mark.parametrize("name", ["with space and 'quotes\"", "é-日本", "x" * 120])
def test_any_directory_name_works(tmp_path: Path, binary: Path, name: str) -> None:
    with EmbeddedServer(tmp_path / name, binary=binary) as server, connect(server.url) as client:
        client.set(KEY, "kept")
        assert running_server_url(tmp_path / name) == server.url
    assert running_server_url(tmp_path / name) is None
    assert value_after_restart(tmp_path / name, binary) == b"kept"


def test_a_socket_outside_a_long_directory_is_private_and_removed(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / ("x" * 120)) as server:
        private = Path(server.url.removeprefix("unix://")).parent
        assert tmp_path not in private.parents
        assert private.stat().st_mode & 0o777 == 0o700
    assert not private.exists()


def test_two_processes_on_one_directory_conflict_and_the_pid_is_named(owner: Owner, tmp_path: Path) -> None:
    with pytest.raises(RunConflictError, match=f"pid {owner.process.pid}"):
        EmbeddedServer(tmp_path / "state").start()
    assert running_server_url(tmp_path / "state") == owner.url
    with connect(owner.url) as client:
        assert client.get(KEY) == b"kept"


def test_an_owner_that_forgets_to_stop_leaves_nothing(tmp_path: Path, binary: Path) -> None:
    owner = Owner(tmp_path, binary, "exit")
    assert_all_end(owner.server, owner.guard)
    owner.close()
    assert value_after_restart(tmp_path, binary) == b"kept"


def test_a_killed_owner_leaves_nothing_and_a_start_at_once_recovers(owner: Owner, tmp_path: Path, binary: Path) -> None:
    os.kill(owner.process.pid, signal.SIGKILL)
    assert value_after_restart(tmp_path / "state", binary) == b"kept"
    assert_all_end(owner.server, owner.guard)


def test_a_forked_child_of_a_killed_owner_keeps_neither_server_nor_directory(tmp_path: Path, binary: Path) -> None:
    owner = Owner(tmp_path, binary, "fork")
    os.kill(owner.process.pid, signal.SIGKILL)
    assert_all_end(owner.server, owner.guard)
    assert value_after_restart(tmp_path, binary) == b"kept"
    assert owner.child is not None
    assert not ended(owner.child)
    owner.close()


def test_killed_owner_and_server_together_recover(owner: Owner, tmp_path: Path, binary: Path) -> None:
    os.kill(owner.server, signal.SIGKILL)
    os.kill(owner.process.pid, signal.SIGKILL)
    assert_all_end(owner.server, owner.guard)
    assert value_after_restart(tmp_path / "state", binary) == b"kept"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a server that its parent was killed")
@pytest.mark.parametrize("owner_too", [False, True])
def test_a_killed_guard_takes_the_server_with_it(owner: Owner, tmp_path: Path, binary: Path, owner_too: bool) -> None:
    os.kill(owner.guard, signal.SIGKILL)
    if owner_too:
        os.kill(owner.process.pid, signal.SIGKILL)
    assert_all_end(owner.server, owner.guard)
    owner.close()
    assert value_after_restart(tmp_path / "state", binary) == b"kept"


def test_ctrl_c_reaches_the_owner_alone(owner: Owner) -> None:
    os.killpg(owner.process.pid, signal.SIGINT)  # what a terminal does to its foreground process group
    owner.process.wait()
    assert_all_end(owner.server, owner.guard)
    assert "Received SIGINT" not in Path(owner.url.removeprefix("unix://")).with_name("server.log").read_text()


def test_stop_in_a_forked_child_leaves_the_owners_server_alone(tmp_path: Path, binary: Path) -> None:
    owner = Owner(tmp_path, binary, "stop in a child")
    with connect(owner.url) as client:
        assert client.get(KEY) == b"kept"
    owner.close()
    assert_all_end(owner.server, owner.guard)


def test_a_server_that_does_not_end_is_killed_and_loses_nothing(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedq_broker.embedded.GRACE_S", 0.3)
    server = EmbeddedServer(tmp_path, binary=binary)
    server.start()
    with connect(server.url) as client:
        client.set(KEY, "kept")
    os.kill(server.pid, signal.SIGSTOP)
    pid = server.pid
    server.stop()
    assert_all_end(pid)
    assert value_after_restart(tmp_path, binary) == b"kept"


def test_a_server_that_died_is_noticed(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        server.check()
        os.kill(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(BrokerUnavailableError, match="it was killed by SIGKILL"):
            server.check()


def fill(state_dir: Path, binary: Path, entries: int = 200) -> Path:
    """Write entries, and return the file that holds them."""
    with EmbeddedServer(state_dir, binary=binary) as server, connect(server.url) as client:
        for number in range(entries):
            client.set(f"embedq:{{q}}:{number}", "x" * 1000)
    (tail,) = (state_dir / "appendonlydir").glob("*.incr.aof")
    return tail


def test_a_torn_tail_costs_only_the_last_write(tmp_path: Path, binary: Path) -> None:
    tail = fill(tmp_path, binary)
    os.truncate(tail, tail.stat().st_size - 100)
    with EmbeddedServer(tmp_path, binary=binary) as server, connect(server.url) as client:
        assert client.dbsize() == 199


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, binary: Path) -> None:
    tail = fill(tmp_path, binary)
    with tail.open("r+b") as file:
        file.seek(50_000)
        file.write(b"\0" * 5_000)
    damaged = tail.read_bytes()
    with pytest.raises(BrokerError) as caught:
        EmbeddedServer(tmp_path, binary=binary).start()
    message = str(caught.value)
    assert str(tail) in message
    assert "move" in message
    assert "valkey-check-aof --fix" in message
    assert tail.read_bytes() == damaged
    assert running_server_url(tmp_path) is None


def test_a_damaged_base_or_manifest_is_reported_too(tmp_path: Path, binary: Path) -> None:
    fill(tmp_path, binary, entries=1)
    (base,) = (tmp_path / "appendonlydir").glob("*.base.rdb")
    original = base.read_bytes()
    base.write_bytes(b"NOTARDB" + original[7:])
    with pytest.raises(BrokerError, match=r"damaged.*was not loaded"):
        EmbeddedServer(tmp_path, binary=binary).start()
    base.write_bytes(original)
    (manifest,) = (tmp_path / "appendonlydir").glob("*.manifest")
    manifest.write_bytes(b"nonsense\n")
    with pytest.raises(BrokerError, match=r"damaged.*was not loaded"):
        EmbeddedServer(tmp_path, binary=binary).start()


def test_loading_is_waited_for(tmp_path: Path, binary: Path) -> None:
    with EmbeddedServer(tmp_path, binary=binary) as server, connect(server.url) as client:
        script = "for i = 1, 150000 do redis.call('SET', KEYS[1] .. i, ARGV[1]) end"
        client.eval(script, 1, "embedq:{q}:", "x" * 100)
    with EmbeddedServer(tmp_path, binary=binary) as server, connect(server.url, blocking=True) as client:
        assert client.dbsize() == 150_000


def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match="cannot be used"):
        EmbeddedServer(tmp_path / "file" / "state").start()


def test_a_program_that_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BrokerUnavailableError, match=r"cannot start /nonexistent/server"):
        EmbeddedServer(tmp_path, binary=Path("/nonexistent/server")).start()
    program = tmp_path / "broken-server"
    program.write_text("#!/bin/sh\necho '*** cannot allocate' >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(BrokerUnavailableError, match=r"status 3.*cannot allocate"):
        EmbeddedServer(tmp_path / "state", binary=program).start()


def test_without_any_server_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.1 sha=0 malloc=libc bits=64'\n")
    old.chmod(0o755)
    with pytest.raises(BrokerUnavailableError, match="install Valkey"):
        find_server_binary()
    old.write_text("#!/bin/sh\necho 'Redis server v=7.0.15 sha=0 malloc=libc bits=64'\n")
    assert find_server_binary() == old


def test_threads_of_the_owner_may_come_and_go(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        time.sleep(0.2)
        with connect(server.url) as client:
            assert client.ping()
    finally:
        server.stop()
    with pytest.raises(redis.ConnectionError):
        connect(f"unix://{tmp_path}/server.sock", blocking=True).ping()
