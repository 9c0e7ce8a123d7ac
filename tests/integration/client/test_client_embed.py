"""embed: vectors in the order of the texts, each failure named, nothing left behind, one connection for all waiting."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.client import DocumentsFailedError
from embedq_producer.client.watch import _BLOCK_MS
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import (
    BrokerUnavailableError,
    DocumentErrorCode,
    NoWorkerError,
    RunCancelledError,
    UsageError,
    WaitTimeoutError,
)
from embedq_schemas.names import Lane
from embedq_schemas.quantize import VectorType, encode_ranges, quantize, ranges_of
from embedq_schemas.run import RunStatus
from faces import FACES
from servers import Server
from services import DIMENSION, MAX_LENGTH, Service
from waiting import wait_until

from embedq import AsyncClient, Client

TEXTS = ["one", "", "two words", "ünï cödé 文", "x " * 100]


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest, service: Service) -> Iterator[Any]:
    with FACES[request.param](service.settings) as client:
        yield client


@pytest.fixture(params=FACES)
def connect_face(request: pytest.FixtureRequest) -> Callable[[BrokerSettings], Any]:
    return FACES[request.param]


def test_vectors_come_in_the_order_of_the_texts_with_exact_token_counts(face: Any, service: Service) -> None:
    texts = TEXTS * 40
    found = face.embed_detailed(texts)
    assert found.vectors.dtype == np.float32
    np.testing.assert_array_equal(found.vectors, service.vectors(texts))
    counts = [len(service.token_ids(text)) for text in TEXTS]
    assert found.truncated[:5].tolist() == [False, False, False, False, True]
    assert found.n_tokens[:4].tolist() == counts[:4]
    assert found.n_tokens[4] > MAX_LENGTH
    np.testing.assert_array_equal(face.embed(TEXTS), service.vectors(TEXTS))
    np.testing.assert_array_equal(np.asarray(found), found.vectors)


def test_a_large_list_goes_out_in_several_jobs_and_comes_back_whole(face: Any, service: Service) -> None:
    texts = [f"text {number % 50}" for number in range(3000)]
    expected = service.vectors(texts[:50])
    np.testing.assert_array_equal(face.embed(texts, lane=Lane.BULK), np.tile(expected, (60, 1)))


def test_no_texts_give_no_rows_of_the_models_dimension(face: Any) -> None:
    assert face.embed([]).shape == (0, DIMENSION)
    assert face.embed([], options=EncodingOptions(dimensions=8)).shape == (0, 8)


def test_options_reach_the_worker(face: Any, service: Service) -> None:
    options = EncodingOptions(dimensions=8)
    np.testing.assert_allclose(face.embed(["a", "b"], options=options), service.vectors(["a", "b"], options), rtol=1e-6)
    prompted = face.embed(["b"], options=EncodingOptions(prompt="a "))
    np.testing.assert_array_equal(prompted, service.vectors(["a b"]))


def test_failed_texts_are_named_and_the_vectors_of_the_others_come_with_the_error(face: Any, service: Service) -> None:
    texts = ["good", "x " * 100, "also good", "y " * 100]
    with pytest.raises(DocumentsFailedError, match="2 of 4 texts") as raised:
        face.embed(texts, options=EncodingOptions(on_long=OnLong.ERROR))
    error = raised.value
    assert sorted((each.index, each.code) for each in error.failures) == [
        (1, DocumentErrorCode.TOO_LONG),
        (3, DocumentErrorCode.TOO_LONG),
    ]
    np.testing.assert_array_equal(error.embeddings.vectors[[0, 2]], service.vectors(["good", "also good"]))
    assert np.isnan(error.embeddings.vectors[[1, 3]]).all()
    assert error.embeddings.n_tokens[[1, 3]].tolist() == [0, 0]


def test_embed_leaves_nothing_on_the_server(face: Any, service: Service) -> None:
    face.embed(["a"])
    with pytest.raises(DocumentsFailedError):
        face.embed(["x " * 100], options=EncodingOptions(on_long=OnLong.ERROR))
    face.close()
    with connect(service.settings.redis_url) as client:
        keys = Keys("service")
        left = {key.decode() for key in client.scan_iter(match="embedq:*")}
        assert not [key for key in left if re.search(":(run|results|dead):", key)]
        assert client.zcard(keys.runs) == 0
        assert Registry(client, keys).backlog_bytes() == 0


def test_a_thousand_calls_share_a_handful_of_connections(service: Service) -> None:
    async def main() -> tuple[list[Any], set[str]]:
        async with AsyncClient(settings=service.settings) as client:
            calls = [asyncio.create_task(client.embed([f"text {number}"])) for number in range(1000)]
            seen: set[str] = set()
            with connect(service.settings.redis_url, role="observer") as observer:
                while not all(call.done() for call in calls):
                    ours = [each for each in observer.client_list() if each["name"].startswith("embedq-client-")]
                    seen |= {each["id"] for each in ours}
                    await asyncio.sleep(0.05)
            return [await call for call in calls], seen

    vectors, connections = asyncio.run(main())
    np.testing.assert_array_equal(np.concatenate(vectors), service.vectors([f"text {n}" for n in range(1000)]))
    assert 1 < len(connections) <= 7


def test_threads_share_one_client(service: Service) -> None:
    found: dict[int, Any] = {}
    with Client(settings=service.settings) as client:
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: client.embed([f"text {n}"])})) for n in range(30)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    vectors = np.concatenate([found[number] for number in range(30)])
    np.testing.assert_array_equal(vectors, service.vectors([f"text {n}" for n in range(30)]))


def test_without_a_worker_the_time_runs_out_with_words_about_it_and_the_work_is_cancelled(
    connect_face: Callable[[BrokerSettings], Any], redis_client: redis.Redis, redis_url: str
) -> None:
    with connect_face(BrokerSettings(redis_url=redis_url, queue="q")) as client:
        with pytest.raises(NoWorkerError, match="no embedder and no tokenizer is alive on queue q; start one with"):
            client.embed(["a"], timeout_s=0.5)
        # A machine that is busy enough has not even sent it.
        registry = Registry(redis_client, Keys("q"))
        wait_until(lambda: {state.status for state in registry.runs()} <= {RunStatus.CANCELLING}, timeout_s=30)


def test_a_server_that_hangs_is_named_when_the_time_is_over(
    connect_face: Callable[[BrokerSettings], Any], server: Server
) -> None:
    with connect_face(BrokerSettings(redis_url=server.url, queue="q")) as client:
        client.backlog()
        server.pause()
        try:
            with pytest.raises(WaitTimeoutError, match=r"no vectors after 0\.3 s: Redis at .* did not answer in time"):
                client.embed(["a"], timeout_s=0.3)
        finally:
            server.resume()


def test_a_cancelled_task_cancels_its_work(redis_client: redis.Redis, redis_url: str) -> None:
    registry = Registry(redis_client, Keys("q"))

    async def main() -> None:
        async with AsyncClient(redis_url, "q") as client:
            call = asyncio.create_task(client.embed(["a"]))
            while not registry.runs():
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            # Cancelled before the loop had a chance to send it.
            early = asyncio.create_task(client.embed(["b"]))
            await asyncio.sleep(0)
            early.cancel()
            with pytest.raises(asyncio.CancelledError):
                await early

    asyncio.run(main())
    assert {state.status for state in registry.runs()} == {RunStatus.CANCELLING}


def test_a_run_cancelled_by_somebody_else_ends_the_call(redis_client: redis.Redis, redis_url: str) -> None:
    registry = Registry(redis_client, Keys("q"))

    def cancel() -> None:
        (state,) = wait_until(registry.runs, timeout_s=30)
        registry.transition(state.spec.run, RunStatus.CANCELLED, [RunStatus.IN_PROGRESS])

    with Client(redis_url, "q") as client:
        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(RunCancelledError):
            client.embed(["a"])
        thread.join()


def test_a_closed_client_says_so_and_closing_ends_those_that_wait(
    connect_face: Callable[[BrokerSettings], Any], redis_client: redis.Redis, redis_url: str
) -> None:
    client = connect_face(BrokerSettings(redis_url=redis_url, queue="q"))
    failures: list[Exception] = []

    def call() -> None:
        try:
            client.embed(["a"])
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    registry = Registry(redis_client, Keys("q"))
    wait_until(registry.runs, timeout_s=30)
    if isinstance(client, Client):
        client.close()
        with pytest.raises(UsageError, match="closed"):
            client.embed(["a"])
    else:
        client.wait_for(client._client.aclose())
        with pytest.raises(UsageError, match="closed"):
            client.embed(["a"])
    thread.join(10)
    assert [type(failure) for failure in failures] == [UsageError]
    (state,) = registry.runs()
    assert state.status is RunStatus.CANCELLING


def test_a_call_outlives_a_restart_of_the_server(face: Any, service: Service) -> None:
    face.embed(["warm"])
    found: list[Any] = []
    service.server.pause()
    thread = threading.Thread(target=lambda: found.append(face.embed(["during"])))
    try:
        thread.start()
        time.sleep(0.1)
    finally:
        service.server.resume()
        service.server.kill()
        service.server.start()
    thread.join(60)
    np.testing.assert_array_equal(found[0], service.vectors(["during"]))
    np.testing.assert_array_equal(face.embed(["after"]), service.vectors(["after"]))


def test_an_event_that_was_missed_costs_a_delay_and_nothing_else(
    face: Any, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedq_producer.client.watch._SWEEP_S", _BLOCK_MS / 2000)
    monkeypatch.setattr("embedq_producer.client.watch.Watcher._read", lambda self, reader: time.sleep(0.2) or set())
    np.testing.assert_array_equal(face.embed(["a"]), service.vectors(["a"]))


def test_an_unreachable_server_is_named(connect_face: Callable[[BrokerSettings], Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("embedq_broker.connect.RETRIES", 0)
    with (
        connect_face(BrokerSettings(redis_url="unix:///nowhere/server.sock")) as client,
        pytest.raises(BrokerUnavailableError, match="nowhere"),
    ):
        client.embed(["a"])


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("a", "put a single one in a list"),
        ([1], "document 0 is of type int"),
        (["a", None], "document 1 is of type NoneType"),
        (["\ud800"], "not valid Unicode"),
        ([[1, -1]], "document 0 is not a list of token ids"),
        ([[1.5]], "document 0 is not a list of token ids"),
        (None, "must be a list of texts"),
        (7, "must be a list of texts"),
    ],
    ids=["string", "number", "none", "surrogate", "negative id", "fraction", "nothing", "one number"],
)
def test_what_is_no_list_of_texts_is_refused_before_anything_is_sent(
    connect_face: Callable[[BrokerSettings], Any], redis_client: redis.Redis, redis_url: str, texts: Any, words: str
) -> None:
    with connect_face(BrokerSettings(redis_url=redis_url, queue="q")) as client, pytest.raises(UsageError, match=words):
        client.embed(texts)
    assert list(redis_client.scan_iter(match="*run*")) == []


@pytest.mark.parametrize("kind", [VectorType.FLOAT16, VectorType.UBINARY])
def test_vectors_come_in_the_type_that_was_asked_for(face: Any, service: Service, kind: VectorType) -> None:
    options = EncodingOptions(vector_type=kind, on_long=OnLong.ERROR)
    expected = quantize(service.vectors(["a", "b"]), kind)
    np.testing.assert_array_equal(face.embed(["a", "b"], options=options), expected)
    assert face.embed([], options=options).dtype == kind.dtype
    with pytest.raises(DocumentsFailedError) as raised:
        face.embed(["a", "x " * 100], options=options)
    vectors = raised.value.embeddings.vectors
    np.testing.assert_array_equal(vectors[0], expected[0])
    assert np.isnan(vectors[1]).all() if kind.floating else not vectors[1].any()


@pytest.mark.parametrize("kind", [VectorType.INT8, VectorType.UINT8])
def test_buckets_come_by_the_ranges_that_were_given_and_not_without(
    face: Any, service: Service, kind: VectorType
) -> None:
    ranges = ranges_of(service.vectors([f"text {n}" for n in range(20)]))
    options = EncodingOptions(vector_type=kind, vector_ranges=encode_ranges(ranges))
    expected = quantize(service.vectors(["a", "b"]), kind, ranges)
    np.testing.assert_array_equal(face.embed(["a", "b"], options=options), expected)
    with pytest.raises(UsageError, match=f"^{kind} results kept in Redis need vector_ranges"):
        face.embed(["a"], options=EncodingOptions(vector_type=kind))


def test_a_time_that_never_comes_is_waited_for_and_one_that_is_no_number_refused(face: Any, service: Service) -> None:
    for timeout_s in (float("inf"), 1e300, None):
        np.testing.assert_array_equal(face.embed(["a"], timeout_s=timeout_s), service.vectors(["a"]))
    with pytest.raises(UsageError, match="not a number"):
        face.embed(["a"], timeout_s=float("nan"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_client_that_was_used_before_a_fork_serves_parent_and_child(service: Service) -> None:
    with Client(settings=service.settings) as client:
        expected = client.embed(["a"])
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if np.array_equal(client.embed(["a"], timeout_s=30), expected) else 1)
            finally:
                os._exit(2)
        np.testing.assert_array_equal(client.embed(["a"]), expected)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_long_texts_are_not_cut_by_a_client(face: Any) -> None:
    with pytest.raises(UsageError, match="no tokenizer to cut"):
        face.embed(["text"], options=EncodingOptions(on_long=OnLong.CHUNK))
