"""Runs: registered once, fed exactly once by one producer at a time, counted exactly, settled exactly."""

from __future__ import annotations

import pytest
import redis
from embedq_broker.consume import MAX_ENTRY_DOCUMENTS
from embedq_broker.registry import ABANDONED_S, EnqueueOutcome
from embedq_schemas.errors import DocumentErrorCode, RunNotFoundError, UsageError
from embedq_schemas.run import RunCounters, RunStatus
from queues import PLENTY, Queue, letter


@pytest.fixture
def queue(redis_client: redis.Redis) -> Queue:
    return Queue(redis_client)


def test_a_run_is_registered_once_and_keeps_its_first_specification(queue: Queue) -> None:
    first = queue.run(sink="parquet")
    before = queue.dump()
    again = queue.registry.create(first.model_copy(update={"created_at": 9.0}))
    assert again == first
    assert queue.dump() == before
    state = queue.registry.state("r")
    assert (state.spec, state.status, state.counters) == (first, RunStatus.VALIDATING, RunCounters())
    assert (state.position, state.error, state.input_closed, state.dead_letters) == (None, None, False, 0)
    assert queue.registry.open_datasets() == ["r"]
    assert queue.run("s", sink="stream").run == "s"
    assert queue.registry.open_datasets() == ["r"]


def test_an_unknown_run_is_not_found_and_a_bad_name_is_refused(queue: Queue) -> None:
    for ask in (queue.registry.state, queue.registry.cancel):
        with pytest.raises(RunNotFoundError):
            ask("nobody")
        with pytest.raises(UsageError):
            ask("no/body")
    assert queue.registry.status("nobody") is None


def test_a_job_its_outcomes_and_its_position_arrive_together(queue: Queue) -> None:
    spec = queue.run()
    letters = [letter(3), letter(4)]
    assert queue.send(spec, b"x" * 100, documents=2, skipped=3, settled=4, dead=letters).outcome is EnqueueOutcome.OK
    state = queue.registry.state("r")
    assert state.counters == RunCounters(input=11, succeeded=0, failed=2, skipped=3)
    assert (state.status, state.position, state.dead_letters) == (RunStatus.IN_PROGRESS, "1", 2)
    assert [found for _, found in queue.registry.dead_letters("r")] == letters
    assert queue.registry.backlog_bytes() == 100 + sum(len(each.encode()) for each in letters)
    ((_, fields),) = queue.client.xrange(queue.keys.jobs(spec.lane))
    expected = {b"v": b"1", b"codec": b"arrow", b"run": b"r", b"n": b"2", b"payload": b"x" * 100}
    assert fields == expected


def test_a_job_sent_again_after_a_lost_reply_adds_nothing(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec, skipped=1, dead=[letter(1)])
    before = queue.dump()
    queue.positions["r"] = 0
    assert queue.send(spec, skipped=1, dead=[letter(1)]).outcome is EnqueueOutcome.DUP
    assert queue.dump() == before
    queue.positions["r"] = 1
    assert queue.close(spec).outcome is EnqueueOutcome.OK
    before = queue.dump()
    assert queue.close(spec).outcome is EnqueueOutcome.DUP
    assert queue.dump() == before


def test_a_second_producer_of_a_run_is_fenced_off(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec)
    queue.send(spec)
    before = queue.dump()
    for position in ("1", "7"):
        sent = queue.registry.enqueue(spec, expected=position, position="8", max_backlog_bytes=PLENTY, payload=b"x")
        assert (sent.outcome, sent.detail) == (EnqueueOutcome.FENCED, "2")
    assert queue.dump() == before


def test_a_full_queue_takes_no_more_and_an_empty_one_takes_any_job(queue: Queue) -> None:
    spec = queue.run()
    assert queue.send(spec, b"x" * 100, max_backlog_bytes=10).outcome is EnqueueOutcome.OK
    before = queue.dump()
    sent = queue.send(spec, b"x" * 51, max_backlog_bytes=150)
    assert (sent.outcome, sent.detail) == (EnqueueOutcome.FULL, "100")
    assert queue.dump() == before
    assert queue.send(spec, b"", max_backlog_bytes=150, skipped=1).outcome is EnqueueOutcome.OK
    assert queue.send(spec, b"x" * 50, max_backlog_bytes=150).outcome is EnqueueOutcome.OK
    assert queue.registry.backlog_bytes() == 150


def test_a_run_that_ended_or_is_gone_takes_no_more(queue: Queue) -> None:
    spec = queue.run()
    queue.send(spec)
    queue.registry.cancel("r")
    before = queue.dump()
    sent = queue.send(spec)
    assert (sent.outcome, sent.detail) == (EnqueueOutcome.STOPPED, "cancelling")
    queue.positions["r"] = 0
    assert queue.send(spec).outcome is EnqueueOutcome.DUP
    assert queue.dump() == before
    queue.client.flushall()
    assert queue.send(spec).outcome is EnqueueOutcome.GONE
    assert queue.dump() == {}


def test_a_job_of_more_documents_than_an_entry_may_hold_is_refused(queue: Queue) -> None:
    spec = queue.run()
    with pytest.raises(UsageError):
        queue.send(spec, documents=MAX_ENTRY_DOCUMENTS + 1)
    assert queue.send(spec, documents=MAX_ENTRY_DOCUMENTS).outcome is EnqueueOutcome.OK


@pytest.mark.parametrize(("sink", "status"), [("stream", RunStatus.COMPLETED), ("parquet", RunStatus.FINALIZING)])
def test_an_input_without_work_settles_when_it_closes(queue: Queue, sink: str, status: RunStatus) -> None:
    empty = queue.run("empty", sink=sink)
    queue.close(empty)
    assert queue.registry.status("empty") is status
    bad = queue.run("bad", sink=sink)
    queue.send(bad, b"", skipped=2, dead=[letter(2)])
    assert queue.registry.status("bad") is RunStatus.IN_PROGRESS
    queue.close(bad)
    assert queue.registry.status("bad") is status
    assert queue.counters("bad") == (3, 0, 1, 2)
    assert queue.registry.state("bad").settled
    assert (queue.client.ttl(queue.keys.run("bad")) > 0) == status.terminal


def test_a_cancelled_stream_run_without_open_work_is_cancelled_at_once(queue: Queue) -> None:
    queue.run("idle")
    assert queue.registry.cancel("idle") is RunStatus.CANCELLED
    assert queue.registry.cancel("idle") is RunStatus.CANCELLED
    assert queue.client.ttl(queue.keys.run("idle")) > 0
    busy = queue.run("busy")
    queue.send(busy)
    assert queue.registry.cancel("busy") is RunStatus.CANCELLING
    assert queue.registry.state("busy").input_closed
    queue.run("files", sink="parquet")
    assert queue.registry.cancel("files") is RunStatus.CANCELLING


def test_a_transition_happens_only_from_the_named_states(queue: Queue) -> None:
    queue.run()
    move = queue.registry.transition
    assert move("r", RunStatus.FAILED, [RunStatus.FINALIZING], error="no") == (False, RunStatus.VALIDATING)
    assert queue.registry.state("r").error is None
    assert move("r", RunStatus.FAILED, [RunStatus.VALIDATING], error="disk gone") == (True, RunStatus.FAILED)
    state = queue.registry.state("r")
    assert (state.status, state.error) == (RunStatus.FAILED, "disk gone")
    assert queue.client.ttl(queue.keys.run("r")) > 0


def test_all_in_batches_follows_the_jobs_stage(queue: Queue) -> None:
    spec = queue.run()
    queue.batch(spec, documents=2)
    queue.send(spec, b"", skipped=1)
    assert not queue.registry.all_in_batches("r")
    queue.close(spec)
    assert queue.registry.all_in_batches("r")
    assert not queue.registry.all_in_batches("nobody")


def test_runs_are_listed_newest_first_and_expired_ones_take_their_dead_letters_with_them(queue: Queue) -> None:
    for name in ("a", "b", "c"):
        queue.send(queue.run(name), b"", dead=[letter(0)])
        queue.client.zincrby(queue.keys.runs, ord(name), name)
    assert [state.spec.run for state in queue.registry.runs()] == ["c", "b", "a"]
    queue.client.delete(queue.keys.run("b"))
    assert [state.spec.run for state in queue.registry.runs()] == ["c", "a"]
    assert not queue.client.exists(queue.keys.dead("b"))
    queue.client.delete(queue.keys.run("a"))
    queue.registry.forget_expired()
    assert not queue.client.exists(queue.keys.dead("a"))
    assert queue.client.zrange(queue.keys.runs, 0, -1) == [b"c"]
    assert queue.registry.state("c").dead_letters == 1


def test_a_run_whose_producer_went_away_expires_unless_it_is_a_dataset_or_closed(queue: Queue) -> None:
    for name in ("gone", "fresh", "closed"):
        queue.send(queue.run(name))
    queue.send(queue.run("dataset", sink="parquet"))
    assert queue.registry.enqueue(
        queue.registry.state("closed").spec, expected="1", position="1", max_backlog_bytes=PLENTY, close=True
    )
    for name in ("gone", "closed", "dataset"):
        queue.client.hincrby(queue.keys.run(name), "updated_ms", -(ABANDONED_S + 7200) * 1000)
    queue.registry.forget_expired()
    states = {state.spec.run: state for state in queue.registry.runs()}
    assert (states["gone"].status, states["gone"].error) == (
        RunStatus.EXPIRED,
        "its producer has sent nothing for 26 hours",
    )
    assert {states[name].status for name in ("fresh", "closed", "dataset")} == {RunStatus.IN_PROGRESS}
    assert queue.client.ttl(queue.keys.run("gone")) > 0


def test_open_datasets_forgets_those_that_ended(queue: Queue) -> None:
    for name in ("a", "b", "c"):
        queue.run(name, sink="parquet")
    queue.registry.transition("a", RunStatus.FAILED, [RunStatus.VALIDATING])
    queue.client.delete(queue.keys.run("b"))
    assert queue.registry.open_datasets() == ["c"]
    assert queue.client.smembers(queue.keys.open_datasets) == {b"c"}


def test_dead_letters_come_in_pages(queue: Queue) -> None:
    letters = [letter(i) for i in range(7)]
    queue.send(queue.run(), b"", dead=letters)
    found, after = [], "-"
    while page := queue.registry.dead_letters("r", after=after, count=3):
        assert len(page) <= 3
        found += [each for _, each in page]
        after = page[-1][0]
    assert found == letters


def test_an_unreadable_dead_letter_still_is_one_so_that_its_run_can_end(queue: Queue) -> None:
    queue.send(queue.run(), b"", dead=[letter(0)])
    queue.client.xadd(queue.keys.dead("r"), {"other": "field"})
    (_, good), (_, bad) = queue.registry.dead_letters("r")
    assert good == letter(0)
    assert (bad.ordinal, bad.code) == (-1, DocumentErrorCode.UNREADABLE_ERROR)


def test_dead_letters_count_as_backlog_and_hold_back_a_producer(queue: Queue) -> None:
    spec = queue.run()
    size = len(letter(0).encode())
    assert queue.send(spec, b"", dead=[letter(0)], max_backlog_bytes=size).outcome is EnqueueOutcome.OK
    refused = queue.send(spec, b"", dead=[letter(1)], max_backlog_bytes=size)
    assert refused.outcome is EnqueueOutcome.FULL
    assert queue.registry.state("r").dead_letters == 1


def test_a_run_of_a_newer_version_does_not_hide_the_others(queue: Queue) -> None:
    queue.run("old")
    queue.run("new")
    queue.client.hset(queue.keys.run("new"), "spec", b'{"version": 99}')
    assert [state.spec.run for state in queue.registry.runs()] == ["old"]


def test_restore_counts_what_the_dataset_proves_and_drops_the_rest(queue: Queue) -> None:
    spec = queue.run(sink="parquet")
    queue.batch(spec, documents=2)
    queue.send(spec, dead=[letter(1)])
    queue.registry.restore(spec, RunCounters(succeeded=5, failed=1, skipped=2, tokens=50), files=3)
    state = queue.registry.state("r")
    assert state.counters == RunCounters(input=0, succeeded=5, failed=1, skipped=2, tokens=50)
    assert (state.status, state.position, state.dead_letters) == (RunStatus.VALIDATING, None, 0)
    assert (state.committed_files, state.published_files) == (3, 3)
    assert queue.registry.backlog_bytes() == 0
    queue.positions.clear()
    queue.send(spec, b"", settled=8)
    queue.close(spec)
    assert queue.registry.status("r") is RunStatus.FINALIZING
