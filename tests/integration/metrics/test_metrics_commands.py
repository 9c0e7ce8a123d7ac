"""`--metrics-port` of the commands: the page is there while the command runs, and shows what it does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from embedq_worker.engine.generate import generate_checkpoint
from servers import Server, free_port

from embedq import Client


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(tmp_path_factory.mktemp("model") / "m", hidden_size=16, layers=1, max_length=32)


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    with Server("valkey") as server:
        yield server


class Command:
    """A running `embedq`, with its page of metrics."""

    def __init__(self, *arguments: object) -> None:
        self.port = free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDQ_")}
        options = ("--metrics-port", str(self.port), "--metrics-host", "127.0.0.1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "embedq", *map(str, arguments), *options],
            env=environment | {"HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def page_with(self, pattern: str) -> str:
        """The page, once it has a line that matches."""
        return self._until(lambda page: re.search(pattern, page, re.MULTILINE) is not None)

    def _until(self, condition: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + 60
        page = ""
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                    page = answer.read().decode()
            except OSError:
                pass
            if condition(page):
                return page
            assert self._process.poll() is None, self._process.stderr and self._process.stderr.read()
            assert time.monotonic() < deadline, page
            time.sleep(0.05)

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=60)


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def begin(*arguments: object) -> Command:
        started.append(Command(*arguments))
        return started[-1]

    yield begin
    for command in started:
        command.end()


def test_a_worker_shows_its_processes_and_its_queue(
    start: Callable[..., Command], own_server: Server, model: Path
) -> None:
    worker = start("worker", "--model", model, "--engine", "null", "--redis", own_server.url, "--queue", "w")
    worker.page_with('^embedq_live_processes{role="embedder"} 1')
    with Client(own_server.url, "w") as client:
        client.embed(["a", "b"], timeout_s=60)
    page = worker.page_with('^embedq_documents_total{outcome="succeeded"} 2')
    assert re.search(r'^embedq_stage_duration_seconds_count{stage="embed"} 1', page, re.MULTILINE)


def test_a_producer_shows_what_it_sent(start: Callable[..., Command], own_server: Server, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(n), "text": "x"}) + "\n" for n in range(10)) + "not json\n")
    producer = start("produce", corpus, "--redis", own_server.url, "--queue", "p", "--wait")
    page = producer.page_with('^embedq_dead_letters_total{code="invalid_json"} 1')
    assert re.search(r'^embedq_stage_duration_seconds_count{stage="produce"} [1-9]', page, re.MULTILINE)
    assert re.search(r'^embedq_waiting_entries{lane="bulk",stage="tokenizers"} 1', page, re.MULTILINE)


def test_a_local_run_shows_itself(start: Callable[..., Command], model: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    # More than it can embed before the page is looked at.
    corpus.write_text("".join(json.dumps({"id": str(n), "text": f"text {n} " * 9}) + "\n" for n in range(60_000)))
    run = start("run", corpus, "--model", model, "--engine", "null", "-o", tmp_path / "out", "--file-bytes", 65536)
    page = run.page_with('^embedq_stage_duration_seconds_count{stage="publish"} [1-9]')
    assert re.search(r'^embedq_documents_total{outcome="succeeded"} [1-9]', page, re.MULTILINE)
    assert re.search(r'^embedq_live_processes{role="tokenizer"} 1', page, re.MULTILINE)
