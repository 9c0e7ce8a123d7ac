"""Commits: all of it or none of it, once, by the lease holder alone, with exact bytes and exact counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from embedq_broker import commit as commit_module
from embedq_broker.commit import Commit, CommitOutcome, published, unpublished
from embedq_broker.consume import Consumer, Entry, Share, Stage, undelivered
from embedq_broker.liveness import Heartbeat, beat, bind_model, exclusive
from embedq_broker.registry import EnqueueOutcome
from embedq_schemas.errors import BrokerUnavailableError, UsageError
from embedq_schemas.job import Codec
from embedq_schemas.names import Lane
from embedq_schemas.run import Durability, RunCounters, RunSpec, RunStatus, StreamSink
from queues import LEASE_MS, PLENTY, Queue, dump, letter, published_file
from servers import Server


@pytest.fixture
def queue(redis_client: redis.Redis) -> Queue:
    return Queue(redis_client)


def full_commit(consumer: Consumer, entries: list[Entry], run: str = "r") -> Commit:
    """A commit that writes of every kind."""
    commit = Commit(consumer, inputs=entries)
    commit.add_batch(Lane.BULK, [Share(run, 1)], memoryview(b"batch"))
    commit.add_result(run, 1, memoryview(b"result"), ttl_ms=100_000)
    commit.add_file(published_file(run, commit.token), "/data/out")
    commit.add_dead_letter(run, letter(1, "ü\n\0"))
    commit.count(run, "succeeded", 1)
    commit.count(run, "tokens", 7)
    commit.count(run, "ready", 2)
    return commit


def test_a_commit_writes_all_it_holds_and_acknowledges_its_inputs(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec, b"x" * 100, documents=2)
    queue.send(spec, b"y" * 30)
    consumer = queue.consumer()
    first, _second = queue.take(consumer)
    committed = full_commit(consumer, [first]).send(queue.client)
    assert committed.outcome is CommitOutcome.OK
    assert len(committed.added) == 4
    keys = queue.keys
    ((batch_id, batch),) = queue.client.xrange(keys.batches(Lane.BULK))
    assert batch_id.decode() == committed.added[0]
    assert batch == {b"v": b"1", b"codec": b"arrow", b"run": b"r", b"n": b"1", b"payload": b"batch"}
    ((_, result),) = queue.client.xrange(keys.results("r"))
    assert result[b"payload"] == b"result"
    assert 0 < queue.client.pttl(keys.results("r")) <= 100_000
    (record,) = unpublished(queue.client, keys)
    assert (record.dataset, record.file.run, record.id) == ("/data/out", "r", committed.added[2])
    ((_, dead),) = queue.registry.dead_letters("r")
    assert dead == letter(1, "ü\n\0")
    assert [entry_id.decode() for entry_id, _ in queue.client.xrange(keys.jobs(Lane.BULK))] != [first.id]
    assert queue.client.xpending(keys.jobs(Lane.BULK), Stage.TOKENIZE)["pending"] == 1
    state = queue.registry.state("r")
    assert state.counters == RunCounters(input=3, succeeded=1, failed=1, tokens=7)
    assert (state.committed_files, state.published_files, state.dead_letters) == (1, 0, 1)
    held = {field.decode(): int(n) for field, n in queue.client.hgetall(keys.bytes).items()}
    dead_bytes = len(letter(1, "ü\n\0").encode())
    assert held == {"jobs:bulk": 30, "batches:bulk": 5, "results": 6, "dead": dead_bytes}
    assert queue.client.hgetall(keys.held) == {b"results:r": b"6", b"dead:r": b"%d" % dead_bytes}
    assert consumer.held() == 1


def test_a_commit_sent_again_after_a_lost_reply_writes_nothing(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec)
    consumer = queue.consumer()
    commit = full_commit(consumer, queue.take(consumer))
    commit.send(queue.client)
    before = queue.dump()
    assert 0 < queue.client.pttl(queue.keys.token(commit.token)) <= 86_400_000
    for _ in range(2):
        again = commit.send(queue.client)
        assert (again.outcome, again.added, again.lost) == (CommitOutcome.DUP, (), ())
    assert queue.dump() == before


def taken_over(queue: Queue, consumer: Consumer, entry: Entry) -> None:
    queue.expire(consumer, entry)
    assert queue.consumer("other").claim_expired(Lane.BULK, count=1)


def delivered_again(queue: Queue, consumer: Consumer, entry: Entry) -> None:
    consumer.forget([entry])
    assert consumer.adopt(Lane.BULK, count=1)[0].deliveries == 2


def acknowledged(queue: Queue, consumer: Consumer, entry: Entry) -> None:
    queue.client.xack(entry.stream, consumer.stage, entry.id)


def committed_elsewhere(queue: Queue, consumer: Consumer, entry: Entry) -> None:
    other = queue.consumer("other")
    queue.expire(consumer, entry)
    assert Commit(other, inputs=other.claim_expired(Lane.BULK, count=1)).send(queue.client).outcome == "ok"


def trimmed(queue: Queue, consumer: Consumer, entry: Entry) -> None:
    # A trimmed entry stays pending until somebody looks at it.
    queue.client.xtrim(entry.stream, minid=f"{int(entry.id.partition('-')[0]) + 1}", approximate=False)
    consumer.renew()


def deleted(queue: Queue, consumer: Consumer, entry: Entry) -> None:
    queue.client.xdel(entry.stream, entry.id)
    consumer.renew()


@pytest.mark.parametrize(
    "lose", [taken_over, delivered_again, acknowledged, committed_elsewhere, trimmed, deleted], ids=lambda f: f.__name__
)
def test_a_commit_of_a_lost_lease_names_it_and_writes_nothing(
    queue: Queue, lose: Callable[[Queue, Consumer, Entry], None]
) -> None:
    spec = queue.run()
    queue.send(spec, documents=2)
    consumer = queue.consumer()
    (lost,) = queue.take(consumer)
    lose(queue, consumer, lost)
    queue.send(spec)
    (kept,) = queue.take(consumer)
    before = queue.dump()
    commit = full_commit(consumer, [kept, lost])
    committed = commit.send(queue.client)
    assert (committed.outcome, committed.lost) == (CommitOutcome.LOST, ((lost.stream, lost.id),))
    assert queue.dump() == before
    assert full_commit(consumer, [kept]).send(queue.client).outcome is CommitOutcome.OK


@pytest.mark.parametrize("how", ["group destroyed", "flushed"])
def test_a_commit_without_its_group_is_lost_and_writes_nothing_but_the_group(queue: Queue, how: str) -> None:
    spec = queue.run()
    queue.send(spec)
    consumer = queue.consumer()
    entries = queue.take(consumer)
    if how == "flushed":
        queue.client.flushall()
    else:
        for lane in Lane:
            queue.client.xgroup_destroy(queue.keys.jobs(lane), Stage.TOKENIZE)
    consumer.ensure_groups()
    before = queue.dump()
    for lane in Lane:
        queue.client.xgroup_destroy(queue.keys.jobs(lane), Stage.TOKENIZE)
    if how == "flushed":
        queue.client.flushall()
    committed = full_commit(consumer, entries).send(queue.client)
    assert (committed.outcome, committed.lost) == (CommitOutcome.LOST, ((entries[0].stream, entries[0].id),))
    assert queue.dump() == before
    assert consumer.held() == 0
    assert len(queue.take(consumer)) == (0 if how == "flushed" else 1)


def test_an_entry_deleted_by_hand_under_its_lease_is_committed_with_exact_bytes(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec, b"x" * 100)
    queue.send(spec, b"y" * 30)
    consumer = queue.consumer()
    first, _ = queue.take(consumer)
    queue.client.xdel(first.stream, first.id)
    assert Commit(consumer, inputs=[first]).send(queue.client).outcome is CommitOutcome.OK
    assert queue.registry.backlog_bytes() == 30


def test_bytes_heal_when_a_stream_that_was_trimmed_by_hand_runs_empty(queue: Queue) -> None:
    spec = queue.run()
    for _ in range(3):
        queue.send(spec, b"x" * 100)
    queue.client.xtrim(queue.keys.jobs(Lane.BULK), maxlen=1, approximate=False)
    assert queue.registry.backlog_bytes() == 300
    consumer = queue.consumer()
    assert Commit(consumer, inputs=queue.take(consumer)).send(queue.client).outcome is CommitOutcome.OK
    assert queue.registry.backlog_bytes() == 0


def test_parts_of_an_entry_added_again_are_counted_as_its_stream_holds_them(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec, b"x" * 100, documents=2)
    consumer = queue.consumer()
    (entry,) = queue.take(consumer)
    commit = Commit(consumer, inputs=[entry])
    for _ in range(2):
        commit.add_again(entry, [Share("r", 1)], Codec.ARROW, b"y" * 60)
    assert commit.send(queue.client).outcome is CommitOutcome.OK
    assert queue.registry.backlog_bytes() == 120
    parts = queue.take(consumer)
    assert [(part.documents, part.deliveries, len(part.payload)) for part in parts] == [(1, 1, 60)] * 2
    Commit(consumer, inputs=parts).send(queue.client)
    assert queue.registry.backlog_bytes() == 0


def test_outputs_of_a_run_that_is_gone_are_dropped_and_its_inputs_freed(queue: Queue) -> None:
    gone, here = queue.run("gone"), queue.run("here")
    for spec in (gone, here):
        queue.send(spec)
    consumer = queue.consumer()
    entries = queue.take(consumer)
    queue.client.delete(queue.keys.run("gone"))
    commit = Commit(consumer, inputs=entries)
    for run in ("gone", "here"):
        commit.add_result(run, 1, memoryview(b"v"), ttl_ms=1000)
        commit.add_dead_letter(run, letter(0))
        commit.count(run, "succeeded", 1)
    committed = commit.send(queue.client)
    assert [bool(entry_id) for entry_id in committed.added] == [False, False, True, True]
    for key in (queue.keys.run("gone"), queue.keys.results("gone"), queue.keys.dead("gone")):
        assert not queue.client.exists(key)
    assert queue.counters("here") == (1, 1, 1, 0)
    dead_bytes = len(letter(0).encode())
    assert queue.client.hgetall(queue.keys.held) == {b"results:here": b"1", b"dead:here": b"%d" % dead_bytes}
    assert queue.client.hgetall(queue.keys.bytes) == {b"results": b"1", b"dead": b"%d" % dead_bytes}


def outcome(queue: Queue, spec: RunSpec, succeeded: int = 0, failed: int = 0, skipped: int = 0) -> RunStatus | None:
    """Settle one token batch of as many documents; returns the run's status afterwards."""
    consumer = queue.consumer("embedder", Stage.EMBED)
    (entry,) = queue.take(consumer, count=1)
    commit = Commit(consumer, inputs=[entry])
    if succeeded and spec.sink.kind == "parquet":
        commit.add_file(published_file(spec.run, commit.token, succeeded), "/data/out")
    for ordinal in range(failed):
        commit.add_dead_letter(spec.run, letter(ordinal))
    commit.count(spec.run, "succeeded", succeeded)
    commit.count(spec.run, "skipped", skipped)
    assert commit.send(queue.client).outcome is CommitOutcome.OK
    return queue.registry.status(spec.run)


@pytest.mark.parametrize(
    ("sink", "cancel", "last"),
    [
        ("stream", False, RunStatus.COMPLETED),
        ("parquet", False, RunStatus.FINALIZING),
        ("stream", True, RunStatus.CANCELLED),
        ("parquet", True, RunStatus.CANCELLING),
    ],
)
def test_a_run_moves_on_exactly_when_its_last_document_has_its_outcome(
    queue: Queue, sink: str, cancel: bool, last: RunStatus
) -> None:
    spec = queue.run(sink=sink)
    for documents in (1, 2, 3):
        queue.batch(spec, documents=documents)
    queue.send(spec, b"", skipped=1, dead=[letter(7)])
    open_status = RunStatus.IN_PROGRESS
    assert outcome(queue, spec, failed=1) is open_status
    if cancel:
        queue.registry.cancel("r")
        open_status = RunStatus.CANCELLING
    else:
        queue.close(spec)
    assert queue.registry.status("r") is open_status
    assert outcome(queue, spec, succeeded=1, failed=1) is open_status
    assert not queue.registry.state("r").settled
    assert outcome(queue, spec, succeeded=2, skipped=1) is last
    assert queue.counters() == (8, 3, 3, 2)
    assert queue.registry.state("r").settled
    assert (queue.client.ttl(queue.keys.run("r")) > 0) == last.terminal


def test_a_run_whose_input_is_open_never_moves_on(queue: Queue) -> None:
    spec = queue.run()
    queue.batch(spec)
    assert outcome(queue, spec, succeeded=1) is RunStatus.IN_PROGRESS
    queue.close(spec)
    assert queue.registry.status("r") is RunStatus.COMPLETED


def test_a_commit_of_thousands_of_inputs_and_outputs_is_one_step(queue: Queue) -> None:
    n = 4500
    spec = queue.run()
    pipe = queue.client.pipeline(transaction=False)
    fields = {"v": "1", "codec": "arrow", "run": "r", "n": "1", "payload": "x" * 10}
    for _ in range(n):
        pipe.xadd(queue.keys.jobs(Lane.BULK), fields)
    pipe.hincrby(queue.keys.bytes, "jobs:bulk", n * 10)
    pipe.hincrby(queue.keys.run("r"), "input", n)
    pipe.execute()
    consumer = queue.consumer()
    entries = queue.take(consumer, count=n)
    commit = Commit(consumer, inputs=entries)
    for ordinal in range(n):
        commit.add_dead_letter("r", letter(ordinal))
    queue.expire(consumer, entries[-1])
    other = queue.consumer("other")
    assert any(other.claim_expired(Lane.BULK, count=1) for _ in range(4))
    before = queue.dump()
    assert commit.send(queue.client).lost == ((entries[-1].stream, entries[-1].id),)
    assert queue.dump() == before
    commit.inputs.pop()
    assert commit.send(queue.client).outcome is CommitOutcome.OK
    assert queue.counters() == (n, 0, n, 0)
    dead_bytes = sum(len(letter(ordinal).encode()) for ordinal in range(n))
    assert queue.registry.backlog_bytes() == 10 + dead_bytes
    assert queue.client.xlen(queue.keys.dead(spec.run)) == n


def test_a_commit_survives_the_loss_of_the_script_cache(queue: Queue) -> None:
    spec = queue.run()
    consumer = queue.consumer()
    for _ in range(2):
        queue.client.script_flush()
        assert queue.send(spec).outcome is EnqueueOutcome.OK
        entries = queue.take(consumer)
        queue.client.script_flush()
        assert full_commit(consumer, entries).send(queue.client).outcome is CommitOutcome.OK


def test_a_file_is_published_once(queue: Queue) -> None:
    spec = queue.run(sink="parquet")
    queue.batch(spec)
    outcome(queue, spec, succeeded=1)
    (record,) = unpublished(queue.client, queue.keys)
    assert abs(record.age_base_ms - queue.client.time()[0] * 1000) < 60_000
    assert published(queue.client, queue.keys, record)
    before = queue.dump()
    assert not published(queue.client, queue.keys, record)
    assert queue.dump() == before
    state = queue.registry.state("r")
    assert (state.committed_files, state.published_files) == (1, 1)
    assert list(unpublished(queue.client, queue.keys)) == []


def test_publishing_a_file_of_a_run_that_is_gone_leaves_no_run_behind(queue: Queue) -> None:
    spec = queue.run(sink="parquet")
    queue.batch(spec)
    outcome(queue, spec, succeeded=1)
    queue.client.delete(queue.keys.run("r"))
    (record,) = unpublished(queue.client, queue.keys)
    assert published(queue.client, queue.keys, record)
    assert not queue.client.exists(queue.keys.run("r"))


def test_unreadable_commit_records_do_not_hide_the_others(queue: Queue) -> None:
    good = published_file("r", "0" * 32)
    records: list[dict[str, str | bytes]] = [
        {"dataset": "/d", "file": b"{"},
        {"dataset": "/d"},
        *([{"dataset": "/d", "file": good.encode()}] * 5),
        {"file": good.encode()},
    ]
    for record in records:
        queue.client.xadd(queue.keys.commits, record)
    assert [record.file for record in unpublished(queue.client, queue.keys, page=2)] == [good] * 5


@pytest.fixture
def full_server(server: Server) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client
        client.config_set("maxmemory", 0)


def test_a_full_server_refuses_what_grows_it_and_takes_what_empties_it(full_server: redis.Redis) -> None:
    queue = Queue(full_server)
    spec = queue.run()
    for _ in range(3):
        queue.send(spec)
    consumer = queue.consumer()
    first, second, third = queue.take(consumer)
    full_server.config_set("maxmemory", 1)
    before = queue.dump()
    results = Commit(consumer, inputs=[first])
    results.add_result("r", 1, memoryview(b"v"), ttl_ms=1000)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        results.send(full_server)
    assert queue.send(spec).outcome is EnqueueOutcome.FULL
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        queue.run("another")
    assert queue.dump() == before
    tokens = Commit(consumer, inputs=[second])
    tokens.add_batch(Lane.BULK, [Share("r", 1)], memoryview(b"tokens"))
    assert tokens.send(full_server).outcome is CommitOutcome.OK
    files = Commit(consumer, inputs=[third])
    files.add_file(published_file("r", files.token), "/data/out")
    assert files.send(full_server).outcome is CommitOutcome.OK
    (record,) = unpublished(full_server, queue.keys)
    assert published(full_server, queue.keys, record)
    full_server.config_set("maxmemory", 0)
    assert results.send(full_server).outcome is CommitOutcome.OK


def test_a_worker_can_start_live_and_end_on_a_full_server(full_server: redis.Redis) -> None:
    queue = Queue(full_server)
    spec = queue.run()
    queue.send(spec)
    full_server.config_set("maxmemory", 1)
    bind_model(full_server, queue.keys, "fingerprint", {"model_id": "m"})
    consumer = queue.consumer()
    heartbeat: dict[str, Any] = {"host": "h", "state": "idle", "state_s": 0.0, "held": 0, "documents": 0, "tokens": 0}
    beat(
        full_server,
        queue.keys,
        Heartbeat(consumer="c", role="tokenizer", pid=1, started_at=0.0, at=0.0, **heartbeat),
    )
    with exclusive(full_server, queue.keys, "sweep", ttl_ms=1000) as held:
        assert held
    assert undelivered(full_server, queue.keys, Stage.TOKENIZE, Lane.BULK) == 1
    assert queue.registry.state("r").spec == spec
    assert [state.spec for state in queue.registry.runs()] == [spec]
    (entry,) = queue.take(consumer)
    assert consumer.renew() == []
    queue.expire(consumer, entry)
    other = queue.consumer("other")
    (entry,) = other.claim_expired(Lane.BULK, count=1)
    assert Commit(other, inputs=[entry]).send(full_server).outcome is CommitOutcome.OK
    consumer.release_all()
    assert queue.registry.cancel("r") is RunStatus.CANCELLING


@pytest.mark.parametrize("append_only", ["yes", "no"])
def test_a_durability_that_the_server_cannot_give_is_refused_before_the_run_exists(
    start_server: Callable[..., Server], append_only: str
) -> None:
    server = start_server(args=("--appendonly", append_only))
    with server.client() as client:
        queue = Queue(client)
        spec = RunSpec(run="r", queue="q", sink=StreamSink(), created_at=1.0, durability=Durability.FSYNC)
        if append_only == "no" or (server.kind == "redis" and "7.0" in str(client.info("server")["redis_version"])):
            with pytest.raises(UsageError, match="durability fsync needs"):
                queue.registry.create(spec)
            assert queue.dump() == {}
            return
        queue.registry.create(spec)
        queue.send(spec)
        consumer = queue.consumer()
        commit = Commit(consumer, inputs=queue.take(consumer))
        assert commit.send(client, durability=Durability.FSYNC).outcome is CommitOutcome.OK
        assert commit.send(client, durability=Durability.FSYNC).outcome is CommitOutcome.DUP


def test_a_commit_that_no_replica_confirms_is_not_called_done_and_can_be_sent_again(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "DURABLE_TIMEOUT_MS", 10)
    spec = queue.run()
    queue.send(spec)
    consumer = queue.consumer()
    commit = full_commit(consumer, queue.take(consumer))
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError, match="no replica"):
            commit.send(queue.client, durability=Durability.REPLICA)
    assert queue.registry.state("r").counters.succeeded == 1
    assert commit.send(queue.client).outcome is CommitOutcome.DUP


def test_two_queues_on_one_server_do_not_meet(redis_client: redis.Redis) -> None:
    one, two = Queue(redis_client, "one"), Queue(redis_client, "two")
    for queue in (one, two):
        queue.send(queue.run(), b"job of " + queue.keys.queue.encode())
    before = {key: value for key, value in dump(redis_client).items() if b"{two}" in key}
    consumer = one.consumer()
    full_commit(consumer, one.take(consumer)).send(redis_client)
    after = {key: value for key, value in dump(redis_client).items() if b"{two}" in key}
    assert after == before
    assert LEASE_MS < PLENTY
