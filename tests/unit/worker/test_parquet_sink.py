"""Staged files: durable, complete, readable by anybody, and told apart from damaged ones."""

from __future__ import annotations

import itertools
import resource
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from embedq_schemas.errors import StorageError
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.quantize import VectorType, ranges_of
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_schemas.token_batch import make_token_batch
from embedq_schemas.vector_batch import VectorBatch, make_vector_batch
from embedq_worker.sinks import parquet
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.parquet import ranges, stage, verify
from hypothesis import given
from hypothesis import strategies as st

TOKEN = "0123456789abcdef" * 2


def vectors(ordinals: list[int], dimension: int = 8, metadata: tuple[str, ...] = ("lang",)) -> VectorBatch:
    n = len(ordinals)
    columns = {name: [None if o % 3 == 0 else f"{name}{o}" for o in ordinals] for name in metadata}
    documents = pa.RecordBatch.from_arrays(
        [
            pa.array([f"id{o}" for o in ordinals]),
            pa.array(ordinals, pa.int64()),
            *(pa.array(values, pa.string()) for values in columns.values()),
        ],
        names=["id", "ordinal", *metadata],
    )
    tokens = make_token_batch(
        documents,
        input_ids=np.arange(n * 2, dtype=np.uint32),
        offsets=np.arange(n + 1, dtype=np.int32) * 2,
        n_tokens=np.full(n, 2, np.int32),
        truncated=np.array(ordinals) % 2 == 0,
        text_sha256=pa.array([bytes([o % 256]) * 32 for o in ordinals], pa.binary(32)),
        metadata=metadata,
    )
    values = np.array(ordinals, np.float32)[:, None] + np.arange(dimension, dtype=np.float32)
    return make_vector_batch(tokens, values)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    dataset = Dataset(tmp_path / "out")
    dataset.prepare(RunSpec(run="r", queue="q", sink=ParquetSink(path=str(dataset.path)), created_at=1.0))
    return dataset


def test_a_staged_file_holds_every_row_and_says_how_it_was_made(dataset: Dataset) -> None:
    batches = [vectors([5, 3, 4]), vectors([9])]
    file = stage(dataset, TOKEN, "r", batches, {"embedq.model_id": "m", "embedq.prompt": "ü\n"}, 8)
    path = dataset.path / file.staging_name
    expected = PublishedFile(
        token=TOKEN, run="r", rows=4, size_bytes=path.stat().st_size, tokens=8, ordinals=(3, 5, 9, 9)
    )
    assert file == expected
    assert [each.name for each in dataset.staging.iterdir()] == [f"{TOKEN}.tmp"]
    table = pq.ParquetFile(path).read()
    assert table.to_pydict() == pa.Table.from_batches([batch.table for batch in batches]).to_pydict()
    assert table.schema.field("vector").type == pa.list_(pa.field("element", pa.float32()), 8)
    metadata = pq.read_metadata(path).metadata
    assert metadata[b"embedq.model_id"] == b"m"
    assert metadata[b"embedq.prompt"].decode() == "ü\n"


def test_vectors_are_written_plain_and_everything_else_compressed(dataset: Dataset) -> None:
    names = ("lang", "a.b", "", "vector.list", "ü", "list")
    file = stage(dataset, TOKEN, "r", [vectors(list(range(2000)), metadata=names)], {}, 4000)
    path = dataset.path / file.staging_name
    assert pq.ParquetFile(path).read().schema.names[-len(names) :] == list(names)
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    by_name = {column.path_in_schema: column for column in columns}
    vector = by_name.pop("vector.list.element")
    sha = by_name.pop("text_sha256")
    for column in (vector, sha):
        assert column.compression == "UNCOMPRESSED"
        assert not any("DICTIONARY" in encoding for encoding in column.encodings)
    assert {name: column.compression for name, column in by_name.items() if column.compression != "ZSTD"} == {}
    assert by_name["ordinal"].statistics.min == 0
    assert by_name["ordinal"].statistics.max == 1999
    assert not vector.is_stats_set


def test_row_groups_are_cut_by_the_bytes_of_their_vectors(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 8 * 4 * 10)
    file = stage(dataset, TOKEN, "r", [vectors(list(range(25)))], {}, 50)
    metadata = pq.read_metadata(dataset.path / file.staging_name)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [10, 10, 5]
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    file = stage(dataset, TOKEN, "r", [vectors(list(range(3)))], {}, 6)
    assert pq.read_metadata(dataset.path / file.staging_name).num_row_groups == 3


@pytest.mark.parametrize("kind", [VectorType.INT8, VectorType.UBINARY])
def test_compact_vectors_are_plain_bytes_in_row_groups_that_other_columns_fit_into(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, kind: VectorType
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 256 * 10)
    batch = vectors(list(range(25)))
    file = stage(dataset, TOKEN, "r", [batch.quantized(kind, ranges_of(batch.vectors))], {}, 50)
    metadata = pq.read_metadata(dataset.path / file.staging_name)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [10, 10, 5]
    column = metadata.row_group(0).column(2)
    assert (column.path_in_schema, column.physical_type) == ("vector", "FIXED_LEN_BYTE_ARRAY")
    assert (column.compression, column.has_dictionary_page) == ("UNCOMPRESSED", False)
    # The values, and a few bytes of the page's header.
    assert column.total_uncompressed_size - 10 * kind.row_bytes(8) < 64


def test_a_full_disk_is_a_storage_error_and_leaves_nothing_staged(dataset: Dataset) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*File too large"):
            stage(dataset, TOKEN, "r", [vectors(list(range(5000)))], {}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(dataset.staging.iterdir()) == []


def test_a_missing_staging_directory_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        stage(Dataset(tmp_path / "gone"), TOKEN, "r", [vectors([1])], {}, 1)


def test_a_file_is_verified_by_reading_its_footer(dataset: Dataset) -> None:
    file = stage(dataset, TOKEN, "r", [vectors([1, 2])], {}, 4)
    path = dataset.path / file.staging_name
    verify(path, 2)
    with pytest.raises(StorageError, match="with 2 rows, 3 were written"):
        verify(path, 3)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole[:-8] + b"\xff" * 8, b"PAR1" * 5):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match="does not read back"):
            verify(path, 2)
    path.unlink()
    with pytest.raises(StorageError):
        verify(path, 2)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_ranges_cover_exactly_the_ordinals_and_are_as_few_as_can_be(ordinals: list[int]) -> None:
    flat = ranges(np.array(ordinals, np.int64))
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    assert {o for first, last in pairs for o in range(first, last + 1)} == set(ordinals)
    assert all(first <= last for first, last in pairs)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(pairs))
    assert all(type(bound) is int for bound in flat)
