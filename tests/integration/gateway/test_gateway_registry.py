"""Records of files and batches: changed by compare and swap, seen by their tenant alone, held by one at a time."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import redis
from embedq_broker.batches import BatchRecord, BatchRegistry, FileRecord, drop_results
from embedq_broker.keys import Keys
from embedq_broker.once import warn_once
from embedq_broker.registry import Registry
from embedq_schemas.errors import CodecError
from embedq_schemas.run import RunStatus

KEYS = Keys("q")


@pytest.fixture
def registry(redis_client: redis.Redis) -> BatchRegistry:
    return BatchRegistry(redis_client, KEYS, "store1")


def file(number: int, tenant: str = "t", expires_at: int | None = None) -> FileRecord:
    return FileRecord(
        id=f"file-{number:04}",
        tenant=tenant,
        filename="in.jsonl",
        purpose="batch",
        bytes=number,
        created_at=number,
        expires_at=expires_at,
    )


def batch(number: int, tenant: str = "t") -> BatchRecord:
    return BatchRecord(
        id=f"batch_{number:04}",
        tenant=tenant,
        endpoint="/v1/embeddings",
        input_file_id="file-1",
        completion_window="24h",
        created_at=number,
        expires_at=number + 86400,
        output_name="o",
        error_name="e",
    )


def test_a_file_is_its_tenants_alone_and_its_stores_alone(registry: BatchRegistry, redis_client: redis.Redis) -> None:
    registry.add_file(file(1))
    registry.add_file(file(1))
    assert registry.file("t", "file-0001") == file(1)
    assert registry.file("other", "file-0001") is None
    assert not registry.drop_file("other", "file-0001")
    assert BatchRegistry(redis_client, KEYS, "store2").file("t", "file-0001") is None
    assert list(registry.files("other", after=None, newest_first=True)) == []
    assert registry.drop_file("t", "file-0001")
    assert not registry.drop_file("t", "file-0001")
    assert list(registry.files("t", after=None, newest_first=True)) == []


@pytest.mark.parametrize("newest_first", [True, False])
def test_listing_goes_on_behind_any_file_and_forgets_expired_ones(registry: BatchRegistry, newest_first: bool) -> None:
    for number in range(300):
        registry.add_file(file(number, expires_at=int(time.time()) - 1 if number % 100 == 50 else None))
    numbers = sorted({*range(300)} - {50, 150, 250}, reverse=newest_first)
    assert [f.bytes for f in registry.files("t", after=None, newest_first=newest_first)] == numbers
    after = f"file-{numbers[200]:04}"
    assert [f.bytes for f in registry.files("t", after=after, newest_first=newest_first)] == numbers[201:]


def test_changes_of_one_batch_never_overwrite_each_other(registry: BatchRegistry) -> None:
    registry.add_batch(batch(1))

    def count() -> None:
        for _ in range(50):
            registry.change(
                "batch_0001", lambda record: msgspec.structs.replace(record, completed=record.completed + 1)
            )

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = registry.batch("t", "batch_0001")
    assert found is not None
    assert found.completed == 200
    assert registry.change("batch_none", lambda record: record) is None


def test_a_batch_that_is_over_is_open_no_more_and_forgotten_in_time(
    registry: BatchRegistry, redis_client: redis.Redis
) -> None:
    for number in (2, 1):
        registry.add_batch(batch(number))
    assert [record.id for record in registry.open_batches()] == ["batch_0001", "batch_0002"]
    registry.change("batch_0001", lambda record: msgspec.structs.replace(record, status=RunStatus.COMPLETED))
    assert [record.id for record in registry.open_batches()] == ["batch_0002"]
    assert [record.id for record in registry.batches("t", after=None)] == ["batch_0002", "batch_0001"]
    assert redis_client.ttl(KEYS.store("store1", "batch", "batch_0001")) > 0
    assert redis_client.ttl(KEYS.store("store1", "batch", "batch_0002")) == -1


def test_accepting_a_batch_again_does_not_set_it_back(registry: BatchRegistry) -> None:
    registry.add_batch(batch(1))
    registry.change("batch_0001", lambda record: msgspec.structs.replace(record, status=RunStatus.IN_PROGRESS))
    registry.add_batch(batch(1))
    found = registry.batch("t", "batch_0001")
    assert found is not None
    assert found.status is RunStatus.IN_PROGRESS


def test_a_lease_is_renewed_by_its_holder_and_taken_by_another_only_when_it_is_over(registry: BatchRegistry) -> None:
    assert registry.hold("b", "one", ttl_ms=60_000)
    assert not registry.hold("b", "two", ttl_ms=60_000)
    assert registry.hold("b", "one", ttl_ms=1)
    time.sleep(0.05)
    assert registry.hold("b", "two", ttl_ms=60_000)
    registry.let_go("b", "one")
    assert not registry.hold("b", "one", ttl_ms=60_000)
    registry.let_go("b", "two")
    assert registry.hold("b", "one", ttl_ms=60_000)


def test_dropped_results_leave_the_backlog_once(redis_client: redis.Redis) -> None:
    ids = [redis_client.xadd(KEYS.results("r"), {"payload": b"x" * 10}).decode() for _ in range(3)]
    redis_client.hset(KEYS.held, KEYS.suffix(KEYS.results("r")), 30)
    redis_client.hset(KEYS.bytes, "results", 30)
    backlog = Registry(redis_client, KEYS).backlog_bytes
    for _ in range(2):
        drop_results(redis_client, KEYS, "r", [(ids[0], 10)])
        assert backlog() == 20
    drop_results(redis_client, KEYS, "r", [(entry_id, 10) for entry_id in ids])
    assert backlog() == 0


def test_a_record_of_another_version_hides_no_other_and_is_told_of_once(
    registry: BatchRegistry, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    for number in range(3):
        registry.add_file(file(number))
        registry.add_batch(batch(number))
    redis_client.set(KEYS.store("store1", "file", file(1).id), b'{"id": "file-0001"}')
    redis_client.set(KEYS.store("store1", "batch", batch(1).id), b"\xff")
    for _ in range(5):
        assert list(registry.files("t", after=None, newest_first=True)) == [file(2), file(0)]
        assert list(registry.batches("t", after=None)) == [batch(2), batch(0)]
        assert registry.open_batches() == [batch(0), batch(2)]
    assert len(caplog.records) == 3
    with pytest.raises(CodecError, match="file-0001"):
        registry.file("t", file(1).id)
    with pytest.raises(CodecError, match="batch_0001"):
        registry.batch("t", batch(1).id)
    assert registry.file_exists(file(1).id)
