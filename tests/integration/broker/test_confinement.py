"""What the broker touches: only keys it declares, only keys of `embedq:`, all of a queue in one cluster slot."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import redis
from embedq_broker import scripts
from embedq_broker.batches import BatchRecord, BatchRegistry, drop_results
from embedq_broker.commit import Commit, CommitOutcome, published, unpublished
from embedq_broker.connect import check_server, connect
from embedq_broker.consume import Share, Stage, release_consumer, undelivered
from embedq_broker.depths import depths
from embedq_broker.liveness import Heartbeat, beat, bind_model, bury, exclusive, heartbeats, model_facts
from embedq_broker.registry import EnqueueOutcome
from embedq_broker.scripts import text
from embedq_schemas.job import Codec
from embedq_schemas.names import Lane
from embedq_schemas.run import RunCounters, RunStatus
from queues import LEASE_MS, Queue, letter, published_file
from servers import Server, free_port

LUA = Path(scripts.__file__).parent / "lua"


def use_everything(client: redis.Redis, tmp_path: Path) -> None:
    """Every script, and every call of the broker, at least once, with an effect."""
    queue = Queue(client)
    keys, registry = queue.keys, queue.registry
    bind_model(client, keys, "f", {"model_id": "m"})
    assert model_facts(client, keys)["fingerprint"] == "f"
    spec = queue.run(sink="parquet", path=str(tmp_path / "out"))
    stream = queue.run("s")
    consumer, other = queue.consumer("c"), queue.consumer("other")
    with exclusive(client, keys, "sweep", ttl_ms=1000) as held:
        assert held
    heartbeat = Heartbeat(
        consumer="c",
        role="tokenizer",
        host="h",
        pid=1,
        started_at=0.0,
        at=0.0,
        state="idle",
        state_s=0.0,
        held=0,
        documents=0,
        tokens=0,
    )
    beat(client, keys, heartbeat)
    assert heartbeats(client, keys)
    bury(client, keys, "c")
    for _ in range(4):
        assert queue.send(spec, dead=[letter(1)]).outcome is EnqueueOutcome.OK
    assert queue.send(stream).outcome is EnqueueOutcome.OK
    assert undelivered(client, keys, Stage.TOKENIZE, Lane.BULK) == 5
    client.xreadgroup(Stage.TOKENIZE, "c", {keys.jobs(Lane.BULK): ">"}, count=1)
    entries = consumer.adopt(Lane.BULK, count=10) + queue.take(consumer)
    assert len(entries) == 5
    assert consumer.renew() == []
    assert [consumer.begin_try(entries[0]), consumer.begin_try(entries[0])] == [0, 1]
    consumer.end_try(entries[0])
    consumer.release(entries[:1])
    (claimed,) = other.claim_expired(Lane.BULK, count=10)
    assert release_consumer(client, keys, Stage.TOKENIZE, "other", lease_ms=LEASE_MS) == 1
    (claimed,) = consumer.claim_expired(Lane.BULK, count=10)
    commit = Commit(consumer, inputs=[claimed, *entries[1:]])
    commit.add_batch(Lane.BULK, [Share("r", 1), Share("s", 1)], memoryview(b"b"))
    commit.add_again(claimed, [Share("r", 1)], Codec.ARROW, b"j")
    commit.add_result("s", 1, memoryview(b"v"), ttl_ms=1000)
    commit.add_file(published_file("r", commit.token), str(tmp_path / "out"))
    commit.add_dead_letter("r", letter(0))
    commit.count("r", "succeeded", 1)
    commit.count("s", "succeeded", 1)
    assert commit.send(client).outcome is CommitOutcome.OK
    (record,) = unpublished(client, keys)
    assert published(client, keys, record)
    page = registry.dead_letters("r")
    span = f"{page[0][0]}/{page[-1][0]}"
    assert scripts.call(client, "plan_drain", [keys.run("r")], [span], allow_oom=True) == span.encode()
    ids = [entry_id for entry_id, _ in page]
    drained = [keys.dead("r"), keys.run("r"), keys.bytes, keys.held]
    assert scripts.call(client, "drain", drained, [span, "dead:r", *ids], allow_oom=True) == len(page)
    assert queue.close(spec).outcome is EnqueueOutcome.OK
    assert registry.cancel("s") is RunStatus.CANCELLED
    assert {state.spec.run for state in registry.runs()} == {"r", "s"}
    assert registry.open_datasets() == ["r"]
    assert other.rescue(Lane.BULK, count=10) == []
    queue.client.xgroup_delconsumer(keys.jobs(Lane.BULK), Stage.TOKENIZE, "c")
    queue.client.xadd(keys.jobs(Lane.BULK), {"v": 1, "codec": "arrow", "run": "r", "n": 1, "payload": "p"})
    queue.take(consumer)
    queue.client.xgroup_delconsumer(keys.jobs(Lane.BULK), Stage.TOKENIZE, "c")
    assert other.rescue(Lane.BULK, count=10)
    registry.missing("r")
    registry.all_in_batches("r")
    registry.forget_expired()
    drop_results(client, keys, "s", [(text(client.xrange(keys.results("s"))[0][0]), 1)])
    assert registry.forget("s") is None
    assert len(depths(client, keys)) == 4
    batches = BatchRegistry(client, keys, "store")
    names = dict.fromkeys(("tenant", "endpoint", "input_file_id", "completion_window"), "x")
    outputs = {"output_name": "o", "error_name": "e"}
    batches.add_batch(BatchRecord(id="b", created_at=1, expires_at=2, **names, **outputs))
    assert batches.change("b", lambda record: msgspec.structs.replace(record, status=RunStatus.FAILED))
    assert batches.hold("b", "me", ttl_ms=1000)
    batches.let_go("b", "me")
    consumer.release_all()
    registry.restore(spec, RunCounters(succeeded=1), files=1)


def test_every_script_has_its_use_in_these_tests(redis_client: redis.Redis, tmp_path: Path) -> None:
    redis_client.config_resetstat()
    use_everything(redis_client, tmp_path)
    loaded = {path.stem for path in LUA.glob("*.lua")} - {"prelude"}
    variants = [(name, oom) for name in loaded for oom in (True, False)]
    known = redis_client.script_exists(*(scripts._source(name, oom)[1] for name, oom in variants))
    used = {name for (name, _), exists in zip(variants, known, strict=True) if exists}
    assert used == loaded


def test_every_script_touches_only_the_keys_it_declares(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """A cluster would run a script that forgets a key of its own slot, until that queue is moved or sharded."""
    seen: list[str] = []
    with connect(redis_url) as watcher, watcher.monitor() as monitor:
        use_everything(redis_client, tmp_path)
        redis_client.ping()
        for command in monitor.listen():
            if command["command"] == "PING":
                break
            seen.append(("lua " if command["client_type"] == "lua" else "") + command["command"])
    declared: set[str] = set()
    inside = 0
    for command in seen:
        words = command.split(" ")
        if words[0].upper() in ("EVAL", "EVALSHA"):
            # The script's text of an EVAL is one argument with spaces in it; the key count follows.
            numkeys, tail = re.search(r" (\d+) (embedq:\{q\}.*)", command, re.DOTALL).groups()  # type: ignore[union-attr]
            declared = set(tail.split(" ")[: int(numkeys)])
        elif words[0] == "lua":
            inside += 1
            touched = {word for word in words[2:] if word.startswith("embedq:")}
            assert touched <= declared, f"{command[:200]!r} outside {declared}"
            assert touched or words[1].upper() == "TIME", command[:200]
    assert inside > 100


def test_everything_works_in_a_cluster_and_stays_in_one_slot(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server(args=("--cluster-enabled", "yes", "--cluster-port", str(free_port())), tcp=True)
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        deadline = time.monotonic() + 20
        while "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        use_everything(client, tmp_path)
        slots = {client.execute_command("CLUSTER", "KEYSLOT", key) for key in client.scan_iter()}
        assert len(slots) == 1


def test_a_user_limited_to_embedq_keys_can_do_everything(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(tcp=True)
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~embedq:*", "+@all", "-@dangerous", "-@admin")
        url = server.url.replace("redis://", "redis://worker:pw@")
        with connect(url) as client:
            check_server(client, url)
            use_everything(client, tmp_path)
        assert all(key.startswith(b"embedq:{q}:") for key in admin.scan_iter())
