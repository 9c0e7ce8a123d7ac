"""Sources that fsspec or Arrow reach: an object store in memory, a web server, S3 over HTTP."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from embedq_producer.blocks import CorpusBlock, ReadOptions
from embedq_producer.corpus import open_corpus
from embedq_producer.places import without_secrets
from embedq_producer.reader import metadata_types, read_corpus
from embedq_schemas.errors import InputError, UsageError
from object_store import object_store
from source_kinds import KINDS, PACK, arrow, jsonl, parquet

GIVEN = [{"id": f"d{i}", "text": f"text {i}", "lang": "en", "year": i, "meta": {"title": "t"}} for i in range(50)]
PARTS = {
    "a.jsonl.gz": PACK[".gz"](jsonl(GIVEN[:20])),
    "sub/b.parquet": parquet(GIVEN[20:35]),
    "sub/c.arrow": arrow(GIVEN[35:45]),
    "sub/d.arrows": arrow(GIVEN[45:], stream=True),
    "_SUCCESS": b"",
}


def ids(blocks: Sequence[CorpusBlock]) -> list[str]:
    assert [reject for block in blocks for reject in block.rejects] == []
    return [document_id for block in blocks for document_id in block.documents["id"].to_pylist()]


def check_source(*sources: str) -> None:
    """The sources give all documents, say what types they have, and are read on from anywhere."""
    corpus = open_corpus(sources)
    names = ("year", "meta.title")
    types = metadata_types(corpus, ReadOptions(metadata=names))
    assert list(map(str, types)) == ["int64", "string"]
    options = ReadOptions(metadata=names, metadata_types=types, block_documents=8)
    blocks = list(read_corpus(corpus, options=options))
    assert ids(blocks) == [document["id"] for document in GIVEN]
    assert list(read_corpus(open_corpus(sources), options=options, start=blocks[3].end)) == blocks[4:]
    assert open_corpus(sources).identity == corpus.identity


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An object store in this process."""
    memory = fsspec.filesystem("memory")
    for name, content in PARTS.items():
        memory.pipe(f"/bucket/{name}", content)
    yield memory
    memory.rm("/bucket", recursive=True)


def test_a_directory_a_glob_and_a_file_of_a_store_are_read(bucket: Any) -> None:
    check_source("memory://bucket")
    check_source("memory://bucket/*.gz", "memory://bucket/sub/*")
    check_source(*(f"memory://bucket/{name}" for name in PARTS if name != "_SUCCESS"))


def test_an_object_that_was_replaced_is_another_corpus_and_is_found_out_while_it_is_read(bucket: Any) -> None:
    corpus = open_corpus(["memory://bucket/a.jsonl.gz"])
    identity = corpus.identity
    blocks = read_corpus(corpus, options=ReadOptions(block_documents=2))
    next(blocks)
    bucket.pipe("/bucket/a.jsonl.gz", PACK[".gz"](jsonl(GIVEN[:21])))
    with pytest.raises(InputError, match="changed during the run"):
        list(blocks)
    assert open_corpus(["memory://bucket/a.jsonl.gz"]).identity != identity


@pytest.mark.parametrize(
    ("url", "error", "part"),
    [
        ("memory://bucket/missing.jsonl", InputError, "does not exist"),
        ("memory://bucket/*.nothing", InputError, "matches no file"),
        ("nonsense://a/b", UsageError, "nonsense"),
        ("http://127.0.0.1:1/c.jsonl", InputError, "cannot be"),
    ],
)
def test_a_url_that_leads_nowhere_is_one_sentence(bucket: Any, url: str, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part) as caught:
        open_corpus([url])
    assert "\n" not in str(caught.value)


def test_a_web_server_is_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in PARTS.items():
        (tmp_path / name).write_bytes(content)
    KINDS["csv"](tmp_path, GIVEN)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{web.server_address[1]}"
        check_source(*(f"{base}/{name}" for name in PARTS if name != "_SUCCESS"))
        blocks = list(read_corpus(open_corpus([f"{base}/c.csv"]), options=ReadOptions()))
        assert ids(blocks) == [document["id"] for document in GIVEN]
        web.shutdown()


def test_passwords_and_signatures_in_urls_are_shown_to_nobody(tmp_path: Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    (tmp_path / "a.jsonl").write_bytes(b"broken\n" + jsonl(GIVEN[:3]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        base = f"http://me:hunter2@127.0.0.1:{web.server_address[1]}"
        corpus = open_corpus([f"{base}/a.jsonl?X-Signature=abc123&part={part}" for part in (1, 2)])
        rejects = [reject for block in read_corpus(corpus, options=ReadOptions()) for reject in block.rejects]
        assert [reject.code for reject in rejects if reject.code == "invalid_json"] == ["invalid_json"] * 2
        with pytest.raises(InputError) as missing:
            open_corpus([f"{base}/none.jsonl?X-Signature=abc123"])
        with pytest.raises(InputError) as dead:
            open_corpus([f"{base.rpartition(':')[0]}:1/none.jsonl?X-Signature=abc123"])
        web.shutdown()
    shown = f"{corpus.name} {[file.name for file in corpus.files]} {rejects} {missing.value} {dead.value}"
    assert "http://me:***@127.0.0.1" in shown
    assert "X-Signature=***" in shown
    assert not {"hunter2", "abc123"} & set(re.findall(r"\w+", shown))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("s3://bucket/a@b.jsonl", "s3://bucket/a@b.jsonl"),
        ("/data/a=b/x?y.jsonl", "/data/a=b/x?y.jsonl"),
        ("403, url='https://h/a?sig=x%2F&b=c'", "403, url='https://h/a?sig=***&b=***'"),
        ("az://user:p@ss@host/a", "az://user:***@host/a"),
    ],
    ids=["at", "path", "sentence", "at in password"],
)
def test_what_is_no_secret_is_shown(given: str, shown: str) -> None:
    assert without_secrets(given) == shown


def test_s3_is_read_over_http_by_arrows_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with object_store({f"corpora/mine/{name}": content for name, content in PARTS.items()}) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        check_source("s3://corpora/mine")
        check_source("s3://corpora/mine/*.gz", "s3://corpora/mine/sub/*")
        with pytest.raises(InputError, match="does not exist"):
            open_corpus(["s3://corpora/mine/missing.jsonl"])
