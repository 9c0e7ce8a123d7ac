"""Every reader that docs/dataset.md shows: its snippet runs as it stands, and finds the right values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_helpers import Command, Made

PAGE = Path(__file__).parents[3] / "docs/dataset.md"
QDRANT = 'QdrantClient("http://localhost:6333")'


def section(title: str) -> str:
    """The part of the page below the heading `title`."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def run_snippet(title: str, made: Made, embedq: Command, **places: tuple[str, str]) -> dict[str, Any]:
    """Run the section's commands, then its Python, beside a dataset `vectors`. Returns the names it defined.

    `places` are words of the page, and what stands for them here.
    """
    text = section(title)
    for word, here in places.values():
        assert word in text
        text = text.replace(word, here)
    Path("vectors").symlink_to(made.path)
    for line in re.findall(r"^    embedq (.*)$", text, re.MULTILINE):
        said = embedq(*shlex.split(line))
        assert said.status == 0, said.err
    found: dict[str, Any] = {}
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)), found)
    return found


def nearest_ids(made: Made, k: int = 3) -> list[str]:
    """The documents nearest to document 7."""
    return [made.ids[row] for row in np.argsort(-(made.vectors @ made.vectors[7]), kind="stable")[:k]]


def test_embedq_itself(made: Made, embedq: Command) -> None:
    found = run_snippet("embedq", made, embedq)
    assert found["ids"] == made.ids
    np.testing.assert_array_equal(np.concatenate(found["blocks"]), made.vectors)


def test_duckdb(made: Made, embedq: Command) -> None:
    found = run_snippet("DuckDB", made, embedq)
    assert [row[0] for row in found["rows"]] == made.ids
    np.testing.assert_array_equal(np.array([row[1] for row in found["rows"]], np.float32), made.vectors)
    assert [row[0] for row in found["nearest"]] == nearest_ids(made)


def test_polars(made: Made, embedq: Command) -> None:
    found = run_snippet("Polars", made, embedq)
    frame = found["frame"]
    assert frame["id"].to_list() == made.ids
    assert frame["lang"].to_list() == [document["lang"] for document in made.documents]
    assert found["vectors"].dtype == np.float32
    np.testing.assert_array_equal(found["vectors"], made.vectors)


def test_pandas(made: Made, embedq: Command) -> None:
    found = run_snippet("pandas", made, embedq)
    frame = found["frame"]
    assert frame["id"].tolist() == made.ids
    assert frame["text"].tolist() == [document["text"] for document in made.documents]
    assert found["vectors"].dtype == np.float32
    np.testing.assert_array_equal(found["vectors"], made.vectors)


def test_hugging_face_datasets(made: Made, embedq: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = run_snippet("Hugging Face datasets", made, embedq)
    assert found["rows"]["id"][:] == made.ids
    assert found["vectors"].dtype == np.float32
    np.testing.assert_array_equal(found["vectors"], made.vectors)


def test_numpy(made: Made, embedq: Command) -> None:
    found = run_snippet("NumPy", made, embedq)
    assert found["ids"] == made.ids
    assert isinstance(found["vectors"], np.memmap)
    np.testing.assert_array_equal(found["vectors"], made.vectors)


def test_faiss(made: Made, embedq: Command) -> None:
    found = run_snippet("FAISS", made, embedq)
    assert found["ids"] == made.ids
    np.testing.assert_array_equal(found["index"].reconstruct_n(0, 60), made.vectors)
    assert found["nearest"] == nearest_ids(made)


def test_lancedb(made: Made, embedq: Command) -> None:
    found = run_snippet("LanceDB", made, embedq)
    rows = found["rows"]
    assert rows["id"].to_pylist() == made.ids
    assert rows["lang"].to_pylist() == [document["lang"] for document in made.documents]
    np.testing.assert_array_equal(np.array(rows["vector"].to_pylist(), np.float32), made.vectors)
    assert [row["id"] for row in found["nearest"]] == nearest_ids(made)


def test_postgresql_with_pgvector(made: Made, embedq: Command, postgres_url: str) -> None:
    url = ("postgresql://user@localhost/mydb", postgres_url)
    found = run_snippet("PostgreSQL with pgvector", made, embedq, url=url)
    assert [row[0] for row in found["rows"]] == made.ids
    np.testing.assert_array_equal(np.stack(found["vectors"]), made.vectors)
    assert found["nearest"] == nearest_ids(made)


def test_qdrant(made: Made, embedq: Command) -> None:
    # The local mode stands for a server; the snippet is the same from there on.
    command = ("--url http://localhost:6333", "--output qdrant")
    client = (QDRANT, 'QdrantClient(path="qdrant")')
    found = run_snippet("Qdrant", made, embedq, command=command, client=client)
    stored = {point.payload["id"]: point for point in found["points"]}
    assert set(stored) == set(made.ids)
    np.testing.assert_array_equal(np.array([stored[id].vector for id in made.ids], np.float32), made.vectors)
    assert stored["d0"].payload["text"] == made.documents[0]["text"]
    seventh = found["points"][7].payload["id"]
    scores = made.vectors @ made.vectors[made.ids.index(seventh)]
    best = [made.ids[row] for row in np.argsort(-scores, kind="stable")[:3]]
    assert [point.payload["id"] for point in found["nearest"]] == best


@pytest.mark.parametrize("pattern", ["part-*.parquet", "**/*.parquet"])
def test_a_glob_finds_the_rows_and_nothing_else(made: Made, pattern: str) -> None:
    import pyarrow.parquet as pq

    assert sum(pq.read_metadata(file).num_rows for file in made.path.glob(pattern)) == 60
    assert pq.read_table(made.path, columns=["id"]).num_rows == 60
