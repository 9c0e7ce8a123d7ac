"""A producer that knows only docs/wire.md: raw EVAL calls and JSON, no code of ours."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import redis
from embedq_broker.consume import Consumer, Stage
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_schemas.job import decode_job
from embedq_schemas.names import Lane
from embedq_schemas.run import RunCounters

LUA = Path(__file__).parents[3] / "broker/embedq_broker/lua"


def script(name: str) -> str:
    return "#!lua\n" + (LUA / "prelude.lua").read_text() + "\n" + (LUA / f"{name}.lua").read_text()


def test_a_run_sent_as_json_by_raw_calls_is_a_run_like_any_other(redis_client: redis.Redis, redis_url: str) -> None:
    tag = "embedq:{default}:"
    sink = {"kind": "parquet", "path": "/data/out"}
    spec = {"run": "nightly-7", "queue": "default", "sink": sink, "created_at": time.time()}
    keys = [tag + name for name in ("run:nightly-7", "runs", "open")]
    created = redis_client.eval(script("create_run"), 3, *keys, "nightly-7", json.dumps(spec), "parquet")
    assert created == [1]
    job = {
        "v": 1,
        "documents": [
            {"id": "a1", "ordinal": 0, "text": "first text", "metadata": {"language": "en"}},
            {"id": "a2", "ordinal": 1, "text": "second text"},
        ],
    }
    keys = [tag + name for name in ("run:nightly-7", "jobs:bulk", "bytes", "dead:nightly-7", "events", "held")]
    sent = ["", "1", 268435456, "jobs:bulk", "nightly-7", 2, 0, 1, 1, "json", json.dumps(job), 0]
    assert redis_client.eval(script("enqueue"), 6, *keys, *sent) == [b"ok"]
    assert redis_client.eval(script("enqueue"), 6, *keys, *sent) == [b"dup"]

    registry = Registry(redis_client, Keys("default"))
    state = registry.state("nightly-7")
    assert (state.counters, state.input_closed) == (RunCounters(input=2), True)
    consumer = Consumer(redis_client, registry.keys, Stage.TOKENIZE, "t", lease_ms=30_000)
    consumer.ensure_groups()
    (entry,) = consumer.read(redis_client, [Lane.BULK], count=10, block_ms=None)
    documents = decode_job(entry.payload, entry.codec)
    assert documents.column("id").to_pylist() == ["a1", "a2"]
    assert documents.column("language").to_pylist() == ["en", None]


@pytest.mark.parametrize("name", ["create_run", "enqueue"])
def test_the_scripts_the_page_names_exist(name: str) -> None:
    assert f"{name}.lua" in (Path(__file__).parents[3] / "docs/wire.md").read_text()
    assert (LUA / f"{name}.lua").is_file()
