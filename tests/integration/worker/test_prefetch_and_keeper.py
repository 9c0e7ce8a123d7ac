"""Reading ahead and keeping leases: bounded, interactive first, honest about faults, and silent when nothing moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from embedq_broker.connect import connect
from embedq_broker.consume import Consumer, Stage
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats
from embedq_schemas.errors import CodecError
from embedq_schemas.names import Lane
from embedq_schemas.token_batch import TokenBatch
from embedq_worker.keeper import Keeper, Progress
from embedq_worker.prefetch import Prefetcher
from servers import Server
from writer_bench import tokens, until

KEYS = Keys("q")


def decode(payload: bytes) -> TokenBatch:
    return TokenBatch.decode(payload, vocab_size=10, max_length=10)


def add(client: redis.Redis, *ids: str, lane: Lane = Lane.BULK, **change: object) -> None:
    fields = {"v": 1, "codec": "arrow", "run": "r", "n": len(ids), "payload": bytes(tokens(list(ids)).encode())}
    client.xadd(KEYS.batches(lane), fields | change)


def make_consumer(client: redis.Redis, name: str = "c", lease_ms: int = 60_000) -> Consumer:
    consumer = Consumer(client, KEYS, Stage.EMBED, name, lease_ms=lease_ms)
    consumer.ensure_groups()
    return consumer


@pytest.fixture
def start(redis_client: redis.Redis, redis_url: str) -> Iterator[Callable[..., Prefetcher]]:
    started: list[Prefetcher] = []

    def start(consumer: Consumer, depth: int = 2) -> Prefetcher:
        prefetcher = Prefetcher(
            consumer,
            lambda: connect(redis_url, role="prefetch", blocking=True),
            depth=depth,
            decode=decode,
            block_ms=50,
        )
        prefetcher.start()
        started.append(prefetcher)
        return prefetcher

    yield start
    for prefetcher in started:
        prefetcher.stop()


def test_batches_come_in_order_interactive_ones_first_and_never_more_than_the_depth_ahead(
    redis_client: redis.Redis, start: Callable[..., Prefetcher]
) -> None:
    for number in range(6):
        add(redis_client, f"r-{number}")
    consumer = make_consumer(redis_client)
    prefetcher = start(consumer, depth=2)
    until(lambda: consumer.held() == 2, "nothing was read ahead")
    time.sleep(0.1)
    assert consumer.held() == 2
    add(redis_client, "r-9", lane=Lane.INTERACTIVE)
    until(lambda: sum(map(len, prefetcher._ready.values())) == 3, "the interactive batch was not read")
    taken = [prefetcher.take(5) for _ in range(7)]
    ids = [each.batch.table.column("id")[0].as_py() for each in taken if each is not None and each.batch is not None]
    assert ids == ["r-9", *(f"r-{number}" for number in range(6))]
    assert prefetcher.take(0.05) is None


def test_an_entry_that_is_no_batch_comes_with_its_reason(
    redis_client: redis.Redis, start: Callable[..., Prefetcher]
) -> None:
    add(redis_client, "r-0", payload=b"garbage")
    add(redis_client, "r-0", n=2)
    add(redis_client, "r-0", v=2)
    redis_client.xadd(KEYS.batches(Lane.BULK), {"what": "ever"})
    add(redis_client, "r-1")
    prefetcher = start(make_consumer(redis_client), depth=10)
    taken = [prefetcher.take(5) for _ in range(5)]
    assert [each is not None and isinstance(each.fault, CodecError) for each in taken] == [True] * 4 + [False]
    assert taken[4] is not None
    assert taken[4].batch is not None
    assert [each is not None and each.batch is None for each in taken] == [True] * 4 + [False]


def test_what_was_read_and_not_taken_is_given_back(redis_client: redis.Redis, start: Callable[..., Prefetcher]) -> None:
    for number in range(3):
        add(redis_client, f"r-{number}")
    consumer, other = make_consumer(redis_client), make_consumer(redis_client, "other")
    prefetcher = start(consumer, depth=3)
    until(lambda: consumer.held() == 3, "nothing was read ahead")
    taken = prefetcher.take(5)
    assert taken is not None
    prefetcher.stop()
    assert consumer.held() == 1
    claimed = {entry.id for entry in other.claim_expired(Lane.BULK, count=10)}
    assert len(claimed) == 2
    assert taken.entry.id not in claimed


def test_a_restarted_server_costs_no_batch(
    redis_client: redis.Redis, server: Server, start: Callable[..., Prefetcher]
) -> None:
    consumer = make_consumer(redis_client, lease_ms=2_000)
    prefetcher = start(consumer)
    server.stop()
    time.sleep(0.2)
    server.start()
    add(redis_client, "r-0")
    taken = prefetcher.take(10)
    assert taken is not None
    assert taken.batch is not None


def shown(client: redis.Redis) -> tuple[str, str]:
    (beat,) = heartbeats(client, KEYS)
    return beat.state, beat.detail


def test_leases_are_renewed_while_something_moves_and_let_go_when_nothing_does(
    redis_client: redis.Redis, redis_url: str
) -> None:
    lease_ms = 1000
    add(redis_client, "r-0")
    consumer = make_consumer(redis_client, lease_ms=lease_ms)
    other = make_consumer(redis_client, "other", lease_ms=lease_ms)
    assert len(consumer.read(redis_client, [Lane.BULK], count=1, block_ms=None)) == 1
    progress, steps = Progress(), 0
    with connect(redis_url) as keeper_client:
        keeper = Keeper(keeper_client, consumer, "embedder", progress, steps=lambda: steps, max_batch_tokens=77)
        keeper.start()
        (first,) = heartbeats(redis_client, KEYS)
        assert (first.state, first.max_batch_tokens, first.held) == ("starting", 77, 1)
        for _ in range(12):
            steps += 1
            time.sleep(0.1)
            assert other.claim_expired(Lane.BULK, count=1) == []
        until(lambda: len(other.claim_expired(Lane.BULK, count=1)) == 1, "a stuck worker keeps its lease")
        until(lambda: heartbeats(redis_client, KEYS)[0].state == "stuck", "a stuck worker does not say so")
        progress.enter("working")
        until(lambda: heartbeats(redis_client, KEYS)[0].state == "working", "it does not recover")
        # What holds the writer is not hidden by what the thread beside it does.
        progress.hold("waiting for storage", "no space")
        progress.enter("idle")
        until(lambda: shown(redis_client) == ("waiting for storage", "no space"), "nobody hears of the disk")
        progress.let_go()
        until(lambda: shown(redis_client) == ("idle", ""), "it goes on being held")
        keeper.stop()
