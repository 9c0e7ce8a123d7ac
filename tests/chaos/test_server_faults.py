"""The server is killed, emptied, cut short, filled up, or replaced, in the middle of a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from conftest import both_servers
from embedq_broker.connect import connect
from embedq_broker.consume import Stage
from embedq_broker.registry import EnqueueOutcome, Registry
from embedq_schemas.errors import RunNotFoundError
from embedq_schemas.names import LANES, Lane
from embedq_schemas.run import RunStatus
from pipeline import Pipeline
from proxy import Proxy
from servers import Server
from waiting import wait_until

FORWARD = "embed.forward:delay:every:0.15"


@pytest.fixture
def proxy(own_server: Server) -> Iterator[Proxy]:
    with Proxy(own_server.port) as proxy:
        yield proxy


def half_way(pipeline: Pipeline) -> None:
    """Wait until some documents have their row and others do not."""
    pipeline.until(lambda: pipeline.registry.state("run").counters.settled > 5, "the first rows")
    assert not pipeline.registry.state("run").settled


@both_servers
def test_a_killed_server_that_comes_back_from_its_append_only_file_loses_nothing(
    pipeline: Pipeline, own_server: Server
) -> None:
    pipeline.produce()
    crew = pipeline.start(faults=FORWARD, once=False)
    half_way(pipeline)
    for _ in range(3):
        own_server.kill()
        time.sleep(0.3)
        own_server.start()
        time.sleep(0.5)
    pipeline.check()
    assert crew.deaths == [], "workers wait a dead server out with their work in hand"


def test_a_server_away_for_many_leases_does_not_make_workers_give_up_their_work(
    pipeline: Pipeline, own_server: Server
) -> None:
    pipeline.produce()
    crew = pipeline.start(faults=FORWARD, once=False)
    half_way(pipeline)
    own_server.pause()
    time.sleep(7)
    own_server.resume()
    pipeline.check()
    assert crew.deaths == []


@both_servers
def test_flushed_scripts_are_loaded_again(pipeline: Pipeline) -> None:
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False)
    for _ in range(5):
        pipeline.client.script_flush()
        time.sleep(0.1)
    pipeline.check()


def test_after_flushall_the_same_producer_sends_everything_again_and_no_row_is_doubled(pipeline: Pipeline) -> None:
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False)
    pipeline.until(lambda: pipeline.registry.state("run").published_files > 0, "the first file")
    pipeline.client.flushall()
    with pytest.raises(RunNotFoundError):
        pipeline.registry.state("run")
    pipeline.produce()
    pipeline.check()


@both_servers
@pytest.mark.parametrize("stage", Stage)
def test_a_deleted_group_is_made_again_from_the_beginning(pipeline: Pipeline, stage: Stage) -> None:
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False)
    half_way(pipeline)
    for lane in LANES:
        pipeline.client.xgroup_destroy(stage.stream(pipeline.keys, lane), stage)
    pipeline.check()


@both_servers
@pytest.mark.parametrize("stage", Stage)
def test_entries_of_a_consumer_deleted_by_hand_are_rescued(pipeline: Pipeline, stage: Stage) -> None:
    pipeline.produce()
    stream = stage.stream(pipeline.keys, Lane.BULK)
    if stage is Stage.EMBED:
        pipeline.start(embedders=0)
        # No embedder says what it wants, so one is pretended.
        now = time.time()
        beat = {"consumer": "pretended", "role": "embedder", "host": "h", "pid": 1, "started_at": now, "at": now}
        beat |= {"state": "idle", "state_s": 0, "held": 0, "documents": 0, "tokens": 0, "max_batch_tokens": 256}
        pipeline.client.hset(pipeline.keys.workers, "pretended", json.dumps(beat))
        pipeline.until(lambda: pipeline.client.xlen(stream) > 3, "the first batches")
    pipeline.client.xgroup_create(stream, stage, id="0")
    assert pipeline.client.xreadgroup(stage, "doomed", {stream: ">"}, count=3)
    assert pipeline.client.xgroup_delconsumer(stream, stage, "doomed") == 3
    pipeline.client.hdel(pipeline.keys.workers, "pretended")
    pipeline.start()
    pipeline.check()


@both_servers
@pytest.mark.parametrize("stage", Stage)
def test_documents_trimmed_away_by_hand_end_their_run_with_the_reason(pipeline: Pipeline, stage: Stage) -> None:
    pipeline.produce()
    if stage is Stage.EMBED:
        pipeline.start(faults=FORWARD, once=False)
        pipeline.until(lambda: pipeline.client.xlen(pipeline.keys.batches(Lane.BULK)) > 3, "batches that wait")
    assert pipeline.client.xtrim(stage.stream(pipeline.keys, Lane.BULK), maxlen=0, approximate=False)
    if stage is Stage.TOKENIZE:
        pipeline.start()
    state = pipeline.finish()
    assert state.status is RunStatus.FAILED
    assert "documents are in no stream any more" in str(state.error)
    assert not (pipeline.output / "_SUCCESS").exists()


def test_a_full_server_holds_producers_back_and_lets_workers_finish(pipeline: Pipeline) -> None:
    spec = pipeline.create()
    pipeline.client.config_set("maxmemory", 1)
    refused = pipeline.registry.enqueue(
        spec, expected="", position="later", max_backlog_bytes=1 << 30, documents=1, payload=b"x"
    )
    assert refused.outcome is EnqueueOutcome.FULL
    producer = threading.Thread(target=pipeline.produce, args=(spec,))
    producer.start()
    time.sleep(0.5)
    assert pipeline.registry.state("run").counters.input == 0
    pipeline.client.config_set("maxmemory", 0)
    producer.join()
    pipeline.start(faults=FORWARD, once=False)
    half_way(pipeline)
    pipeline.client.config_set("maxmemory", 1)
    pipeline.until(lambda: pipeline.registry.state("run").counters.settled > 30, "progress on a full server")
    pipeline.client.config_set("maxmemory", 0)
    pipeline.check()


@both_servers
@pytest.mark.parametrize("request_name", [b"EVALSHA", b"XREADGROUP"])
def test_lost_replies_strand_nothing_and_double_nothing(pipeline: Pipeline, proxy: Proxy, request_name: bytes) -> None:
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False, url=proxy.url)
    for _ in range(6):
        proxy.lose_reply(request_name)
        time.sleep(0.3)
        pipeline.poll()
    pipeline.check()
    assert proxy.lost >= 3


def test_a_producer_whose_replies_are_lost_sends_no_job_twice(pipeline: Pipeline, proxy: Proxy) -> None:
    direct = pipeline.registry
    pipeline.registry = Registry(connect(proxy.url, role="test"), pipeline.keys)
    proxy.lose_reply(b"EVALSHA", b"EVALSHA", b"EVALSHA", b"EVALSHA")
    pipeline.produce()
    pipeline.registry = direct
    assert proxy.lost == 4
    pipeline.start()
    pipeline.check()


def test_cut_half_closed_and_slow_connections_lose_nothing(pipeline: Pipeline, proxy: Proxy) -> None:
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False, url=proxy.url)
    for mistreat in (proxy.cut, proxy.half_close, proxy.cut, proxy.half_close):
        mistreat()
        proxy.delay_s = 0.02
        time.sleep(0.3)
        pipeline.poll()
    proxy.delay_s = 0
    pipeline.check()


@both_servers
def test_a_failover_to_a_replica_that_lags_loses_and_doubles_nothing(
    pipeline: Pipeline, own_server: Server, proxy: Proxy
) -> None:
    with Server(own_server.kind, tcp=True) as replica, replica.client() as second:
        second.replicaof("127.0.0.1", own_server.port)
        wait_until(lambda: second.info("replication").get("master_link_status") == "up", timeout_s=15)
        registry = Registry(connect(proxy.url, role="test"), pipeline.keys)
        direct, pipeline.registry = pipeline.registry, registry
        sender = threading.Thread(target=pipeline.produce)
        sender.start()
        pipeline.start(faults=FORWARD, once=False, url=proxy.url)
        pipeline.until(lambda: direct_state(direct) > 5, "the first rows")
        # From here on the replica hears nothing: acknowledged commits are lost with the primary.
        second.replicaof("NO", "ONE")
        before = direct.state("run").counters.settled
        pipeline.until(lambda: direct_state(direct) > before + 5, "commits the replica never hears of")
        proxy.move(replica.port)
        own_server.kill()
        pipeline.client = second
        try:
            sender.join()
            pipeline.check(pipeline.finish())
        finally:
            own_server.start()
            pipeline.registry, pipeline.client = direct, own_server.client()


def direct_state(registry: Registry) -> int:
    try:
        return registry.state("run").counters.settled
    except RunNotFoundError:
        return 0
