"""Input order: every row once and ascending, whatever files it lies in, however little memory there is."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from embedq_schemas.errors import OutputError
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.vector_batch import VectorBatch
from handmade_dataset import add_file, complete, make_dataset, new_dataset, rows_of, vectors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from embedq.dataset import input_order, open_dataset
from embedq.dataset.input_order import Ranks, in_input_order


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_distribution_over_files_comes_out_ascending_and_whole(data: st.DataObject) -> None:
    ordinals = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=60, unique=True))
    owners = data.draw(st.lists(st.integers(0, 4), min_size=len(ordinals), max_size=len(ordinals)))
    files = [[o for o, owner in zip(ordinals, owners, strict=True) if owner == number] for number in range(5)]
    # Ascending files above a size are not read at once.
    files = [sorted(file) if number % 2 else file for number, file in enumerate(files)]
    held_bytes = data.draw(st.sampled_from([0, 1 << 30]))
    batch_rows = data.draw(st.integers(1, 70))
    memory_bytes = data.draw(st.sampled_from([0, 3000, 1 << 30]))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_order._Streamed, "held_bytes", held_bytes)
        dataset = open_dataset(make_dataset(Path(folder) / "d", [file for file in files if file]))
        batches = list(in_input_order(dataset, dataset.schema, batch_rows, memory_bytes=memory_bytes))
    table = pa.Table.from_batches(batches)
    assert table.column("ordinal").to_pylist() == sorted(ordinals)
    assert table.column("id").to_pylist() == [f"d{ordinal}" for ordinal in sorted(ordinals)]
    np.testing.assert_array_equal(
        np.concatenate([VectorBatch(b).vectors for b in batches]), vectors_of(sorted(ordinals))
    )
    assert all(batch.num_rows == batch_rows for batch in batches[:-1])


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=12))
def test_ranks_are_those_of_the_union_of_overlapping_ranges(spans: list[tuple[int, int]]) -> None:
    files = [
        PublishedFile(token=f"{i:032x}", run="r", rows=1, size_bytes=1, tokens=0, ordinals=(first, first + length))
        for i, (first, length) in enumerate(spans)
    ]
    union = sorted({ordinal for first, length in spans for ordinal in range(first, first + length + 1)})
    ranks = Ranks(tuple(files))
    assert ranks.total == len(union)
    assert [ranks.ordinal(rank) for rank in range(len(union))] == union


def test_of_a_doubled_document_the_newest_row_comes(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1, 2, 3]])
    add_file(path, rows_of([1, 2], seed=5))
    complete(path, 6, 2)
    batches = list(open_dataset(path).batches(["ordinal", "vector"], order="input", batch_rows=3))
    assert [batch.column("ordinal").to_pylist() for batch in batches] == [[0, 1, 2], [3]]
    found = np.concatenate([VectorBatch(batch).vectors for batch in batches])
    np.testing.assert_array_equal(found[1:3], vectors_of([1, 2], seed=5))
    np.testing.assert_array_equal(found[[0, 3]], vectors_of([0, 3]))


def test_documents_that_a_foreign_producer_numbered_alike_all_come(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    for job in range(3):
        add_file(path, rows_of([0, 1], ids=[f"{job}-0", f"{job}-1"]))
    complete(path, 6, 3)
    batches = list(open_dataset(path).batches(["id"], order="input", batch_rows=4))
    assert [b.column("id").to_pylist() for b in batches] == [["0-0", "1-0", "2-0", "0-1"], ["1-1", "2-1"]]


def test_a_file_that_does_not_hold_the_ordinals_of_its_manifest_line_is_named(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1, 2]])
    manifest = path / "_manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b'"ordinals":[0,2]', b'"ordinals":[1,3]'))
    with pytest.raises(OutputError, match="holds ordinals 0 to 2"):
        list(open_dataset(path).batches(order="input"))


def test_a_full_temporary_directory_is_said_in_one_sentence(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", [list(range(0, 4000, 2)), list(range(1, 4000, 2))])
    script = """
import resource, sys
from embedq.dataset import open_dataset
from embedq.dataset.input_order import in_input_order
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
dataset = open_dataset(sys.argv[1])
try:
    list(in_input_order(dataset, dataset.schema, 100, memory_bytes=0))
except Exception as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "d")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("StorageError cannot sort rows in the temporary directory (TMPDIR names another): ")


def test_files_that_all_wait_for_each_other_do_not_grow_memory(tmp_path: Path) -> None:
    # 16 files of 2 MB whose ordinals interleave: a merge needs them all at once.
    files, rows, dimensions = 16, 1000, 512
    make_dataset(
        tmp_path / "d",
        [list(range(number, files * rows, files)) for number in range(files)],
        dimensions=dimensions,
    )
    script = """
import sys, pyarrow as pa
from embedq.dataset import open_dataset
from embedq.dataset.input_order import in_input_order
dataset = open_dataset(sys.argv[1])
last = -1
for batch in in_input_order(dataset, dataset.schema, 200, memory_bytes=4 << 20):
    assert batch.column("ordinal")[0].as_py() == last + 1
    last = batch.column("ordinal")[-1].as_py()
print(last, pa.default_memory_pool().max_memory())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "d")], check=True, capture_output=True, text=True, timeout=120
    )
    last, most = map(int, done.stdout.split())
    assert last == files * rows - 1
    assert most < files * rows * dimensions * 4 / 2
