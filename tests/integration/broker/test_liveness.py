"""Heartbeats, the binding of a queue to its model, and locks."""

from __future__ import annotations

import threading
import time

import pytest
import redis
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.liveness import (
    Heartbeat,
    beat,
    bind_model,
    bury,
    exclusive,
    heartbeats,
    model_facts,
    wanted_batch_tokens,
)
from embedq_schemas.errors import ModelMismatchError

KEYS = Keys("q")


def heartbeat(consumer: str, *, age_s: float = 0.0, max_batch_tokens: int = 0) -> Heartbeat:
    return Heartbeat(
        consumer=consumer,
        role="embedder" if max_batch_tokens else "tokenizer",
        host="h",
        pid=1,
        started_at=1.0,
        at=time.time() - age_s,
        state="idle",
        state_s=0.5,
        held=2,
        documents=3,
        tokens=4,
        max_batch_tokens=max_batch_tokens,
        detail="ü",
    )


def test_a_heartbeat_stays_until_its_process_is_buried(redis_client: redis.Redis) -> None:
    beats = [heartbeat("a", max_batch_tokens=5), heartbeat("b", age_s=1e6)]
    for each in beats:
        beat(redis_client, KEYS, each)
        beat(redis_client, KEYS, each)
    assert heartbeats(redis_client, KEYS) == beats
    bury(redis_client, KEYS, "a")
    bury(redis_client, KEYS, "a")
    assert heartbeats(redis_client, KEYS) == beats[1:]


def test_a_heartbeat_of_another_version_is_left_out(redis_client: redis.Redis) -> None:
    beat(redis_client, KEYS, heartbeat("a"))
    redis_client.hset(KEYS.workers, "future", b'{"v":2}')
    redis_client.hset(KEYS.workers, "garbage", b"\xff")
    assert [each.consumer for each in heartbeats(redis_client, KEYS)] == ["a"]


def test_only_living_embedders_say_how_large_they_want_their_batches(redis_client: redis.Redis) -> None:
    assert wanted_batch_tokens(redis_client, KEYS, fresh_s=10) == {}
    beat(redis_client, KEYS, heartbeat("tokenizer"))
    assert wanted_batch_tokens(redis_client, KEYS, fresh_s=10) == {}
    beat(redis_client, KEYS, heartbeat("large", max_batch_tokens=100))
    beat(redis_client, KEYS, heartbeat("small", max_batch_tokens=50))
    beat(redis_client, KEYS, heartbeat("dead", max_batch_tokens=1, age_s=60))
    assert wanted_batch_tokens(redis_client, KEYS, fresh_s=10) == {"large": 100, "small": 50}


def test_a_queue_is_bound_to_its_first_model(redis_client: redis.Redis) -> None:
    assert model_facts(redis_client, KEYS) == {}
    bind_model(redis_client, KEYS, "f" * 64, {"model_id": "one", "dimension": 8})
    bind_model(redis_client, KEYS, "f" * 64, {"model_id": "renamed", "dimension": 9})
    assert model_facts(redis_client, KEYS) == {"fingerprint": "f" * 64, "model_id": "one", "dimension": "8"}
    with pytest.raises(ModelMismatchError, match=r"queue q is bound to another model \(one, fingerprint ffffffffffff"):
        bind_model(redis_client, KEYS, "e" * 64, {"model_id": "two"})
    assert model_facts(redis_client, KEYS)["model_id"] == "one"
    bind_model(redis_client, Keys("other"), "e" * 64, {})


def test_of_many_who_want_a_lock_one_gets_it_and_gives_it_back(redis_client: redis.Redis, redis_url: str) -> None:
    holding, most, wins = 0, 0, 0
    guard = threading.Lock()

    def contend() -> None:
        nonlocal holding, most, wins
        with connect(redis_url) as client:
            for _ in range(30):
                with exclusive(client, KEYS, "sweep", ttl_ms=60_000) as held:
                    if held:
                        with guard:
                            holding += 1
                            most, wins = max(most, holding), wins + 1
                        time.sleep(0.001)
                        with guard:
                            holding -= 1

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert wins > 1
    assert not redis_client.exists(KEYS.lock("sweep"))


def test_a_lock_is_given_back_when_its_block_fails(redis_client: redis.Redis) -> None:
    def fail() -> None:
        with exclusive(redis_client, KEYS, "sweep", ttl_ms=60_000) as held:
            assert held
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert not redis_client.exists(KEYS.lock("sweep"))


def test_a_lock_that_ran_out_is_not_taken_from_its_next_holder(redis_client: redis.Redis) -> None:
    with exclusive(redis_client, KEYS, "sweep", ttl_ms=20) as first:
        assert first
        while redis_client.exists(KEYS.lock("sweep")):
            time.sleep(0.005)
        redis_client.set(KEYS.lock("sweep"), "somebody else")
    assert redis_client.get(KEYS.lock("sweep")) == b"somebody else"
    with exclusive(redis_client, KEYS, "sweep", ttl_ms=60_000) as held:
        assert not held
    assert redis_client.get(KEYS.lock("sweep")) == b"somebody else"
