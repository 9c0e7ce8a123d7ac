"""Connections against real servers: passwords, access lists, retries, versions, Sentinel."""

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from embedq_broker.connect import broker_errors, check_server, connect
from embedq_schemas.errors import BrokerAuthError, BrokerOutOfMemoryError, BrokerUnavailableError
from servers import Server, free_port

StartServer = Callable[..., Server]


def test_replies_are_bytes_and_the_connection_is_named(redis_client: redis.Redis) -> None:
    redis_client.set("embedq:{q}:key", "value")
    assert redis_client.get("embedq:{q}:key") == b"value"
    names = [str(each["name"]) for each in redis_client.client_list()]
    assert any(name.startswith("embedq-test-") for name in names)


def test_a_plain_server_passes_the_check_without_warnings(redis_client: redis.Redis, redis_url: str) -> None:
    assert check_server(redis_client, redis_url) == ()
    assert redis_client.dbsize() == 0


def test_an_evicting_server_is_a_warning(start_server: StartServer) -> None:
    server = start_server(args=("--maxmemory-policy", "allkeys-lru"))
    with server.client() as client:
        (warning,) = check_server(client, server.url)
    assert "allkeys-lru" in warning


def test_a_user_limited_to_embedq_keys_passes_and_others_are_refused(start_server: StartServer) -> None:
    server = start_server(tcp=True)
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "good", "on", ">pw", "~embedq:*", "+@all", "-@dangerous")
        admin.execute_command("ACL", "SETUSER", "other", "on", ">pw", "~other:*", "+@all")
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "%R~embedq:*", "+@all")
        admin.execute_command("ACL", "SETUSER", "scriptless", "on", ">pw", "~embedq:*", "+@all", "-@scripting")
    place = server.url.removeprefix("redis://")
    with connect(f"redis://good:pw@{place}") as client:
        assert check_server(client) == ()
    for user in ("other", "reader", "scriptless"):
        with connect(f"redis://{user}:pw@{place}") as client, pytest.raises(BrokerAuthError):
            check_server(client)


def test_a_wrong_password_is_refused_at_once(start_server: StartServer) -> None:
    server = start_server(tcp=True, args=("--user", "default", "on", ">right", "~*", "+@all"))
    url = server.url.replace("redis://", "redis://:wrong@")
    attempts = 0

    class Counted(redis.Connection):
        def _connect(self) -> object:
            nonlocal attempts
            attempts += 1
            return super()._connect()

    client = connect(url)
    client.connection_pool.connection_class = Counted
    with pytest.raises(BrokerAuthError, match="refused access"), broker_errors(url):
        client.ping()
    assert attempts == 1


def test_a_full_server_says_so_and_writes_nothing(start_server: StartServer) -> None:
    server = start_server()
    with server.client() as client:
        client.xadd("embedq:{q}:fill", {"a": "1"})
        client.config_set("maxmemory", 1)
        check_server(client, server.url)
        with pytest.raises(BrokerOutOfMemoryError), broker_errors(server.url):
            client.xadd("embedq:{q}:fill", {"a": "1"})
        with pytest.raises(BrokerOutOfMemoryError), broker_errors(server.url):
            client.eval("#!lua\nreturn redis.call('XADD', KEYS[1], '*', 'a', '1')", 1, "embedq:{q}:fill")
        assert client.xlen("embedq:{q}:fill") == 1


def test_an_ordinary_connection_survives_a_restart_and_a_blocking_one_reports_it(server: Server) -> None:
    with connect(server.url) as ordinary, connect(server.url, blocking=True) as blocking:
        ordinary.set("embedq:{q}:key", "1")
        blocking.ping()
        server.kill()
        with pytest.raises(BrokerUnavailableError), broker_errors(server.url):
            blocking.ping()
        starter = threading.Timer(0.3, server.start)
        starter.start()
        try:
            assert ordinary.get("embedq:{q}:key") == b"1"
        finally:
            starter.join()


def test_a_frozen_server_is_a_timeout_not_a_hang(server: Server) -> None:
    with connect(server.url, blocking=True, socket_timeout_s=0.2) as client:
        client.ping()
        server.pause()
        try:
            with pytest.raises(BrokerUnavailableError, match="did not answer in time"), broker_errors(server.url):
                client.ping()
        finally:
            server.resume()


def test_a_sentinel_url_reaches_the_primary(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(tcp=True)
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {port}\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {server.port} 1\n")
    sentinel = subprocess.Popen([server.binary, config, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main/0"
        deadline = time.monotonic() + 20
        with connect(url) as client:
            while True:
                try:
                    client.set("embedq:{q}:key", "via sentinel")
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, "the sentinel never named the primary"
                    time.sleep(0.1)
            assert check_server(client, url) == ()
    finally:
        sentinel.kill()
        sentinel.wait()
    with server.client() as direct:
        assert direct.get("embedq:{q}:key") == b"via sentinel"
