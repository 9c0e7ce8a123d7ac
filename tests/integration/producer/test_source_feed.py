"""A producer of any source may be killed at any moment: the next one goes on inside the file and repeats nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import open_corpus
from embedq_producer.feed import feed
from embedq_producer.formats import Format
from embedq_producer.position import Position
from embedq_schemas.job import decode_job
from embedq_schemas.names import Lane
from embedq_schemas.run import RunSpec, RunState, StreamSink
from source_kinds import KINDS

COUNT = 120
FEED = """
import sys
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import open_corpus
from embedq_producer.feed import feed
from embedq_producer.formats import Format

url, source, format, block_documents, backlog = sys.argv[1:]
registry = Registry(connect(url, role="producer"), Keys("q"))
settings = BrokerSettings(redis_url=url, queue="q", max_backlog_bytes=int(backlog))
corpus = open_corpus([source], Format(format) if format else None)
feed(registry, registry.state("r").spec, corpus, ReadOptions(block_documents=int(block_documents)), settings)
"""


def documents() -> list[dict[str, Any]]:
    """3 MB, so that a queue of 1 MiB holds some of them."""
    return [
        {"id": f"d{i}", "text": f"{i}\n" + f'w{i} "x" ' * 3000, "lang": "en", "year": i, "meta": None}
        for i in range(COUNT)
    ]


@pytest.fixture
def registry(redis_url: str) -> Iterator[Registry]:
    with connect(redis_url, role="test") as client:
        registry = Registry(client, Keys("q"))
        registry.create(RunSpec(run="r", queue="q", sink=StreamSink(), created_at=time.time()))
        yield registry


def kill_half_way(registry: Registry, url: str, source: Path, format: str = "") -> RunState:
    """Start a producer, wait until the queue is full, and kill it."""
    arguments = [url, str(source), format, "7", str(1 << 20)]
    with subprocess.Popen([sys.executable, "-c", FEED, *arguments], stderr=subprocess.PIPE, text=True) as producer:
        deadline = time.monotonic() + 60
        while registry.backlog_bytes() < 3 << 18:
            assert producer.poll() is None, producer.stderr and producer.stderr.read()
            assert time.monotonic() < deadline, "nothing was sent"
            time.sleep(0.01)
        producer.kill()
    return registry.state("r")


def sent(client: redis.Redis) -> list[tuple[int, str, str]]:
    entries: Any = client.xrange(Keys("q").jobs(Lane.BULK))
    jobs = [decode_job(fields[b"payload"], fields[b"codec"].decode()) for _, fields in entries]
    return [(row["ordinal"], row["id"], row["text"]) for job in jobs for row in job.to_pylist()]


@pytest.mark.parametrize("kind", ["jsonl.gz", "csv.zst", "parquet", "arrow stream.gz", "directory"])
def test_each_document_is_sent_once_though_the_producer_is_killed_half_way(
    kind: str, registry: Registry, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    given = documents()
    source = KINDS[kind](tmp_path, given)
    state = kill_half_way(registry, redis_url, source)
    assert 0 < state.counters.input < COUNT
    assert Position.from_json(state.position or "").ordinal == state.counters.input
    settings = BrokerSettings(redis_url=redis_url, queue="q", max_backlog_bytes=64 << 20)
    feed(registry, state.spec, open_corpus([source]), ReadOptions(block_documents=5), settings)
    after = registry.state("r")
    assert after.input_closed
    assert after.counters.input == COUNT
    assert sent(redis_client) == [(i, document["id"], document["text"]) for i, document in enumerate(given)]


def test_whole_files_are_sent_once_though_the_producer_is_killed_half_way(
    registry: Registry, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    given = documents()
    for i, document in enumerate(given):
        (tmp_path / f"{i:03}.md").write_text(document["text"])
    state = kill_half_way(registry, redis_url, tmp_path, Format.FILES)
    assert 0 < state.counters.input < COUNT
    settings = BrokerSettings(redis_url=redis_url, queue="q", max_backlog_bytes=64 << 20)
    feed(registry, state.spec, open_corpus([tmp_path], Format.FILES), ReadOptions(), settings)
    assert sent(redis_client) == [(i, f"{i:03}.md", document["text"]) for i, document in enumerate(given)]


def test_an_error_row_names_its_file_and_row(registry: Registry, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id":"a","text":"x"}\n')
    (tmp_path / "b.csv").write_text("id,text\nb,y\nbad\n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and nothing else")
    settings = BrokerSettings(redis_url=redis_url, queue="q")
    feed(registry, registry.state("r").spec, open_corpus([tmp_path]), ReadOptions(), settings)
    letters = [letter for _, letter in registry.dead_letters("r", after="-")]
    assert [(letter.ordinal, letter.file, letter.line, letter.code.value) for letter in letters] == [
        (2, "b.csv", 3, "invalid_row"),
        (3, "c.parquet", 1, "unreadable_file"),
    ]
    counters = registry.state("r").counters
    assert (counters.input, counters.failed) == (4, 2)
