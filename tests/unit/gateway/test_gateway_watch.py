"""What the gateway says of its queue: whether it can be used, and when to try again."""

from __future__ import annotations

import time

import pytest
import redis
from embedq_broker.keys import Keys
from embedq_broker.liveness import Heartbeat, beat, bind_model
from embedq_broker.settings import BrokerSettings
from embedq_gateway.watch import QueueState, QueueWatch, served_model

KEYS = Keys("q")
FACTS: dict[str, str | int] = {"model_id": "m", "dimension": 4, "max_length": 8, "prompts": '{"query": "Q:"}'}


def heartbeat(role: str, *, state: str = "idle", age_s: float = 0.0, tokens: int = 0) -> Heartbeat:
    return Heartbeat(
        consumer=f"{role}-1",
        role=role,
        host="h",
        pid=1,
        started_at=0.0,
        at=time.time() - age_s,
        state=state,
        state_s=0.0,
        held=0,
        documents=0,
        tokens=tokens,
    )


@pytest.fixture
def watch(redis_url: str) -> QueueWatch:
    return QueueWatch(BrokerSettings(redis_url=redis_url, queue="q", lease_s=2))


def problem(watch: QueueWatch) -> str:
    watch._look()
    return watch.state.problem


def test_a_queue_is_ready_once_both_kinds_of_process_are_at_work(watch: QueueWatch, redis_client: redis.Redis) -> None:
    assert problem(watch) == "no worker has ever served this queue"
    bind_model(redis_client, KEYS, "fingerprint", FACTS)
    assert problem(watch) == "no tokenizer and no embedder is at work"
    beat(redis_client, KEYS, heartbeat("tokenizer"))
    beat(redis_client, KEYS, heartbeat("embedder", state="starting"))
    assert problem(watch) == "no embedder is at work"
    beat(redis_client, KEYS, heartbeat("embedder", age_s=60))
    assert problem(watch) == "no embedder is at work"
    beat(redis_client, KEYS, heartbeat("embedder"))
    assert problem(watch) == ""
    assert watch.state.model == served_model({"fingerprint": "fingerprint"} | {k: str(v) for k, v in FACTS.items()})


def test_the_rate_counts_what_was_committed_and_starts_anew_when_a_worker_leaves(
    watch: QueueWatch, redis_client: redis.Redis
) -> None:
    for tokens in (100, 100_100):
        beat(redis_client, KEYS, heartbeat("embedder", tokens=tokens))
        watch._look()
        time.sleep(0.05)
    assert watch.state.tokens_per_s > 1000
    beat(redis_client, KEYS, heartbeat("embedder", tokens=5))
    watch._look()
    assert watch.state.tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("backlog_bytes", "rate", "seconds"),
    [(0, 1000.0, 1), (40_000, 1000.0, 10), (1 << 40, 1000.0, 60), (4000, 0.0, 5)],
    ids=["nothing waits", "ten seconds of work", "never beyond a minute", "rate unknown"],
)
def test_retry_after_is_the_time_the_backlog_takes(backlog_bytes: int, rate: float, seconds: int) -> None:
    assert QueueState(backlog_bytes=backlog_bytes, tokens_per_s=rate).retry_after_s() == seconds


def test_a_server_that_is_gone_is_a_problem_and_the_model_is_remembered() -> None:
    watch = QueueWatch(BrokerSettings(redis_url="unix:///nowhere/at/all.sock", queue="q"))
    assert "cannot be reached" in problem(watch)
    assert not watch.state.reachable
