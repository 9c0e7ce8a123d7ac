"""The programs in examples/ do what they say, on small data, through the real commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dataset_helpers import Made

EXAMPLES = Path(__file__).parents[3] / "examples"
TESTED = {"markdown_folder.py", "postgres_table.py", "hugging_face_dataset.py"}


def run_example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run an example with an engine that needs no weights; fails unless it succeeds."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"EMBEDQ_ENGINE": "null", "EMBEDQ_TOKENIZER_BACKEND": "huggingface", "EMBEDQ_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TESTED


def test_a_folder_of_markdown_is_indexed_and_indexed_again_only_when_it_changed(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("before\n# Queues\nabout queues\n## Leases ##\nabout leases\n")
    (folder / "deep/b.md").write_text("# Vectors\nabout vectors\n")
    index = tmp_path / "index"
    command = ("markdown_folder.py", folder, "--model", made.model, "--index", index)

    first = run_example(*command, "--question", "Leases")
    assert "completed: 4 vectors of 4 documents" in first.stdout
    assert len([line for line in first.stdout.splitlines() if "path=" in line]) == 3
    state = (index / "current").readlink()
    again = run_example(*command)
    assert "is already complete" in again.stderr
    assert (index / "current").readlink() == state

    (folder / "a.md").write_text("# Only this\n")
    run_example(*command)
    assert (index / "current").readlink() != state
    from embedq.dataset import open_dataset

    rows = [row for batch in open_dataset(index / "current").batches(order="input") for row in batch.to_pylist()]
    assert [(row["id"], row["heading"]) for row in rows] == [("a.md#1", "Only this"), ("deep/b.md#1", "Vectors")]


def test_a_postgresql_table_gets_a_table_of_vectors_to_join(made: Made, tmp_path: Path, postgres_url: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE articles (number int PRIMARY KEY, body text)")
        for number, body in ((1, "one"), (2, None), (30, "thirty"), (4, "four\nlines")):
            connection.execute("INSERT INTO articles VALUES (%s, %s)", [number, body])
    command = ("postgres_table.py", postgres_url, "articles", "--id", "number", "--text", "body")
    run_example(*command, "--model", made.model, "--work", tmp_path / "work")
    with psycopg.connect(postgres_url) as connection:
        query = (
            "SELECT number, body, vector_dims(vector) FROM articles "
            "JOIN articles_embeddings ON id = number::text ORDER BY number"
        )
        joined = connection.execute(query).fetchall()
    assert joined == [(1, "one", 32), (4, "four\nlines", 32), (30, "thirty", 32)]
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DELETE FROM articles WHERE number < 30")
    run_example(*command, "--model", made.model, "--work", tmp_path / "work")
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT id FROM articles_embeddings").fetchall() == [("30",)]


def test_a_hugging_face_dataset_gets_a_column_of_vectors(made: Made, tmp_path: Path) -> None:
    from datasets import Dataset, load_from_disk

    texts = [f"text {number % 40}" for number in range(50)]
    texts[7] = None  # type: ignore[call-overload]
    Dataset.from_dict({"body": texts, "label": list(range(50))}).save_to_disk(str(tmp_path / "in"))
    arguments = ("--text", "body", "--model", made.model, "-o", tmp_path / "out", "--work", tmp_path / "work")
    run_example("hugging_face_dataset.py", tmp_path / "in", *arguments)
    rows = load_from_disk(str(tmp_path / "out"))
    assert rows["body"][:] == texts
    assert rows["label"][:] == list(range(50))
    embeddings = rows["embedding"][:]
    assert embeddings[7] is None
    assert all(len(vector) == 32 for number, vector in enumerate(embeddings) if number != 7)
    np.testing.assert_array_equal(embeddings[3], embeddings[43])
    assert embeddings[3] != embeddings[4]
