"""Datasets of compact vectors: reading, searching, inspecting, compacting and exporting each type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_helpers import Command
from embedq_schemas.errors import OutputError
from embedq_schemas.quantize import VectorType, bits_of, dequantize, encode_ranges, quantize, ranges_of
from embedq_schemas.vector_batch import VectorBatch
from handmade_dataset import add_file, complete, new_dataset, rows_of, vectors_of
from numpy.typing import NDArray

from embedq.dataset import open_dataset
from embedq.dataset.search import nearest

PAGE = Path(__file__).parents[3] / "docs/dataset.md"
DIMENSIONS = 16
FILES = ([3, 0, 7, 12, 40, 41], [1, 2, 6, 5, 20], [4, 9, 8, 30])
ORDINALS = sorted(ordinal for file in FILES for ordinal in file)
VECTORS = vectors_of(ORDINALS, DIMENSIONS)
RANGES = ranges_of(vectors_of(range(20), DIMENSIONS))
KINDS = pytest.mark.parametrize("kind", VectorType)


def add(path: Path, ordinals: list[int], kind: VectorType, ranges: NDArray[np.float32] = RANGES, seed: int = 0) -> Path:
    rows = VectorBatch(rows_of(ordinals, dimensions=DIMENSIONS, seed=seed)).quantized(kind, ranges).table
    more: dict[str, Any] = {"vector_type": str(kind)} | ({"ranges": encode_ranges(ranges)} if kind.ranged else {})
    return add_file(path, rows, **more)


def make(path: Path, kind: VectorType) -> Path:
    new_dataset(path)
    for ordinals in FILES:
        add(path, list(ordinals), kind)
    complete(path, len(ORDINALS), len(FILES))
    return path


def stored(kind: VectorType) -> NDArray[np.generic]:
    return quantize(VECTORS, kind, RANGES)


def meant(kind: VectorType) -> NDArray[np.float32]:
    return dequantize(stored(kind), kind, RANGES)


@KINDS
def test_arrays_have_the_dtype_and_shape_of_their_type_in_any_order(kind: VectorType, tmp_path: Path) -> None:
    dataset = open_dataset(make(tmp_path / "d", kind))
    assert (dataset.facts.vector_type, dataset.facts.dimensions) == (kind, DIMENSIONS)
    assert dataset.row_bytes == kind.row_bytes(DIMENSIONS)
    assert (dataset.ranges is not None) == kind.ranged
    if dataset.ranges is not None:
        np.testing.assert_array_equal(dataset.ranges, RANGES)
    for rows in (2, 1000):
        batches = list(dataset.batches(["ordinal", "vector"], order="input", batch_rows=rows))
        found = np.concatenate([VectorBatch(batch).vectors for batch in batches])
        assert found.dtype == kind.dtype
        np.testing.assert_array_equal(found, stored(kind))
        np.testing.assert_array_equal(np.concatenate([dataset.as_float32(batch) for batch in batches]), meant(kind))
    by_ordinal = dict(zip(ORDINALS, stored(kind), strict=True))
    for batch in dataset.batches():
        expected = [by_ordinal[ordinal] for ordinal in batch.column("ordinal").to_pylist()]
        np.testing.assert_array_equal(VectorBatch(batch).vectors, expected)


@KINDS
def test_the_pages_snippet_reads_each_type(kind: VectorType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text().partition("\n## Vector types\n")[2].partition("\n## ")[0]
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    make(tmp_path / "vectors", kind)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(snippet, found)
    at = [ORDINALS.index(int(id[1:])) for id in found["batch"].column("id").to_pylist()]
    np.testing.assert_array_equal(found["stored"], stored(kind)[at])
    np.testing.assert_array_equal(found["vectors"], meant(kind)[at])


@KINDS
def test_other_readers_find_the_same_bytes(kind: VectorType, tmp_path: Path) -> None:
    path = make(tmp_path / "d", kind)
    parts = f"{path}/part-*.parquet"
    rows = duckdb.sql(f"SELECT vector FROM '{parts}' ORDER BY ordinal").fetchall()
    column = pa.concat_tables([pq.read_table(part) for part in path.glob("part-*")]).sort_by("ordinal")["vector"]
    for found in ([row[0] for row in rows], column.to_pylist()):
        if not kind.floating:
            found = [np.frombuffer(value, kind.dtype) for value in found]
        np.testing.assert_array_equal(np.array(found, kind.dtype), stored(kind))
    (facts,) = {pq.read_metadata(part).metadata[b"embedq.vector_type"] for part in path.glob("part-*")}
    assert facts.decode() == kind


@KINDS
def test_a_question_is_compared_as_float32_with_what_each_vector_stands_for(kind: VectorType, tmp_path: Path) -> None:
    dataset = open_dataset(make(tmp_path / "d", kind))
    questions = vectors_of([100, 101, 102], DIMENSIONS)
    scores = meant(kind) @ questions.T
    for column, hits in enumerate(nearest(dataset, questions, 5, threads=1)):
        best = np.sort(scores[:, column])[::-1][:5]
        np.testing.assert_allclose([hit.score for hit in hits], best, atol=1e-6)
        found = [ORDINALS.index(hit.row["ordinal"]) for hit in hits]
        np.testing.assert_allclose(scores[found, column], best, atol=1e-6)


@KINDS
def test_inspect_says_what_is_stored(kind: VectorType, tmp_path: Path, embedq: Command) -> None:
    path = make(tmp_path / "d", kind)
    said = embedq("inspect", path)
    assert said.status == 0, said.err
    line = f"{kind}, {kind.row_bytes(DIMENSIONS)} bytes a vector"
    if kind.ranged:
        line += f", ranges within {RANGES.min():.4f} and {RANGES.max():.4f}"
    assert f"  stored as                {line}\n" in said.out
    assert ("norms" in said.out) == kind.floating
    document = json.loads(embedq("inspect", path, "--json").out)
    assert document["facts"]["vector_type"] == kind
    if kind.floating:
        assert document["norms"]["not_unit"] == 0
    else:
        assert document["norms"] is None


@KINDS
def test_compaction_keeps_vectors_and_ranges(kind: VectorType, tmp_path: Path, embedq: Command) -> None:
    path = make(tmp_path / "d", kind)
    said = embedq("compact", path, "--grace-s", 0)
    assert said.out.endswith("3 files became 1\n")
    dataset = open_dataset(path)
    (batch,) = dataset.batches(order="input")
    np.testing.assert_array_equal(VectorBatch(batch).vectors, stored(kind))
    assert dataset.facts.vector_type is kind
    if kind.ranged:
        np.testing.assert_array_equal(dataset.ranges, RANGES)


@KINDS
def test_results_prints_the_stored_numbers(kind: VectorType, tmp_path: Path, embedq: Command) -> None:
    said = embedq("results", make(tmp_path / "d", kind))
    assert said.status == 0, said.err
    found = {row["ordinal"]: row["vector"] for row in map(json.loads, said.out.splitlines())}
    np.testing.assert_array_equal(np.array([found[o] for o in ORDINALS], kind.dtype), stored(kind))


@KINDS
def test_numpy_and_json_lines_get_vectors_as_they_are(kind: VectorType, tmp_path: Path, embedq: Command) -> None:
    path = make(tmp_path / "d", kind)
    assert embedq("export", path, "--to", "npy", "-o", "n").status == 0
    array = np.load("n/vectors.npy", mmap_mode="r")
    assert array.dtype == kind.dtype
    np.testing.assert_array_equal(array, stored(kind))
    assert Path("n/ranges.npy").exists() == kind.ranged
    if kind.ranged:
        np.testing.assert_array_equal(np.load("n/ranges.npy"), RANGES)
    assert embedq("export", path, "--to", "jsonl", "-o", "j").status == 0
    rows = [json.loads(line)["vector"] for line in Path("j").read_text().splitlines()]
    np.testing.assert_array_equal(np.array(rows, kind.dtype), stored(kind))


@KINDS
def test_faiss_gets_a_binary_index_for_signs_and_float32_for_the_rest(
    kind: VectorType, tmp_path: Path, embedq: Command
) -> None:
    import faiss

    assert embedq("export", make(tmp_path / "d", kind), "--to", "faiss", "-o", "f").status == 0
    if not kind.packed:
        whole = faiss.read_index("f/index.faiss")
        np.testing.assert_array_equal(whole.reconstruct_n(0, whole.ntotal), meant(kind))
        return
    index: Any = faiss.read_index_binary("f/index.faiss")
    assert (index.ntotal, index.d) == (len(ORDINALS), DIMENSIONS)
    bits = bits_of(stored(kind), kind)
    distances, found = index.search(bits[4:5], 3)
    hamming = np.unpackbits(bits ^ bits[4], axis=1).sum(axis=1)
    assert distances[0].tolist() == sorted(hamming.tolist())[:3]
    assert hamming[found[0]].tolist() == distances[0].tolist()


@KINDS
def test_lance_gets_columns_that_it_searches(kind: VectorType, tmp_path: Path, embedq: Command) -> None:
    import lance

    said = embedq("export", make(tmp_path / "d", kind), "--to", "lance", "-o", "l.lance")
    assert said.status == 0, said.err
    table = lance.dataset("l.lance").to_table()
    assert table["ordinal"].to_pylist() == ORDINALS
    expected = bits_of(stored(kind), kind) if kind.packed else meant(kind)
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), expected.dtype), expected)
    query = expected[5] if kind is not VectorType.FLOAT16 else expected[5].astype(np.float16)
    search = {"column": "vector", "q": query, "k": 1, "metric": "hamming" if kind.packed else "cosine"}
    (hit,) = lance.dataset("l.lance").to_table(nearest=search)["ordinal"].to_pylist()
    assert hit == ORDINALS[5]


@pytest.mark.parametrize("kind", [kind for kind in VectorType if kind.packed])
@pytest.mark.parametrize("target", ["pgvector", "qdrant"])
def test_a_target_without_bits_refuses_them_and_names_what_it_takes(
    kind: VectorType, target: str, tmp_path: Path, embedq: Command
) -> None:
    path = make(tmp_path / "d", kind)
    said = embedq("export", path, "--to", target, "--url", "postgresql://nowhere")
    assert said.status == 2
    assert said.err == (
        f"error: usage: {path} holds {kind} vectors; --to {target} takes float32, float16, int8, uint8\n"
    )


@pytest.mark.parametrize("kind", [VectorType.FLOAT16, VectorType.INT8, VectorType.UINT8])
def test_postgres_gets_float32(kind: VectorType, tmp_path: Path, embedq: Command, postgres_url: str) -> None:
    import psycopg
    from pgvector.psycopg import register_vector

    said = embedq("export", make(tmp_path / "d", kind), "--to", "pgvector", "--url", postgres_url)
    assert said.status == 0, said.err
    with psycopg.connect(postgres_url) as connection:
        register_vector(connection)
        rows = connection.execute("SELECT vector FROM embeddings ORDER BY ordinal").fetchall()
    np.testing.assert_array_equal([row[0].to_numpy() for row in rows], meant(kind))


@pytest.mark.parametrize("kind", [VectorType.FLOAT16, VectorType.INT8])
def test_qdrant_gets_float32(kind: VectorType, tmp_path: Path, embedq: Command) -> None:
    from qdrant_client import QdrantClient

    said = embedq("export", make(tmp_path / "d", kind), "--to", "qdrant", "-o", "q")
    assert said.status == 0, said.err
    client = QdrantClient(path="q")
    points, _ = client.scroll("embeddings", limit=100, with_vectors=True)
    client.close()
    found = {point.payload["ordinal"]: point.vector for point in points}
    np.testing.assert_allclose([found[ordinal] for ordinal in ORDINALS], meant(kind), atol=1e-6)


def test_files_whose_vectors_do_not_compare_are_not_read_as_one_dataset(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    add(path, [0, 1], VectorType.INT8)
    other = add(path, [2, 3], VectorType.INT8, ranges=RANGES * np.float32(2))
    complete(path, 4, 2)
    dataset = open_dataset(path)
    with pytest.raises(OutputError, match=rf"{other.name}: its int8 vectors have other ranges"):
        list(dataset.batches(["vector"]))
    assert sum(batch.num_rows for batch in dataset.batches(["id"])) == 4

    path = new_dataset(tmp_path / "e")
    add(path, [0, 1], VectorType.BINARY)
    add(path, [2, 3], VectorType.UBINARY)
    complete(path, 4, 2)
    with pytest.raises(OutputError, match="its vectors are not binary as elsewhere"):
        list(open_dataset(path).batches(["vector"]))


def test_int8_vectors_without_ranges_are_not_read(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    add_file(path, VectorBatch(rows_of([0], dimensions=DIMENSIONS)).quantized(VectorType.INT8, RANGES).table)
    complete(path, 1, 1)
    with pytest.raises(OutputError, match="int8 vectors whose ranges are missing"):
        _ = open_dataset(path).facts
