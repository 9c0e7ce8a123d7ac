"""What a store promises, held to a directory and to an S3 server alike; and what only an S3 server can do to us."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from embedq_schemas.errors import EmbedqError, OutputError, StorageError, UsageError
from embedq_schemas.manifest import PublishedFile, Upload
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_worker.sinks import s3
from embedq_worker.sinks.dataset import Dataset, dataset_at, open_dataset
from embedq_worker.sinks.store import CommittedFileError, DirectoryStore, Store
from s3_server import KEYS, Bucket, use
from servers import free_port


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty, prepared store."""
    if request.param == "directory":
        made: Store = DirectoryStore(tmp_path / "out")
        (tmp_path / "out").mkdir()
    else:
        bucket: Bucket = request.getfixturevalue("bucket")
        made = s3.store_at(bucket.at("deep/out"))
    made.prepare()
    return made


def staged(
    store: Store,
    number: int = 0,
    content: bytes = b"PAR1 not really",
    moved: Callable[[], None] = lambda: None,
) -> PublishedFile:
    """A file of one row that waits for its commit."""
    token = f"{number:032x}"
    held = store.stage(token, lambda path: _write(path, content), lambda path: None, moved)
    return PublishedFile(
        token=token,
        run="r",
        rows=1,
        size_bytes=held.size_bytes,
        tokens=1,
        ordinals=(number, number),
        upload=held.upload,
    )


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def spec(run: str, location: str) -> RunSpec:
    return RunSpec(run=run, queue="q", sink=ParquetSink(path=location), created_at=1.0)


def test_a_file_is_created_once_and_replaced_as_often_as_wanted(store: Store) -> None:
    store.create("_run.json", b"first")
    with pytest.raises(FileExistsError):
        store.create("_run.json", b"second")
    assert store.read("_run.json") == b"first"
    store.replace("_run.json", b"third")
    store.replace("_errors/part-1.jsonl", b"a\nb\n")
    assert store.read("_run.json") == b"third"
    with store.lines("_errors/part-1.jsonl") as lines:
        assert list(lines) == [b"a\n", b"b\n"]
    assert store.sizes() == {"_run.json": 5}
    assert store.sizes("_errors") == {"part-1.jsonl": 4}
    assert store.exists("_run.json")
    store.delete(["_run.json", "_errors/part-1.jsonl", "never"])
    assert (store.sizes(), store.sizes("_errors"), store.sizes("nowhere")) == ({}, {}, {})
    assert not store.exists("_run.json")
    with pytest.raises(FileNotFoundError):
        store.read("_run.json")


def test_of_many_that_create_a_file_at_once_one_succeeds(store: Store) -> None:
    start, won = threading.Barrier(6), []

    def create(number: int) -> None:
        start.wait()
        try:
            store.create("_run.json", str(number).encode())
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [store.read("_run.json")]


def test_a_staged_file_is_seen_by_nobody_until_it_is_published_as_often_as_wanted(store: Store) -> None:
    file = staged(store)
    assert store.is_staged(file)
    assert store.sizes() == {}
    for _ in range(3):
        store.publish(file, thoroughly=False)
        store.enlist(file, replay=True)
    assert not store.is_staged(file)
    assert store.read(file.name) == b"PAR1 not really"
    assert [line.token for line in store.files().values()] == [file.token]
    assert not isinstance(store.files()[file.token].upload, Upload), "the manifest's lines are those of a directory"
    store.withdraw({file.token})
    store.withdraw({file.token})
    assert store.files() == {}
    assert not store.exists(file.name)


@pytest.mark.parametrize("by", ["discard", "discard_staged"])
def test_a_staged_file_that_was_dropped_is_never_published(store: Store, by: str) -> None:
    file, other = staged(store), staged(store, 1)
    store.publish(other, thoroughly=False)
    if by == "discard":
        store.discard(file)
        store.discard(file)
    else:
        store.discard_staged()
    assert not store.is_staged(file)
    with pytest.raises(CommittedFileError, match=f"part-{file.token}.parquet was committed, but neither it nor"):
        store.publish(file, thoroughly=False)
    store.publish(other, thoroughly=False)


def test_a_dataset_belongs_to_the_run_that_was_there_first(store: Store) -> None:
    dataset = Dataset(store.path if isinstance(store, DirectoryStore) else store)  # type: ignore[arg-type]
    dataset.prepare(spec("first", str(dataset)))
    dataset.prepare(spec("first", str(dataset)))
    with pytest.raises(OutputError, match="holds run first; run second may not write into it"):
        dataset.prepare(spec("second", str(dataset)))


def test_a_place_is_tried_out_without_a_trace(store: Store) -> None:
    store.probe()
    assert store.sizes() == {}
    staged(store)
    store.discard_staged()


def test_the_end_of_a_run_aborts_its_own_uploads_and_no_others(bucket: Bucket) -> None:
    stores = [s3.store_at(bucket.at(prefix)) for prefix in ("runs/a", "runs/a/deeper", "runs/ab", "runs")]
    for store in stores:
        staged(store)
    stores[0].discard_staged()
    assert sorted(key.rpartition("/")[0] for key, _ in bucket.uploads()) == ["runs", "runs/a/deeper", "runs/ab"]


def test_a_folder_that_a_console_made_is_empty(bucket: Bucket) -> None:
    for prefix in ("made", "other"):
        bucket.client.put_object(Bucket=bucket.name, Key=f"{prefix}/", Body=b"")
    bucket.client.put_object(Bucket=bucket.name, Key="other/file", Body=b"")
    assert s3.store_at(bucket.at("made")).is_empty()
    assert s3.store_at(bucket.at("made")).sizes() == {}
    assert not s3.store_at(bucket.at("other")).is_empty()


def test_a_large_file_is_sent_in_parts_and_is_whole(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    store = s3.store_at(bucket.at("out"))
    content = bytes(range(256)) * (11 << 12)
    signs: list[None] = []
    file = staged(store, content=content, moved=lambda: signs.append(None))
    assert len(signs) > 100, "a slow line must not look like a hang"
    assert isinstance(file.upload, Upload)
    assert len(file.upload.parts) == 3
    store.publish(file, thoroughly=True)
    assert bucket.read(f"out/{file.name}") == content
    found = bucket.client.head_object(Bucket=bucket.name, Key=f"out/{file.name}")
    assert found["ETag"] == file.upload.etag, "the ETag was foreseen"


def test_what_another_wrote_under_the_name_of_a_committed_file_is_no_publication(bucket: Bucket) -> None:
    store = s3.store_at(bucket.at("out"))
    file = staged(store, content=b"committed")
    store.discard(file)
    store.replace(file.name, b"shorter")
    with pytest.raises(CommittedFileError, match="holds 7 bytes, 9 were committed"):
        store.publish(file, thoroughly=False)
    store.replace(file.name, b"different")
    with pytest.raises(CommittedFileError, match="ETag"):
        store.publish(file, thoroughly=False)


def test_a_complete_dataset_takes_no_other_file_and_says_so_of_none_that_it_has(bucket: Bucket) -> None:
    store = s3.store_at(bucket.at("out"))
    file, late = staged(store), staged(store, 1)
    store.publish(file, thoroughly=True)
    store.replace("_SUCCESS", b"{}")
    store.publish(file, thoroughly=True)
    with pytest.raises(OutputError, match="is complete, and takes no other file"):
        store.publish(late, thoroughly=True)
    assert not store.exists(late.name)
    assert bucket.uploads() == []


def test_ranges_of_an_object_are_read_as_arrow_asks(bucket: Bucket) -> None:
    store = s3.store_at(bucket.at("out"))
    store.replace("f", b"0123456789")
    file = store.source("f")
    assert (file.seek(0, 2), file.seek(-3, 1), file.read(2), file.tell()) == (10, 7, b"78", 9)
    assert (file.read(5), file.read(5)) == (b"9", b"")
    buffer = bytearray(4)
    file.seek(2)
    assert (file.readinto(buffer), bytes(buffer)) == (4, b"2345")  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError):
        store.source("missing")


def refusals(bucket: Bucket, name: str) -> list[Callable[[], object]]:
    store = s3.store_at(f"s3://{name}/out")
    return [
        lambda: store.read("_run.json"),
        lambda: store.replace("f", b""),
        lambda: store.create("f", b""),
        lambda: store.sizes(),
        lambda: store.is_empty(),
        lambda: store.probe(),
        lambda: staged(store),
        lambda: store.discard_staged(),
        lambda: store.files(),
    ]


def test_a_missing_bucket_is_an_output_error_that_names_it(bucket: Bucket) -> None:
    for action in refusals(bucket, "no-such-bucket"):
        with pytest.raises(OutputError, match=r"s3://no-such-bucket/out.*there is no such bucket"):
            action()


def test_an_endpoint_that_does_not_answer_is_a_storage_error(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in use(bucket.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}, monkeypatch):
        store = s3.store_at(bucket.at("out"))
        with pytest.raises(StorageError, match=r"cannot read s3://.*: no answer of the object store"):
            store.read("_run.json")


def test_no_credentials_are_an_output_error(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {name: value for name, value in bucket.environment.items() if name not in KEYS}
    for _ in use(bare | {"HOME": str(tmp_path)}, monkeypatch):
        with pytest.raises(OutputError, match="no AWS credentials are found"):
            s3.store_at(bucket.at("out")).read("_run.json")


def test_a_profile_that_does_not_exist_is_an_output_error(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in use(bucket.environment | {"AWS_PROFILE": "nobody"}, monkeypatch):
        with pytest.raises(OutputError, match="the AWS configuration cannot be used: ProfileNotFound"):
            s3.store_at(bucket.at("out"))


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", StorageError),
        (500, "InternalError", StorageError),
        (429, "TooManyRequests", StorageError),
        (400, "RequestTimeout", StorageError),
        (403, "AccessDenied", OutputError),
        (403, "SignatureDoesNotMatch", OutputError),
        (403, "InvalidAccessKeyId", OutputError),
        (400, "ExpiredToken", OutputError),
        (501, "NotImplemented", OutputError),
        (301, "PermanentRedirect", OutputError),
    ],
)
def test_what_waiting_may_mend_is_told_from_what_it_cannot(status: int, code: str, kind: type[EmbedqError]) -> None:
    error = s3._refused(code, status, "cannot write s3://bucket/out")
    assert type(error) is kind
    assert str(error).startswith("cannot write s3://bucket/out: ")


@pytest.mark.parametrize(
    "location",
    ["gs://bucket/x", "az://container/x", "gcs://b/x", "abfs://c@a/x", "http://host/x", "s3a://bucket/x"],
)
def test_other_object_stores_are_refused_with_a_sentence(location: str) -> None:
    with pytest.raises(
        UsageError, match=r"datasets are not written to \w+://; give a directory, or s3://bucket/prefix"
    ):
        dataset_at(location)


@pytest.mark.parametrize(
    "location",
    ["s3://", "s3:///x", "s3://k:s3cr3t@bucket/x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/x?k=s3cr3t"],
)
def test_a_malformed_url_is_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(UsageError, match="is named s3://bucket/prefix") as refused:
        dataset_at(location)
    assert "s3cr3t" not in str(refused.value)
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        ParquetSink(path=location)


@pytest.mark.parametrize(
    ("path", "root", "allowed"),
    [
        ("s3://bucket/a/b", "s3://bucket/a", True),
        ("s3://bucket/a", "s3://bucket/a/", True),
        ("s3://bucket/a", "s3://bucket", True),
        ("s3://bucket/ab", "s3://bucket/a", False),
        ("s3://bucket2/a", "s3://bucket", False),
        ("s3://bucket/a", "/", False),
        ("/tmp/a", "s3://bucket", False),
    ],
)
def test_a_prefix_outside_every_root_is_refused(bucket: Bucket, path: str, root: str, allowed: bool) -> None:
    if allowed:
        assert str(open_dataset(path, [root])) == path
    else:
        with pytest.raises(OutputError, match="outside the output roots of this worker"):
            open_dataset(path, [root])


def test_an_endpoint_that_ignores_conditions_is_found_out(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = s3.store_at(bucket.at("out"))
    monkeypatch.setattr(store, "create", store.replace)
    with pytest.raises(OutputError, match="does not honour If-None-Match"):
        store.probe()
    assert bucket.keys() == []


def test_nothing_secret_is_logged(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    store = s3.store_at(bucket.at("out"))
    store.replace("f", b"x")
    with pytest.raises(OutputError):
        s3.store_at("s3://no-such-bucket/out").read("f")
    assert not [record for record in caplog.records if any(secret in record.getMessage() for secret in KEYS.values())]
