"""Fixtures of the fault tests: a small checkpoint, a corpus, and a pipeline on a server of either kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accounting import Corpus, write_corpus
from embedq_worker.engine.generate import generate_checkpoint
from pipeline import Pipeline, hurry
from servers import KINDS, Server, ServerMissingError


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "model", hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """60 documents, two of them too long, and a line that is no JSON."""
    return write_corpus(tmp_path / "corpus.jsonl", 60, bad_lines=1, long_texts=2)


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One server of the test's own: of the kind a test names by parametrising it indirectly, else Valkey."""
    kind = getattr(request, "param", "valkey")
    try:
        server = Server(kind, tcp=True)
    except ServerMissingError as missing:
        pytest.skip(str(missing))
    with server:
        yield server


#: For tests whose outcome may depend on the server's make.
both_servers = pytest.mark.parametrize("own_server", KINDS, indirect=True)


@pytest.fixture
def pipeline(
    own_server: Server, tmp_path: Path, checkpoint: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pipeline]:
    hurry(monkeypatch)
    built = Pipeline(own_server.url, tmp_path, checkpoint, corpus)
    try:
        yield built
    finally:
        if own_server.alive:
            own_server.resume()
        else:
            own_server.start()
        built.close()
