"""Runs of the clients: submitted once however often it is tried, read from anywhere, by pages or in order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis
from embedq_broker.keys import Keys
from embedq_broker.registry import Enqueued, EnqueueOutcome, Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.client import documents
from embedq_producer.client.flows import Flows
from embedq_producer.client.submission import Submission, run_spec
from embedq_producer.client.watch import Waiter
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import (
    DocumentErrorCode,
    NoWorkerError,
    RunCancelledError,
    RunConflictError,
    RunExpiredError,
    RunFailedError,
    RunNotFoundError,
    UsageError,
)
from embedq_schemas.names import Lane
from embedq_schemas.run import ParquetSink, RunSpec, RunStatus
from faces import FACES
from services import Service
from waiting import wait_until

from embedq import Client


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest, service: Service) -> Iterator[Any]:
    with FACES[request.param](service.settings) as client:
        yield client


@pytest.fixture(params=FACES)
def idle(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Any]:
    """A client of a queue without workers."""
    with FACES[request.param](BrokerSettings(redis_url=redis_url, queue="q", max_backlog_bytes=1 << 20)) as client:
        yield client


@pytest.fixture
def registry(redis_client: redis.Redis) -> Registry:
    return Registry(redis_client, Keys("q"))


def texts_of(count: int) -> list[str]:
    return [f"text {number}" for number in range(count)]


def test_results_are_read_by_pages_again_and_again_and_from_any_cursor(face: Any, service: Service) -> None:
    texts = texts_of(2500)
    handle = face.submit(texts, ids=[f"id-{number}" for number in range(2500)])
    pages = list(handle.results())
    assert len(pages) >= 2
    rows = {row["ordinal"]: row for page in pages for row in page.batch.table.to_pylist()}
    assert sum(page.batch.num_documents for page in pages) == len(rows) == 2500
    assert all(row["id"] == f"id-{ordinal}" for ordinal, row in rows.items())
    np.testing.assert_array_equal([rows[n]["vector"] for n in range(2500)], service.vectors(texts))
    with Client(settings=service.settings) as other:
        same = other.attach(handle.run)
        assert [page.cursor for page in same.results()] == [page.cursor for page in pages]
        assert [page.cursor for page in same.results(after=pages[0].cursor)] == [page.cursor for page in pages[1:]]
        assert list(same.results(after=pages[-1].cursor)) == []


def test_pages_come_while_the_run_still_takes_documents(face: Any) -> None:
    gate = threading.Event()

    def texts() -> Iterator[dict[str, Any]]:
        yield from ({"text": text} for text in texts_of(documents.JOB_DOCUMENTS + 1))
        assert gate.wait(30)
        yield {"text": "last"}

    sender = threading.Thread(target=lambda: face.submit(texts(), run="open"))
    sender.start()
    try:
        deadline = time.monotonic() + 30
        while True:
            assert time.monotonic() < deadline
            try:
                first = next(face.attach("open").results())
                break
            except RunNotFoundError:
                time.sleep(0.02)
        assert first.batch.num_documents > 0
    finally:
        gate.set()
        sender.join()
    rest = list(face.attach("open").results(after=first.cursor))
    total = first.batch.num_documents + sum(page.batch.num_documents for page in rest)
    assert total == documents.JOB_DOCUMENTS + 2
    face.attach("open").delete()


def test_ordered_results_hold_every_row_and_every_failure(face: Any, service: Service) -> None:
    texts = ["a", "x " * 100, "b"] * 500
    handle = face.submit(texts, options=EncodingOptions(on_long=OnLong.ERROR))
    found = handle.ordered()
    good = [n for n in range(1500) if n % 3 != 1]
    np.testing.assert_array_equal(found.vectors[good], np.tile(service.vectors(["a", "b"]), (500, 1)))
    assert np.isnan(found.vectors[1::3]).all()
    assert sorted(failure.index for failure in found.failures) == list(range(1, 1500, 3))
    assert {failure.code for failure in found.failures} == {DocumentErrorCode.TOO_LONG}
    state = handle.wait(timeout_s=30)
    assert (state.status, state.counters.succeeded, state.counters.failed) == (RunStatus.COMPLETED, 1000, 500)


def test_mappings_carry_ids_and_metadata_to_the_results(face: Any) -> None:
    given = [{"id": "a", "text": "one", "lang": "en", "year": 1999}, {"text": "two", "other": "x"}]
    handle = face.submit(iter(given), metadata=["lang", "year"])
    (page,) = handle.results()
    table = page.batch.table.select(["id", "ordinal", "lang", "year"]).to_pylist()
    assert sorted(table, key=lambda row: row["ordinal"]) == [
        {"id": "a", "ordinal": 0, "lang": "en", "year": "1999"},
        {"id": "1", "ordinal": 1, "lang": None, "year": None},
    ]


def test_the_same_key_gives_the_same_run_and_computes_nothing_twice(face: Any, service: Service) -> None:
    texts = texts_of(1500)
    first = face.submit(texts, idempotency_key="order 17")
    assert face.submit(iter(texts), idempotency_key="order 17").run == first.run
    first.wait(timeout_s=60)
    again = face.submit(texts, idempotency_key="order 17")
    assert again.wait(timeout_s=60).counters.input == 1500
    np.testing.assert_array_equal(again.ordered().vectors, service.vectors(texts))
    for others in (texts[:-1], [*texts, "more"], [*texts[:-1], "other"], ["other", *texts[1:]], []):
        with pytest.raises(RunConflictError, match="other documents"):
            face.submit(others, idempotency_key="order 17")
    with pytest.raises(RunConflictError, match="other options"):
        face.submit(texts, idempotency_key="order 17", options=EncodingOptions(dimensions=4))
    assert face.attach(first.run).status().counters.input == 1500
    first.delete()


class KilledError(Exception):
    """Stands for the end of the submitting process."""


@pytest.mark.parametrize("size", [7, 1000], ids=["other job size", "same job size"])
def test_a_submission_that_was_killed_goes_on_where_it_stopped(
    idle: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def killed() -> Iterator[dict[str, Any]]:
        yield from ({"text": text} for text in texts_of(3500))
        raise KilledError

    monkeypatch.setattr(documents, "JOB_DOCUMENTS", 1000)
    with pytest.raises(KilledError):
        idle.submit(killed(), idempotency_key="k")
    (state,) = registry.runs()
    assert (state.counters.input, state.input_closed) == (3000, False)
    monkeypatch.setattr(documents, "JOB_DOCUMENTS", size)
    whole = [{"text": text} for text in texts_of(4000)]
    with pytest.raises(RunConflictError):
        idle.submit([*whole[:1500], {"text": "changed"}, *whole[1501:]], idempotency_key="k")
    idle.submit(iter(whole), idempotency_key="k")
    (state,) = registry.runs()
    assert (state.counters.input, state.input_closed) == (4000, True)


def test_two_submissions_under_one_key_at_once_send_each_document_once(registry: Registry) -> None:
    def submission() -> Submission:
        spec = run_spec("q", "r", EncodingOptions(), Lane.BULK, 60, ())
        return Submission(registry, spec, texts_of(2 * documents.JOB_DOCUMENTS + 5), None, 1 << 30)

    racers = [submission(), submission(), submission()]
    order = itertools.cycle([0, 0, 1, 2, 1])
    racing = dict(enumerate(racers))
    while racing:
        turn = next(order)
        if turn in racing and racing[turn].step() is None:
            del racing[turn]
    state = registry.state("r")
    assert (state.counters.input, state.input_closed) == (2 * documents.JOB_DOCUMENTS + 5, True)


def test_a_request_sent_again_after_a_lost_reply_adds_nothing(registry: Registry) -> None:
    spec = run_spec("q", "r", EncodingOptions(), Lane.BULK, 60, ())
    submission = Submission(registry, spec, ["a", "b"], None, 1 << 30)
    outcomes = [registry.submit([submission.request()])[0] for _ in range(2)]
    assert [isinstance(each, Enqueued) and each.outcome for each in outcomes] == [EnqueueOutcome.OK, EnqueueOutcome.DUP]
    assert submission.take(outcomes[1]) is None
    assert registry.state("r").counters.input == 2


def test_a_submission_waits_while_the_queue_is_full_and_ends_when_its_run_is_cancelled(
    idle: Any, registry: Registry
) -> None:
    def texts() -> Iterator[dict[str, Any]]:
        yield from ({"text": "x" * 1000} for _ in range(5000))

    sender = threading.Thread(target=lambda: idle.submit(texts(), run="big"))
    sender.start()
    deadline = time.monotonic() + 30
    while registry.backlog_bytes() < 500_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    assert sender.is_alive()
    backlog = idle.backlog()
    assert (backlog.bytes, backlog.jobs, backlog.token_batches) == (registry.backlog_bytes(), 1, 0)
    assert backlog.limit_bytes == 1 << 20
    assert idle.attach("big").cancel() is RunStatus.CANCELLING
    sender.join(30)
    assert not sender.is_alive()


def test_a_bad_document_cancels_a_run_that_nobody_could_go_on_with(idle: Any, registry: Registry) -> None:
    texts = [*texts_of(2 * documents.JOB_DOCUMENTS), 5]
    with pytest.raises(UsageError, match="document 2048"):
        idle.submit(texts)
    wait_until(lambda: [state.status for state in registry.runs()] == [RunStatus.CANCELLING], timeout_s=30)
    with pytest.raises(UsageError, match="document 2048"):
        idle.submit(texts, idempotency_key="k")
    assert RunStatus.IN_PROGRESS in {state.status for state in registry.runs()}


def test_waiting_has_an_end_and_says_why(idle: Any, registry: Registry) -> None:
    handle = idle.submit(["a"])
    with pytest.raises(NoWorkerError, match=f"run {handle.run} is not over after 0.1 s: no embedder"):
        handle.wait(timeout_s=0.1)
    assert handle.status().status is RunStatus.IN_PROGRESS


def over(status: RunStatus, registry: Registry, run: str) -> None:
    registry.transition(run, status, [RunStatus.IN_PROGRESS], error="the disk is gone")


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (RunStatus.FAILED, RunFailedError, "the disk is gone"),
        (RunStatus.CANCELLED, RunCancelledError, "was cancelled"),
        (RunStatus.EXPIRED, RunExpiredError, "the disk is gone"),
    ],
    ids=["failed", "cancelled", "expired"],
)
def test_a_run_that_ended_otherwise_ends_its_readers(
    idle: Any, registry: Registry, status: RunStatus, error: type[Exception], words: str
) -> None:
    handle = idle.submit(["a"])
    ender = threading.Timer(0.1, over, (status, registry, handle.run))
    ender.start()
    with pytest.raises(error, match=words):
        list(handle.results())
    with pytest.raises(error, match=words):
        handle.ordered()
    assert handle.wait().status is status
    ender.join()


def test_results_that_expired_are_not_taken_for_an_empty_run(face: Any, service: Service) -> None:
    handle = face.submit(["a"], ttl_s=1)
    handle.wait(timeout_s=30)
    time.sleep(1.1)
    with pytest.raises(RunExpiredError):
        list(handle.results())
    with pytest.raises(RunExpiredError):
        handle.ordered()
    assert handle.status().counters.succeeded == 1


def test_a_deleted_run_is_gone_and_an_open_one_is_not_deleted(face: Any, idle: Any) -> None:
    handle = face.submit(["a"])
    handle.wait(timeout_s=30)
    handle.delete()
    handle.delete()
    for read in (handle.status, handle.wait, handle.ordered, lambda: list(handle.results())):
        with pytest.raises(RunNotFoundError):
            read()
    with pytest.raises(UsageError, match="in_progress"):
        idle.submit(["a"]).delete()


def test_a_run_with_a_dataset_says_where_its_vectors_are(idle: Any, registry: Registry) -> None:
    sink = ParquetSink(path="/data/out")
    registry.create(RunSpec(run="files", queue="q", sink=sink, created_at=1.0))
    registry.transition("files", RunStatus.COMPLETED, [RunStatus.VALIDATING])
    with pytest.raises(UsageError, match="run files wrote the dataset /data/out: read it there"):
        list(idle.attach("files").results())
    assert idle.attach("files").wait().status is RunStatus.COMPLETED


def test_names_and_cursors_that_cannot_be_are_refused(idle: Any) -> None:
    with pytest.raises(UsageError, match="run id"):
        idle.attach("../x")
    with pytest.raises(UsageError, match="cursor"):
        list(idle.attach("x").results(after="yesterday"))
    with pytest.raises(UsageError, match="ttl_s"):
        idle.submit(["a"], ttl_s=0)
    with pytest.raises(UsageError, match="ids"):
        idle.submit(["a", "b"], ids=["1"])


def test_the_model_of_a_queue_is_told(face: Any, idle: Any, service: Service) -> None:
    assert idle.model() is None
    model = face.model()
    assert (model.dimension, model.max_length) == (service.engine.dimension, service.engine.max_length)
    assert model.fingerprint
    backlog = face.backlog()
    assert backlog.live_embedders == 1
    assert not backlog.full


def test_settings_come_from_arguments_then_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDQ_REDIS_URL", "redis://example:1/2")
    monkeypatch.setenv("EMBEDQ_QUEUE", "from-env")
    assert (Client()._flows.url, Client()._flows.keys.queue) == ("redis://example:1/2", "from-env")
    assert Client("redis://other:1")._flows.url == "redis://other:1"
    assert Client(queue="mine", settings=BrokerSettings(queue="theirs"))._flows.keys.queue == "mine"
    monkeypatch.setenv("EMBEDQ_LEASE_S", "soon")
    with pytest.raises(UsageError, match="lease_s"):
        Client()


def test_flows_close_what_they_open(redis_client: redis.Redis, redis_url: str) -> None:
    def ours() -> list[Any]:
        return [each for each in redis_client.client_list() if each["name"].startswith("embedq-client")]

    flows = Flows(BrokerSettings(redis_url=redis_url, queue="q"))
    waiter = Waiter("r", None)
    flows._watcher.look(waiter)
    assert waiter.future.done()
    assert ours()
    flows.close()
    deadline = time.monotonic() + 10
    while ours():
        assert time.monotonic() < deadline
        time.sleep(0.01)
