"""Shared by the broker's tests: a queue with runs and consumers on a real server, and its whole key space."""

from __future__ import annotations

from typing import Any

import redis
from embedq_broker.commit import Commit, CommitOutcome
from embedq_broker.consume import Consumer, Entry, Share, Stage
from embedq_broker.keys import Keys
from embedq_broker.registry import Enqueued, EnqueueOutcome, Registry
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.dead_letter import Stage as FailedStage
from embedq_schemas.errors import DocumentErrorCode
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.names import Lane
from embedq_schemas.run import ParquetSink, RunSpec, StreamSink

LEASE_MS = 60_000
PLENTY = 1 << 30


def letter(ordinal: int, message: str = "m") -> DeadLetter:
    return DeadLetter(
        ordinal=ordinal, stage=FailedStage.PRODUCE, code=DocumentErrorCode.MISSING_TEXT, message=message, id="ü\0"
    )


def published_file(run: str, token: str, rows: int = 1) -> PublishedFile:
    return PublishedFile(token=token, run=run, rows=rows, size_bytes=1, tokens=rows, ordinals=(0, rows - 1))


class Queue:
    """One queue of a test. Producers number their positions 0, 1, 2, ..."""

    def __init__(self, client: redis.Redis, name: str = "q") -> None:
        self.client = client
        self.keys = Keys(name)
        self.registry = Registry(client, self.keys)
        self.positions: dict[str, int] = {}

    def run(self, name: str = "r", *, sink: str = "stream", path: str = "/data/out") -> RunSpec:
        spec = RunSpec(
            run=name,
            queue=self.keys.queue,
            sink=ParquetSink(path=path) if sink == "parquet" else StreamSink(ttl_s=1000),
            created_at=1.0,
        )
        return self.registry.create(spec)

    def send(self, spec: RunSpec, payload: bytes = b"job", documents: int = 1, **more: Any) -> Enqueued:
        """Enqueue at the run's next position; the position moves if the job was taken."""
        at = self.positions.get(spec.run, 0)
        sent = self.registry.enqueue(
            spec,
            expected=str(at) if at else "",
            position=str(at + 1),
            documents=documents if payload else 0,
            payload=payload,
            **({"max_backlog_bytes": PLENTY} | more),
        )
        if sent.outcome is EnqueueOutcome.OK:
            self.positions[spec.run] = at + 1
        return sent

    def close(self, spec: RunSpec) -> Enqueued:
        at = str(self.positions.get(spec.run, 0) or "")
        return self.registry.enqueue(spec, expected=at, position=at, max_backlog_bytes=PLENTY, close=True)

    def consumer(self, name: str = "c", stage: Stage = Stage.TOKENIZE, lease_ms: int = LEASE_MS) -> Consumer:
        consumer = Consumer(self.client, self.keys, stage, name, lease_ms=lease_ms)
        consumer.ensure_groups()
        return consumer

    def take(self, consumer: Consumer, count: int = 100, lane: Lane = Lane.BULK) -> list[Entry]:
        return consumer.read(self.client, [lane], count=count, block_ms=None)

    def expire(self, consumer: Consumer, entry: Entry) -> None:
        """Let the lease run out now."""
        self.client.xclaim(entry.stream, consumer.stage, consumer.name, 0, [entry.id], idle=10 * LEASE_MS, justid=True)

    def batch(self, spec: RunSpec, payload: bytes = b"tokens", documents: int = 1) -> None:
        """Bring one job through the tokenizers, as one token batch."""
        assert self.send(spec, payload=b"j", documents=documents).outcome is EnqueueOutcome.OK
        consumer = self.consumer("tokenizer")
        (entry,) = self.take(consumer)
        commit = Commit(consumer, inputs=[entry])
        commit.add_batch(Lane.BULK, [Share(spec.run, documents)], memoryview(payload))
        commit.count(spec.run, "ready", documents)
        assert commit.send(self.client).outcome is CommitOutcome.OK

    def counters(self, run: str = "r") -> tuple[int, int, int, int]:
        """(input, succeeded, failed, skipped)"""
        found = self.registry.state(run).counters
        return found.input, found.succeeded, found.failed, found.skipped

    def dump(self) -> dict[bytes, Any]:
        return dump(self.client)


def dump(client: redis.Redis) -> dict[bytes, Any]:
    """Everything on the server, pending lists included, but for what time alone changes."""
    found: dict[bytes, Any] = {}
    for key in sorted(client.scan_iter(count=1000)):
        kind = client.type(key)
        if kind == b"stream":
            groups = []
            for group in client.xinfo_groups(key):
                pending = client.xpending_range(key, group["name"], "-", "+", 100_000)
                held = [(p["message_id"], p["consumer"], p["times_delivered"]) for p in pending]
                groups.append((group["name"], group["last-delivered-id"], held))
            found[key] = (client.xrange(key), client.xinfo_stream(key)["last-generated-id"], groups)
        elif kind == b"hash":
            found[key] = client.hgetall(key)
        elif kind == b"zset":
            found[key] = client.zrange(key, 0, -1, withscores=True)
        elif kind == b"set":
            found[key] = client.smembers(key)
        else:
            found[key] = client.get(key)
    return found
