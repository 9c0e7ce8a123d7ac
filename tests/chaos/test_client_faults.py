"""Clients on a bad network: lost replies double nothing, cut connections lose no wait, a dead client frees its work."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_producer.client import Client
from embedq_schemas.errors import RunCancelledError
from embedq_schemas.names import Lane
from embedq_schemas.run import RunState, RunStatus
from proxy import Proxy
from servers import Server
from waiting import wait_until

pytestmark = pytest.mark.parametrize("own_server", ["valkey"], indirect=True)


@pytest.fixture
def proxy(own_server: Server) -> Iterator[Proxy]:
    with Proxy(own_server.port) as proxy:
        yield proxy


@pytest.fixture
def registry(own_server: Server) -> Iterator[Registry]:
    with connect(own_server.url) as client:
        yield Registry(client, Keys("q"))


def test_replies_lost_during_a_submission_double_no_document(proxy: Proxy, registry: Registry) -> None:
    texts = [f"text {number}" for number in range(5000)]
    proxy.lose_reply(*[b"EVALSHA"] * 5)
    with Client(proxy.url, "q") as client:
        handle = client.submit(texts)
    assert proxy.lost == 5
    state = registry.state(handle.run)
    assert (state.counters.input, state.input_closed) == (5000, True)
    with connect(proxy.url) as redis:
        assert redis.xlen(registry.keys.jobs(Lane.INTERACTIVE)) == 5


def test_a_reply_lost_under_an_embedding_doubles_nothing_and_cut_connections_lose_no_wait(
    proxy: Proxy, registry: Registry
) -> None:
    ended: list[Exception] = []

    def embed() -> None:
        try:
            client.embed(["a"])
        except Exception as error:
            ended.append(error)

    def sent() -> list[RunState]:
        # A run is there a moment before its document.
        states = registry.runs()
        return states if len(states) == 5 and all(state.counters.input for state in states) else []

    with Client(proxy.url, "q") as client:
        client.backlog()
        proxy.lose_reply(b"EVALSHA")
        callers = [threading.Thread(target=embed) for _ in range(5)]
        for caller in callers:
            caller.start()
        states = wait_until(sent, timeout_s=60)
        assert [state.counters.input for state in states] == [1] * 5
        assert proxy.lost == 1
        for _ in range(3):
            proxy.cut()
            time.sleep(0.05)
        for state in states:
            wait_until(lambda run=state.spec.run: registry.state(run).input_closed, timeout_s=60)
            registry.transition(state.spec.run, RunStatus.CANCELLED, [RunStatus.IN_PROGRESS])
        for caller in callers:
            caller.join(30)
    assert [type(error) for error in ended] == [RunCancelledError] * 5
    with connect(proxy.url) as redis:
        assert redis.xlen(registry.keys.jobs(Lane.INTERACTIVE)) == 5


PROGRAM = """
import sys
from embedq import Client
def texts():
    for number in range(20_000):
        if number == 9_000 and sys.argv[2] == "dies":
            print("here", flush=True)
            import time; time.sleep(100)
        yield {"text": f"text {number}"}
with Client(sys.argv[1], "q") as client:
    print(client.submit(texts(), idempotency_key="once").run)
"""


def test_a_submitting_process_that_is_killed_and_started_again_sends_each_document_once(
    own_server: Server, registry: Registry
) -> None:
    command = [sys.executable, "-c", PROGRAM, own_server.url]
    first = subprocess.Popen([*command, "dies"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "here\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    (state,) = registry.runs()
    assert (0 < state.counters.input < 9_000, state.input_closed) == (True, False)
    for _ in range(2):
        again = subprocess.run([*command, "lives"], capture_output=True, text=True, check=True)
        assert again.stdout.strip() == state.spec.run
        (state,) = registry.runs()
        assert (state.counters.input, state.input_closed) == (20_000, True)
