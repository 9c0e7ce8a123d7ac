"""Metrics of real processes: every documented name is there, figures are those of the run, the format holds."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from embedq_broker import metrics
from embedq_broker.keys import Keys
from embedq_broker.metrics_server import serve_metrics
from embedq_broker.settings import BrokerSettings
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import UsageError
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings
from embedq_worker.supervisor import Supervisor, plan_slots
from prometheus_client.parser import text_string_to_metric_families
from servers import Server, free_port

from embedq import Client

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
DOCUMENTED = dict(re.findall(r"^\| `(embedq_(?!gateway_)\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE))


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def exposed(text: str) -> dict[str, str]:
    """Names as the page gives them, with their types."""
    found = families(text).values()
    return {family.name + ("_total" if family.type == "counter" else ""): family.type for family in found}


def value(text: str, name: str, *, default: float | None = None, **labels: str) -> float:
    samples = [s for family in families(text).values() for s in family.samples if s.name == name]
    matching = [s.value for s in samples if labels.items() <= s.labels.items()]
    if not matching and default is not None:
        return default
    assert matching, (name, labels)
    return sum(matching)


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The page of a worker before and after it embedded 41 texts, failed one, and had a process killed."""
    folder = tmp_path_factory.mktemp("metrics")
    model = generate_checkpoint(folder / "model", hidden_size=16, layers=1, max_length=32)
    port = free_port()
    with Server("valkey") as server:
        broker = BrokerSettings(redis_url=server.url, queue="q", lease_s=5)
        serving = serve_metrics(port, "127.0.0.1", broker.redis_url, "q", lease_s=5, processes=True)
        worker = WorkerSettings(model=str(model), output_roots=(folder,), tokenizer_backend="huggingface")
        slots = plan_slots(tokenizers=1, embedders=1, gpus=(), engine=EngineSettings(kind="null"))
        with serving as counts:
            assert counts is not None
            # Other tests count in this process, too.
            metrics.stage_duration.labels("embed").observe(0.1)
            before = scrape(port)
            supervisor = Supervisor(slots, broker, worker, log_level="WARNING", metrics_folder=counts)
            try:
                while not supervisor.ready:
                    supervisor.poll()
                with Client(settings=broker) as client:
                    for number in range(40):
                        client.embed([f"text {number}"])
                    (pid,) = supervisor.pids("embedder")
                    subprocess.run(["kill", "-9", str(pid)], check=True)
                    while supervisor.restarts == 0 or not supervisor.ready:
                        supervisor.poll()
                    handle = client.submit(["x " * 100, "good"], options=EncodingOptions(on_long=OnLong.ERROR))
                    assert handle.wait(timeout_s=60).counters.failed == 1
                    yield before, scrape(port)
            finally:
                supervisor.drain()
    assert not counts.exists()


def test_every_documented_name_is_served_with_its_type_and_no_other(worked: tuple[str, str]) -> None:
    assert len(DOCUMENTED) > 10
    assert exposed(worked[0]) == exposed(worked[1]) == DOCUMENTED


def test_the_counts_of_all_processes_are_added_up_and_outlive_a_killed_one(worked: tuple[str, str]) -> None:
    def counted(name: str, **labels: str) -> float:
        return value(worked[1], name, **labels) - value(worked[0], name, default=0, **labels)

    assert counted("embedq_documents_total", outcome="succeeded") == 41
    assert counted("embedq_documents_total", outcome="failed") == 1
    assert counted("embedq_dead_letters_total", code="too_long") == 1
    assert counted("embedq_tokens_total") > 41
    assert counted("embedq_process_restarts_total", role="embedder") == 1
    for stage in ("tokenize", "embed", "commit"):
        assert counted("embedq_stage_duration_seconds_count", stage=stage) >= 40
    for stage in ("tokenizers", "embedders"):
        assert counted("embedq_queue_wait_seconds_count", stage=stage, lane="interactive") >= 40
    assert counted("embedq_batch_fill_ratio_count") >= 40


def test_gauges_tell_of_the_queue(worked: tuple[str, str]) -> None:
    _, page = worked
    assert value(page, "embedq_server_up") == 1
    assert value(page, "embedq_live_processes", role="tokenizer") == 1
    assert value(page, "embedq_waiting_entries") == 0
    assert value(page, "embedq_backlog_bytes", kind="results") > 0
    assert value(page, "embedq_backlog_bytes", kind="jobs") == 0


def test_series_are_unique_and_names_follow_the_conventions(worked: tuple[str, str]) -> None:
    """What promtool checks besides the syntax, where it is not installed: prometheus.io/docs/practices/naming."""
    _, page = worked
    series = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    for name, kind in exposed(page).items():
        assert re.fullmatch(r"embedq(_[a-z]+)+", name), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert families(page)[name.removesuffix("_total")].documentation, name
        assert not re.search(r"_(milli\w+|micro\w+|ms|minutes|hours|mb|kb|percent)\b", name), name
        if kind == "histogram":
            assert name.endswith(("_seconds", "_ratio", "_bytes")), name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not on PATH")
def test_promtool_has_nothing_to_say(worked: tuple[str, str]) -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=worked[1], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_dead_server_is_shown_and_does_not_take_the_counts_with_it() -> None:
    port = free_port()
    with serve_metrics(port, "127.0.0.1", "unix:///nowhere.sock", "q", lease_s=5):
        page = scrape(port)
    assert value(page, "embedq_server_up") == 0
    assert "embedq_stage_duration_seconds" in families(page)
    assert "embedq_waiting_entries" not in families(page)


def test_a_scrape_moves_no_payload_whatever_waits(redis_client: redis.Redis, redis_url: str) -> None:
    keys = Keys("q")
    redis_client.xadd("embedq:{q}:jobs:bulk", {"payload": b"x" * 5_000_000})
    redis_client.hset(keys.bytes, "jobs:bulk", 5_000_000)
    before = redis_client.info("stats")["total_net_output_bytes"]
    port = free_port()
    with serve_metrics(port, "127.0.0.1", redis_url, "q", lease_s=5):
        page = scrape(port)
    assert redis_client.info("stats")["total_net_output_bytes"] - before < 100_000
    assert value(page, "embedq_waiting_entries", stage="tokenizers", lane="bulk") == 1
    assert value(page, "embedq_backlog_bytes", kind="jobs") == 5_000_000
    assert 0 <= value(page, "embedq_oldest_entry_age_seconds", stage="tokenizers", lane="bulk") < 60


def test_counts_of_this_process_and_of_others_are_one_series() -> None:
    program = (
        "from embedq_broker import metrics; metrics.retries.inc(5); metrics.stage_duration.labels('embed').observe(1)"
    )
    metrics.retries.inc(2)
    port = free_port()
    with serve_metrics(port, "127.0.0.1", "unix:///nowhere.sock", "q", lease_s=5, processes=True) as folder:
        before = value(scrape(port), "embedq_retries_total")
        environment = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "PATH": "/usr/bin:/bin"}
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
        page = scrape(port)
    assert value(page, "embedq_retries_total") == before + 5 >= 7
    assert value(page, "embedq_stage_duration_seconds_count", stage="embed") >= 1


def test_without_a_port_nothing_is_opened_and_a_taken_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with serve_metrics(None, "127.0.0.1", "unix:///nowhere.sock", "q", lease_s=5, processes=True) as folder:
        assert folder is None
    port = free_port()
    with (
        serve_metrics(port, "127.0.0.1", "unix:///nowhere.sock", "q", lease_s=5),
        pytest.raises(UsageError, match=f"metrics cannot be served on 127.0.0.1:{port}: Address already in use"),
        serve_metrics(port, "127.0.0.1", "unix:///nowhere.sock", "q", lease_s=5),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_clients_that_send_nothing_or_leave_are_let_go_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("embedq_broker.metrics_server._CLIENT_TIMEOUT_S", 0.5)
    port = free_port()
    with serve_metrics(port, "127.0.0.1", "unix:///nowhere.sock", "q", lease_s=5):
        for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nHost:"):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(sent)
                assert client.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert value(scrape(port), "embedq_server_up") == 0
    assert capfd.readouterr().err == ""
