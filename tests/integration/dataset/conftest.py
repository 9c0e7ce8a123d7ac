"""One dataset, made once by the real command, and the servers that datasets are exported to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import call, isolate
from dataset_helpers import PROMPTS, WORDS, Command, Made, Said
from embedq_worker.engine.generate import generate_checkpoint
from postgres_server import PostgresMissingError, PostgresServer

from embedq.dataset import open_dataset


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """60 documents in several files, 2 lines without a vector, metadata and texts. Not to be changed: `copy` is."""
    folder = tmp_path_factory.mktemp("made")
    model = generate_checkpoint(folder / "model", hidden_size=32, layers=2, max_length=48, prompts=PROMPTS)
    rng = np.random.default_rng(0)
    documents: list[dict[str, Any]] = [
        {"id": f"d{i}", "text": f"{i} " + " ".join(rng.choice(WORDS, 1 + i % 24)), "lang": ["en", None][i % 2]}
        for i in range(60)
    ]
    lines = [json.dumps(document) for document in documents]
    lines[30:30] = ["no JSON", json.dumps({"id": "empty"})]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    command = ["run", folder / "corpus.jsonl", "-o", folder / "vectors", "--model", model, "--dtype", "float32"]
    command += ["--keep-text", "--metadata", "lang", "--job-documents", 8, "--max-batch-tokens", 64, "--window-jobs", 1]
    done = subprocess.run(
        [sys.executable, "-m", "embedq", *map(str, command), "--flush-interval-s", "0.01", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if not name.startswith("EMBEDQ_")},
    )
    # Complete, with failed documents.
    assert done.returncode == 3, done.stderr
    rows: dict[str, list[float]] = {}
    for batch in open_dataset(folder / "vectors").batches(["id", "vector"]):
        rows.update(zip(batch.column("id").to_pylist(), batch.column("vector").to_pylist(), strict=True))
    assert len(list((folder / "vectors").glob("part-*"))) > 1
    vectors = np.array([rows[document["id"]] for document in documents], dtype=np.float32)
    return Made(folder / "vectors", model, documents, vectors)


@pytest.fixture
def embedq(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command that starts no process, inside this one."""

    def run(*arguments: object) -> Said:
        said = Said(*call(capsys, *arguments))
        assert "Traceback" not in said.err
        return said

    return run


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except PostgresMissingError as missing:
        pytest.skip(str(missing))
    with server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """A database without tables of ours."""
    import psycopg

    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres_server.url


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
