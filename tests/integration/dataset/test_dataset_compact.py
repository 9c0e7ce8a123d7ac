"""`embedq compact`: the same rows in fewer files, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_helpers import Command, Made
from embedq_broker.faults import POINTS
from embedq_schemas.errors import RunConflictError, RunIncompleteError
from embedq_schemas.manifest import read_manifest
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.parquet import ranges
from handmade_dataset import add_file, complete, make_dataset, new_dataset, rows_of, vectors_of
from numpy.typing import NDArray

from embedq.dataset import DatasetReader, open_dataset
from embedq.dataset.compaction import Compaction, compact_dataset
from embedq.directory import owned

FILE_BYTES = 1 << 16
STEPS = [point for point in POINTS if point.startswith(("stage.", "compact."))]


def compact(path: Path, *, file_bytes: int = FILE_BYTES, grace_s: float = 0) -> Compaction:
    return compact_dataset(path, file_bytes=file_bytes, grace_s=grace_s)


def rows_in(dataset: DatasetReader) -> pa.Table:
    return pa.Table.from_batches(dataset.batches()).sort_by("ordinal")


def assert_sound(path: Path, *, rows: int, files: int) -> None:
    """The manifest, the files and the mark of completeness say the same, and nothing else lies there."""
    manifest = read_manifest(path)
    assert {file.name for file in manifest.values()} == {part.name for part in path.glob("part-*")}
    assert len(manifest) == files
    for file in manifest.values():
        table = pq.read_table(path / file.name)
        assert table.num_rows == file.rows
        assert file.ordinals == ranges(table.column("ordinal").to_numpy())
        assert file.size_bytes == (path / file.name).stat().st_size
        lengths = np.minimum(table.column("n_tokens").to_numpy(), 40)
        assert file.tokens == lengths.sum()
    assert sum(file.rows for file in manifest.values()) == rows
    assert json.loads(Dataset(path).success.read_text())["files"] == files
    assert sorted(p.name for p in path.iterdir() if not p.name.startswith("part-")) == [
        "_SUCCESS", "_errors", "_manifest.jsonl", "_run.json", "_staging",
    ]  # fmt: skip
    assert not list((path / "_staging").iterdir())


def test_small_files_become_few_in_input_order_and_every_record_stays_true(tmp_path: Path) -> None:
    # 8 dimensions: a file of 65,536 bytes takes 2,048 rows.
    files = [list(range(number, 5000, 10)) for number in range(10)]
    path = make_dataset(tmp_path / "d", files)
    before = rows_in(open_dataset(path))
    done = compact(path)
    assert done == Compaction(files_before=10, files_after=3, rows_dropped=0, waiting_files=0)
    assert_sound(path, rows=5000, files=3)
    after = open_dataset(path)
    assert rows_in(after) == before
    assert pa.Table.from_batches(after.batches(["ordinal"])).column("ordinal").to_pylist() == list(range(5000))
    assert after.facts.model_id == "handmade"
    assert [file.rows for file in after.files] == [2048, 2048, 904]


def test_large_files_stay_as_they_are_and_a_second_call_finds_nothing_to_do(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [list(range(2000)), [2000], [2001, 2002]])
    large = open_dataset(path).files[0]
    assert compact(path).files_after == 2
    assert large in open_dataset(path).files
    manifest = (path / "_manifest.jsonl").read_bytes()
    assert compact(path) == Compaction(files_before=2, files_after=2, rows_dropped=0, waiting_files=0)
    assert (path / "_manifest.jsonl").read_bytes() == manifest
    assert_sound(path, rows=2003, files=2)


def doubled(path: Path) -> Path:
    """A dataset whose server lost a commit: documents 3 to 5 were embedded again, into two later files."""
    make_dataset(path, [list(range(2000)), [7000, 7001]])
    add_file(path, rows_of([3, 4], seed=1))
    add_file(path, rows_of([4, 5], seed=2))
    complete(path, 2006, 4)
    return path


def expected_of_doubled() -> NDArray[np.float32]:
    vectors = vectors_of([*range(2000), 7000, 7001])
    vectors[3], vectors[4:6] = vectors_of([3], seed=1)[0], vectors_of([4, 5], seed=2)
    return vectors


def test_of_doubled_rows_the_newest_stays(tmp_path: Path) -> None:
    path = doubled(tmp_path / "d")
    done = compact(path)
    assert (done.rows_dropped, done.files_after) == (4, 1)
    assert_sound(path, rows=2002, files=1)
    (batch,) = open_dataset(path).batches(["vector"])
    np.testing.assert_array_equal(VectorBatch(batch).vectors, expected_of_doubled())
    summary = json.loads((path / "_SUCCESS").read_text())
    assert (summary["succeeded"], summary["superseded"]) == (2006, 4)
    assert compact(path).rows_dropped == 0


def test_documents_that_a_foreign_producer_numbered_alike_all_stay(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    for job in range(3):
        add_file(path, rows_of([0, 1], ids=[f"{job}-0", f"{job}-1"]))
    complete(path, 6, 3)
    assert compact(path) == Compaction(files_before=3, files_after=1, rows_dropped=0, waiting_files=0)
    assert open_dataset(path).rows == 6


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_it_loses_and_doubles_nothing_and_a_repeated_call_completes_it(
    step: str, tmp_path: Path
) -> None:
    path = doubled(tmp_path / "d")
    opened_before = open_dataset(path)
    script = (
        f"from embedq.dataset.compaction import compact_dataset as c; c({str(path)!r}, file_bytes=65536, grace_s=9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"EMBEDQ_FAULTS": f"{step}:kill"},
        capture_output=True,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    # A reader from before, and one of now, see each document's newest row.
    for dataset in (opened_before, open_dataset(path)):
        batches = list(dataset.batches(["vector"], order="input"))
        np.testing.assert_array_equal(np.concatenate([VectorBatch(b).vectors for b in batches]), expected_of_doubled())
    compact(path, grace_s=9)
    assert open_dataset(path).rows == 2002
    for dataset in (opened_before, open_dataset(path)):
        assert sum(batch.num_rows for batch in dataset.batches(["id"], order="input")) == 2002
    assert compact(path).waiting_files == 0
    assert_sound(path, rows=2002, files=1)


def test_a_reader_in_the_middle_of_its_files_goes_on_through_a_compaction(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1], [2, 3], [4, 5]])
    batches = open_dataset(path).batches(["ordinal"])
    found = next(batches).column("ordinal").to_pylist()
    assert compact(path, grace_s=60) == Compaction(files_before=3, files_after=1, rows_dropped=0, waiting_files=3)
    for batch in batches:
        found += batch.column("ordinal").to_pylist()
    assert found == [0, 1, 2, 3, 4, 5]
    assert compact(path, grace_s=60).waiting_files == 3
    assert compact(path).waiting_files == 0
    assert_sound(path, rows=6, files=1)


@pytest.mark.parametrize("attempt", range(6))
def test_readers_that_open_the_dataset_at_any_moment_see_each_document_once(attempt: int, tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [list(range(number, 400, 20)) for number in range(20)])
    for seed in range(1, 4):
        add_file(path, rows_of(range(0, 400, 40), seed=seed))
    complete(path, 430, 23)
    expected = vectors_of(range(400))
    expected[::40] = vectors_of(range(0, 400, 40), seed=3)
    with ThreadPoolExecutor(1) as pool:
        compaction = pool.submit(compact, path, grace_s=60)
        over = False
        while not over:
            over = compaction.done()
            batches = list(open_dataset(path).batches(["vector"], order="input"))
            np.testing.assert_array_equal(np.concatenate([VectorBatch(b).vectors for b in batches]), expected)
    assert compaction.result().rows_dropped == 30


def test_files_of_different_machines_are_merged_and_say_what_they_were_computed_in(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1]])
    add_file(path, rows_of([2]), dtype="bfloat16")
    complete(path, 3, 2)
    compact(path)
    assert open_dataset(path).facts.dtype == "float32, bfloat16"


def test_a_disk_that_takes_no_more_leaves_the_dataset_as_it_was(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [list(range(number, 4000, 10)) for number in range(10)])
    before = sorted(file.name for file in path.rglob("*"))
    # A merged file is longer than what may be written: the disk seems to be full.
    script = (
        "import resource, sys; from embedq.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (110_000, 110_000)); main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, "compact", str(path), "--file-bytes", str(1 << 16)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5, done.stderr
    assert done.stderr.startswith("error: storage: cannot write ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(file.name for file in path.rglob("*")) == before
    assert compact(path).files_after == 2


def test_an_incomplete_dataset_is_left_alone(tmp_path: Path) -> None:
    path = new_dataset(tmp_path / "d")
    for ordinal in range(3):
        add_file(path, rows_of([ordinal]))
    staged = path / "_staging" / "of-a-worker.tmp"
    staged.touch()
    with pytest.raises(RunIncompleteError, match="its run comes first"):
        compact(path)
    assert staged.exists()
    assert len(list(path.glob("part-*"))) == 3


def test_two_at_once_are_one_too_many(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0], [1]])
    with owned(Dataset(path)), pytest.raises(RunConflictError, match="another embedq run or embedq compact"):
        compact(path)
    assert compact(path).files_after == 1


def test_the_run_of_a_compacted_dataset_is_complete_and_may_be_retried(
    made: Made, embedq: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run: tuple[object, ...] = (
        "run",
        made.path.parent / "corpus.jsonl",
        "-o",
        out,
        "--model",
        made.model,
        "--engine",
        "null",
    )
    run += ("--keep-text", "--job-documents", 8, "--max-batch-tokens", 64, "--flush-interval-s", 0.01)
    assert embedq_run(run) == 3
    before = rows_in(open_dataset(out))
    files = len(open_dataset(out).files)
    assert files > 1

    said = embedq("compact", out, "--grace-s", 0)
    assert (said.status, said.out) == (0, f"{out}: {files} files became 1\n")
    assert embedq("compact", out).out == f"{out}: 1 file, nothing to merge\n"
    again = embedq(*run)
    assert again.status == 3
    assert f"{out} is already complete" in again.err
    assert rows_in(open_dataset(out)) == before
    assert json.loads(embedq("status", out, "--json").out)["runs"][0]["published_files"] == 1

    assert embedq("retry", out).out.startswith("2 failed documents to send again")
    assert embedq_run(run) == 3
    assert rows_in(open_dataset(out)) == before
    assert [line["code"] for line in map(json.loads, embedq("errors", out, "--json").out.splitlines())] == [
        "invalid_json",
        "missing_text",
    ]


def embedq_run(arguments: tuple[object, ...]) -> int:
    command = [sys.executable, "-m", "embedq", *map(str, arguments), "--threads", "1"]
    return subprocess.run(command, capture_output=True, timeout=120).returncode
