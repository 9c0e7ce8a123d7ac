"""Opening a dataset: what its manifest names counts, and what is not as it should be is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from embedq_schemas.errors import OutputError, RunIncompleteError, RunNotFoundError, UsageError
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.sinks.dataset import Dataset
from handmade_dataset import add_file, complete, make_dataset, new_dataset, rows_of, text_of, vectors_of

from embedq.dataset import open_dataset


def test_a_complete_dataset_says_how_its_vectors_were_made_and_gives_its_rows_in_file_order(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(tmp_path / "d", [[5, 1], [0, 9, 3]]))
    assert (dataset.complete, dataset.rows, dataset.dimensions) == (True, 5, 8)
    assert (dataset.facts.model_id, dataset.facts.normalized, dataset.facts.dtype) == ("handmade", True, "float32")
    table = pa.Table.from_batches(dataset.batches(batch_rows=2))
    assert table.column("ordinal").to_pylist() == [5, 1, 0, 9, 3]
    assert table.column("text").to_pylist() == [text_of(ordinal) for ordinal in [5, 1, 0, 9, 3]]
    assert [batch.num_rows for batch in dataset.batches(batch_rows=2)] == [2, 2, 1]


def test_vectors_are_a_view_of_the_columns_memory(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(tmp_path / "d", [[2, 0, 1]]))
    for order in ("file", "input"):
        (batch,) = dataset.batches(["vector", "ordinal"], order=order)
        vectors = VectorBatch(batch).vectors
        np.testing.assert_array_equal(vectors, vectors_of(batch.column("ordinal").to_pylist()))
        values = batch.column("vector").flatten().buffers()[1]
        assert values.address <= vectors.ctypes.data < values.address + values.size


def test_columns_come_in_the_datasets_order_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(tmp_path / "d", [[0]]))
    for order in ("file", "input"):
        (batch,) = dataset.batches(["text", "id"], order=order)
        assert batch.schema.names == ["id", "text"]
    with pytest.raises(UsageError, match="has no column colour; it has: id, ordinal, vector"):
        dataset.batches(["colour"])


def test_an_incomplete_dataset_is_refused_unless_a_partial_one_will_do(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    add_file(path, rows_of([0, 1]))
    with pytest.raises(RunIncompleteError, match="holds 2 vectors so far"):
        open_dataset(path)
    dataset = open_dataset(path, partial=True)
    assert (dataset.complete, dataset.rows) == (False, 2)


def test_files_that_no_manifest_names_do_not_count(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1]])
    (part,) = path.glob("part-*.parquet")
    (path / f"part-{'0' * 32}.parquet").write_bytes(part.read_bytes())
    assert sum(batch.num_rows for batch in open_dataset(path).batches()) == 2


def test_a_file_that_a_compaction_moved_meanwhile_is_still_read(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1]])
    dataset = open_dataset(path)
    (part,) = path.glob("part-*.parquet")
    (path / "_superseded").mkdir()
    part.rename(path / "_superseded" / f"{part.name}.old")
    assert sum(batch.num_rows for batch in dataset.batches()) == 2


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="holds no run"):
        open_dataset(tmp_path)


def test_missing_and_shortened_files_are_named(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1], [2]])
    part = path / open_dataset(path).files[1].name
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(OutputError, match=f"{part.name} holds {len(content) - 1} bytes"):
        open_dataset(path)
    part.unlink()
    with pytest.raises(OutputError, match=f"{part.name} is in the manifest and cannot be read"):
        open_dataset(path)


def test_a_file_with_another_content_is_named(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1], [2]])
    dataset = open_dataset(path)
    part = path / dataset.files[1].name
    part.write_bytes(b"\0" * part.stat().st_size)
    with pytest.raises(OutputError, match=f"{part.name} cannot be read"):
        list(open_dataset(path).batches())


def test_files_of_different_columns_are_named(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1]])
    add_file(path, rows_of([2]).drop_columns(["lang"]))
    complete(path, 3, 2)
    for order in ("file", "input"):
        with pytest.raises(OutputError, match="column lang is missing"):
            list(open_dataset(path).batches(order=order))


def test_a_manifest_that_lost_a_line_is_noticed(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1], [2]])
    manifest = path / "_manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(OutputError, match="holds 2 rows, its run had 3"):
        open_dataset(path)


def test_a_damaged_mark_of_completeness_is_named(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0]])
    Dataset(path).success.write_text("[]")
    with pytest.raises(OutputError, match="_SUCCESS is not what a run writes"):
        open_dataset(path)


def test_a_dataset_without_rows_opens_and_gives_none(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    complete(path, 0, 0)
    dataset = open_dataset(path)
    assert dataset.rows == 0
    with pytest.raises(OutputError, match="holds no vectors"):
        dataset.batches()
