"""Leases: read once, renewed by their holder alone, taken over when they run out, adopted after a lost reply."""

from __future__ import annotations

import threading
import time

import pytest
import redis
from embedq_broker.commit import Commit, CommitOutcome
from embedq_broker.connect import connect
from embedq_broker.consume import (
    MAX_ENTRY_DOCUMENTS,
    Share,
    Stage,
    envelope,
    parse_entry,
    release_consumer,
    undelivered,
)
from embedq_schemas.errors import UnsupportedVersionError
from embedq_schemas.job import Codec
from embedq_schemas.names import LANES, Lane
from embedq_schemas.run import RunSpec, StreamSink
from queues import LEASE_MS, Queue, dump


@pytest.fixture
def queue(redis_client: redis.Redis) -> Queue:
    return Queue(redis_client)


def idle_ms(queue: Queue, stream: str, entry_id: str, stage: Stage = Stage.TOKENIZE) -> int:
    (found,) = queue.client.xpending_range(stream, stage, entry_id, entry_id, 1)
    return int(found["time_since_delivered"])


def holder(queue: Queue, stream: str, entry_id: str) -> tuple[str, int] | None:
    found = queue.client.xpending_range(stream, Stage.TOKENIZE, entry_id, entry_id, 1)
    return (found[0]["consumer"].decode(), found[0]["times_delivered"]) if found else None


def test_jobs_sent_before_any_worker_are_read_in_order_once(queue: Queue) -> None:
    spec = queue.run()
    for number in range(5):
        queue.send(spec, f"job {number}".encode(), documents=number + 1)
    one, two = queue.consumer("one"), queue.consumer("two")
    first, second = queue.take(one, count=3), queue.take(two)
    assert [entry.payload.decode() for entry in first + second] == [f"job {number}" for number in range(5)]
    assert [entry.documents for entry in first] == [1, 2, 3]
    assert {(e.deliveries, e.codec, e.shares[0].run, e.fault, e.lane) for e in first} == {
        (1, "arrow", "r", None, Lane.BULK)
    }
    assert (one.held(), two.held()) == (3, 2)
    assert queue.take(one) == []
    assert undelivered(queue.client, queue.keys, Stage.TOKENIZE, Lane.BULK) == 0


def test_undelivered_counts_what_nobody_holds_whatever_was_deleted(queue: Queue) -> None:
    spec = queue.run()
    assert undelivered(queue.client, queue.keys, Stage.TOKENIZE, Lane.BULK) == 0
    for _ in range(4):
        queue.send(spec)
    assert undelivered(queue.client, queue.keys, Stage.TOKENIZE, Lane.BULK) == 4
    consumer = queue.consumer()
    first, second = queue.take(consumer, count=2)
    assert undelivered(queue.client, queue.keys, Stage.TOKENIZE, Lane.BULK) == 2
    Commit(consumer, inputs=[second]).send(queue.client)
    assert undelivered(queue.client, queue.keys, Stage.TOKENIZE, Lane.BULK) == 2
    assert first.deliveries == 1


def test_lanes_are_read_apart(queue: Queue) -> None:
    spec = queue.run()
    fast = RunSpec(run="f", queue="q", sink=StreamSink(), created_at=1.0, lane=Lane.INTERACTIVE)
    queue.registry.create(fast)
    queue.send(spec, b"slow")
    queue.send(fast, b"fast")
    consumer = queue.consumer()
    (entry,) = queue.take(consumer, lane=Lane.INTERACTIVE)
    assert (entry.payload, entry.lane) == (b"fast", Lane.INTERACTIVE)
    (entry,) = consumer.read(queue.client, LANES, count=1, block_ms=None)
    assert (entry.payload, entry.lane) == (b"slow", Lane.BULK)


def test_an_expired_lease_is_taken_over_with_its_count_raised_and_a_live_one_is_not(queue: Queue) -> None:
    spec = queue.run()
    for _ in range(3):
        queue.send(spec)
    one, two = queue.consumer("one"), queue.consumer("two")
    entries = queue.take(one)
    queue.expire(one, entries[1])
    (claimed,) = two.claim_expired(Lane.BULK, count=10)
    assert (claimed.id, claimed.deliveries, claimed.payload) == (entries[1].id, 2, entries[1].payload)
    assert two.claim_expired(Lane.BULK, count=10) == []
    queue.expire(two, claimed)
    (again,) = one.claim_expired(Lane.BULK, count=10)
    assert again.deliveries == 3
    assert holder(queue, again.stream, again.id) == ("one", 3)


def test_a_sweep_goes_on_where_the_last_one_stopped(queue: Queue) -> None:
    spec = queue.run()
    for _ in range(10):
        queue.send(spec)
    one, two = queue.consumer("one"), queue.consumer("two")
    for entry in queue.take(one):
        queue.expire(one, entry)
    taken = []
    for _ in range(5):
        taken += two.claim_expired(Lane.BULK, count=3)
    assert len({entry.id for entry in taken}) == 10


def test_a_consumer_with_room_for_one_finds_the_one_lease_that_ran_out_among_many(queue: Queue) -> None:
    spec = queue.run()
    for _ in range(500):
        queue.send(spec)
    one, two = queue.consumer("one"), queue.consumer("two")
    entries = queue.take(one, count=500)
    queue.expire(one, entries[400])
    assert [entry.id for entry in two.claim_expired(Lane.BULK, count=1)] == [entries[400].id]


def test_a_deleted_entry_is_skipped_by_a_sweep(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec)
    queue.send(spec)
    one, two = queue.consumer("one"), queue.consumer("two")
    entries = queue.take(one)
    for entry in entries:
        queue.expire(one, entry)
    queue.client.xdel(entries[0].stream, entries[0].id)
    assert [entry.id for entry in two.claim_expired(Lane.BULK, count=10)] == [entries[1].id]


def test_adopt_returns_what_a_lost_reply_stranded_and_not_what_is_held(queue: Queue) -> None:
    spec = queue.run()
    for _ in range(5):
        queue.send(spec)
    consumer, other = queue.consumer("c"), queue.consumer("other")
    held = queue.take(consumer, count=1)
    others = queue.take(other, count=1)
    queue.client.xreadgroup(Stage.TOKENIZE, "c", {queue.keys.jobs(Lane.BULK): ">"}, count=2)
    assert len(consumer.adopt(Lane.BULK, count=1)) == 1
    (stranded,) = consumer.adopt(Lane.BULK, count=10)
    assert (stranded.deliveries, stranded.payload) == (2, b"job")
    assert stranded.id not in {entry.id for entry in held + others}
    assert consumer.adopt(Lane.BULK, count=10) == []
    assert consumer.held() == 3
    assert Commit(consumer, inputs=[*held, stranded]).send(queue.client).outcome is CommitOutcome.OK


def test_a_lone_consumer_sweeps_up_what_a_lost_reply_stranded_on_itself_and_not_what_it_holds(queue: Queue) -> None:
    spec = queue.run()
    for _ in range(2):
        queue.send(spec)
    consumer = queue.consumer()
    held, stranded = queue.take(consumer)
    consumer.forget([stranded])
    for entry in (held, stranded):
        queue.expire(consumer, entry)
    (swept,) = consumer.claim_expired(Lane.BULK, count=10)
    assert (swept.id, swept.deliveries) == (stranded.id, 2)
    assert Commit(consumer, inputs=[held, swept]).send(queue.client).outcome is CommitOutcome.OK


def test_renewing_keeps_a_lease_and_its_count_and_never_takes_one_back(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec)
    queue.send(spec)
    one, two = queue.consumer("one"), queue.consumer("two")
    kept, lost = queue.take(one)
    queue.expire(one, kept)
    queue.expire(one, lost)
    assert [entry.id for entry in two.claim_expired(Lane.BULK, count=1)] == [kept.id]
    kept, lost = lost, kept
    assert one.renew() == [(lost.stream, lost.id)]
    assert holder(queue, lost.stream, lost.id) == ("two", 2)
    assert holder(queue, kept.stream, kept.id) == ("one", 1)
    assert idle_ms(queue, kept.stream, kept.id) < LEASE_MS
    assert two.claim_expired(Lane.BULK, count=10) == []
    assert one.renew() == []
    assert one.held() == 1


def test_released_entries_are_claimable_at_once_and_not_renewed(queue: Queue) -> None:
    spec = queue.run()
    for _ in range(3):
        queue.send(spec)
    one, two = queue.consumer("one"), queue.consumer("two")
    first, *_ = queue.take(one)
    one.release([first])
    assert one.held() == 2
    one.renew()
    assert [entry.id for entry in two.claim_expired(Lane.BULK, count=10)] == [first.id]
    one.release_all()
    assert one.held() == 0
    assert len(two.claim_expired(Lane.BULK, count=10)) == 2


def test_releasing_what_another_took_over_leaves_it_alone(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec)
    one, two, three = (queue.consumer(name) for name in ("one", "two", "three"))
    (entry,) = queue.take(one)
    queue.expire(one, entry)
    two.claim_expired(Lane.BULK, count=1)
    one.release([entry])
    assert three.claim_expired(Lane.BULK, count=1) == []


def test_forgetting_an_old_lease_keeps_the_consumers_own_later_one(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec)
    consumer = queue.consumer()
    (old,) = queue.take(consumer)
    consumer.forget([old])
    (new,) = consumer.adopt(Lane.BULK, count=1)
    assert Commit(consumer, inputs=[old]).send(queue.client).outcome is CommitOutcome.LOST
    assert consumer.held() == 1
    queue.expire(consumer, new)
    consumer.renew()
    assert idle_ms(queue, new.stream, new.id) < LEASE_MS
    assert Commit(consumer, inputs=[new]).send(queue.client).outcome is CommitOutcome.OK
    assert consumer.held() == 0


def test_a_dead_consumers_leases_are_released_in_all_lanes_and_its_name_goes(queue: Queue) -> None:
    spec = queue.run()
    pipe = queue.client.pipeline(transaction=False)
    for _ in range(2300):
        pipe.xadd(
            queue.keys.jobs(Lane.BULK), dict(zip(["v", "codec", "run", "n"], ["1", "arrow", "r", "1"], strict=True))
        )
    pipe.execute()
    dead, alive = queue.consumer("dead"), queue.consumer("alive")
    assert len(queue.take(dead, count=2300)) == 2300
    queue.send(spec)
    (other,) = queue.take(alive)

    def released() -> int:
        return release_consumer(queue.client, queue.keys, Stage.TOKENIZE, "dead", lease_ms=LEASE_MS)

    assert released() == 2300
    assert len(alive.claim_expired(Lane.BULK, count=3000)) == 2300
    assert holder(queue, other.stream, other.id) == ("alive", 1)
    assert released() == 0
    names = {info["name"] for info in queue.client.xinfo_consumers(queue.keys.jobs(Lane.BULK), Stage.TOKENIZE)}
    assert names == {b"alive"}
    queue.client.flushall()
    assert released() == 0


@pytest.mark.parametrize("how", ["group destroyed", "flushed"])
def test_losing_the_group_loses_the_leases_and_not_the_worker(queue: Queue, how: str) -> None:
    spec = queue.run()
    queue.send(spec, b"old")
    consumer = queue.consumer()
    queue.take(consumer)

    def lose() -> None:
        if how == "flushed":
            queue.client.flushall()
        else:
            queue.client.xgroup_destroy(queue.keys.jobs(Lane.BULK), Stage.TOKENIZE)

    lose()
    assert len(consumer.renew()) == 1
    lose()
    assert consumer.claim_expired(Lane.BULK, count=1) == []
    lose()
    assert consumer.adopt(Lane.BULK, count=1) == []
    lose()
    assert queue.take(consumer) == []
    assert [entry.payload for entry in queue.take(consumer)] == ([] if how == "flushed" else [b"old"])


@pytest.mark.parametrize("how", ["group destroyed", "flushed"])
def test_losing_the_group_while_waiting_does_not_end_the_reader(queue: Queue, redis_url: str, how: str) -> None:
    queue.run()
    consumer = queue.consumer()
    result: list[object] = []

    def wait() -> None:
        with connect(redis_url, role="reader", blocking=True) as reader:
            try:
                result.append(consumer.read(reader, [Lane.BULK], count=1, block_ms=10_000))
            except redis.RedisError as error:
                result.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not any(
        b"xreadgroup" in str(each["cmd"]).encode() and "b" in each["flags"] for each in queue.client.client_list()
    ):
        time.sleep(0.01)
    if how == "flushed":
        queue.client.flushall()
    else:
        queue.client.xgroup_destroy(queue.keys.jobs(Lane.BULK), Stage.TOKENIZE)
    thread.join(5)
    assert result == [[]]
    spec = queue.run("s")
    queue.send(spec, b"next")
    assert [entry.payload for entry in queue.take(consumer)] == [b"next"]


def fields(**change: str | None) -> dict[bytes, bytes]:
    good = {"v": "1", "codec": "arrow", "run": "a,b", "n": "2,3", "payload": "p"}
    return {k.encode(): v.encode() for k, v in (good | change).items() if v is not None}


def test_an_envelope_says_whose_documents_the_payload_holds() -> None:
    flat = envelope(Codec.ARROW, [Share("a", 2), Share("b", 3)])
    written = {str(k).encode(): str(v).encode() for k, v in zip(flat[::2], flat[1::2], strict=True)}
    entry = parse_entry("s", Lane.BULK, b"1-1", written | {b"payload": b"p"}, 4)
    assert entry.shares == (Share("a", 2), Share("b", 3))
    assert (entry.documents, entry.codec, entry.payload, entry.deliveries, entry.fault) == (5, "arrow", b"p", 4, None)


@pytest.mark.parametrize(
    "change",
    [
        {"run": None},
        {"n": None},
        {"n": ""},
        {"n": "2"},
        {"n": "2,x"},
        {"n": "2,0"},
        {"n": "2,-3"},
        {"n": "1," + "9" * 30},
        {"n": "1," + "9" * 6000},
        {"n": f"1,{MAX_ENTRY_DOCUMENTS}"},
        {"run": ""},
        {"run": "a,b/c"},
        {"run": "a,b\n"},
        {"run": "a,b\ud7ff"},
    ],
)
def test_an_envelope_that_names_no_usable_runs_has_a_fault_and_no_shares(change: dict[str, str | None]) -> None:
    entry = parse_entry("s", Lane.BULK, b"1-1", fields(**change), 1)
    assert entry.fault is not None
    assert entry.shares == ()


def test_another_version_or_a_missing_payload_is_a_fault_of_known_runs() -> None:
    entry = parse_entry("s", Lane.BULK, b"1-1", fields(v="2"), 1)
    assert isinstance(entry.fault, UnsupportedVersionError)
    assert entry.documents == 5
    for change in ({"v": None}, {"payload": None}):
        entry = parse_entry("s", Lane.BULK, b"1-1", fields(**change), 1)
        assert entry.fault is not None
        assert entry.documents == 5


def test_a_foreign_entry_is_read_with_its_fault_and_can_be_settled(queue: Queue) -> None:
    consumer = queue.consumer()
    queue.client.xadd(queue.keys.jobs(Lane.BULK), {"\xff": "what"})
    (entry,) = queue.take(consumer)
    assert entry.fault is not None
    assert Commit(consumer, inputs=[entry]).send(queue.client).outcome is CommitOutcome.OK
    assert queue.client.xlen(queue.keys.jobs(Lane.BULK)) == 0
    assert queue.keys.bytes.encode() not in dump(queue.client)


def test_what_is_in_hand_is_not_taken_twice_from_a_server_that_forgot_delivering_it(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec, documents=3)
    consumer = queue.consumer()
    (entry,) = queue.take(consumer)
    # A replica that took over before it heard of the delivery.
    queue.client.xack(entry.stream, Stage.TOKENIZE, entry.id)
    queue.client.xgroup_setid(entry.stream, Stage.TOKENIZE, "0")
    assert queue.take(consumer) == []
    assert holder(queue, entry.stream, entry.id) == (consumer.name, 1)
    # The lease is good for one commit; a copy that was dropped meanwhile comes again.
    consumer.forget([entry])
    queue.client.xack(entry.stream, Stage.TOKENIZE, entry.id)
    queue.client.xgroup_setid(entry.stream, Stage.TOKENIZE, "0")
    (again,) = queue.take(consumer)
    assert Commit(consumer, inputs=[again]).send(queue.client).outcome is CommitOutcome.OK
