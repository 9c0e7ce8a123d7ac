"""Each type of vector: what it stores at every border, what it stands for, what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from embedq_schemas import ipc
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import CodecError, EngineError
from embedq_schemas.quantize import (
    VectorType,
    bits_of,
    checked_ranges,
    decode_ranges,
    dequantize,
    encode_ranges,
    quantize,
    ranges_of,
)
from embedq_schemas.run import ParquetSink, RunSpec, StreamSink
from embedq_schemas.vector_batch import TYPE_KEY, VectorBatch, vector_field
from pydantic import ValidationError

COMPACT = [kind for kind in VectorType if kind is not VectorType.FLOAT32]
RANGED = [kind for kind in VectorType if kind.ranged]
PACKED = [VectorType.BINARY, VectorType.UBINARY]


def unit_vectors(n: int, dimension: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((n, dimension)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return values


def batch_of(vectors: np.ndarray) -> VectorBatch:
    n, dimension = vectors.shape
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=VectorType.FLOAT32.arrow(dimension))
    return VectorBatch(
        pa.RecordBatch.from_pydict(
            {
                "id": [f"d{row}" for row in range(n)],
                "ordinal": pa.array(range(n), pa.int64()),
                "vector": lists,
                "n_tokens": pa.array([1] * n, pa.int32()),
                "truncated": [False] * n,
                "text_sha256": pa.array([bytes(32)] * n, pa.binary(32)),
                "lang": pa.array([None] * n, pa.string()),
            }
        )
    )


@pytest.mark.parametrize("kind", [*RANGED, *PACKED])
@pytest.mark.parametrize("seed", range(3))
def test_stored_vectors_are_those_of_sentence_transformers(kind: VectorType, seed: int) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings

    # Calibrated on a part, so that values lie below, inside and above the ranges.
    vectors = unit_vectors(400, 48, seed)
    vectors[:, 5] = 0.25
    vectors[::7, 9] = 0.0
    ranges = ranges_of(vectors[:30])
    expected = quantize_embeddings(vectors, kind.value, ranges=ranges)
    found = quantize(vectors, kind, ranges if kind.ranged else None)
    assert found.dtype == expected.dtype == kind.dtype
    assert found.shape == (400, kind.width(48))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(ranges, np.array([vectors[:30].min(0), vectors[:30].max(0)]))


def test_float16_is_the_nearest_one() -> None:
    vectors = unit_vectors(50, 8)
    found = dequantize(quantize(vectors, VectorType.FLOAT16), VectorType.FLOAT16)
    assert found.dtype == np.float32
    assert np.abs(found - vectors).max() <= 2**-12
    with pytest.raises(EngineError, match="65504"):
        quantize(np.array([[1.0, -70000.0]], np.float32), VectorType.FLOAT16)


def test_a_value_at_a_border_belongs_to_the_bucket_above_it_and_values_outside_to_the_outermost() -> None:
    ranges = np.array([[0.0], [255.0]], np.float32)
    below = np.nextafter(np.float32(1), np.float32(0))
    values = np.array([-1e30, -0.5, 0.0, below, 1.0, 1.5, 254.0, 254.99, 255.0, 300.0, 1e30], np.float32)[:, None]
    buckets = [0, 0, 0, 0, 1, 1, 254, 254, 255, 255, 255]
    assert quantize(values, VectorType.UINT8, ranges)[:, 0].tolist() == buckets
    assert quantize(values, VectorType.INT8, ranges)[:, 0].tolist() == [bucket - 128 for bucket in buckets]


@pytest.mark.parametrize("kind", RANGED)
def test_a_value_reads_back_to_within_half_a_bucket(kind: VectorType) -> None:
    vectors = unit_vectors(500, 24)
    ranges = ranges_of(vectors)
    found = dequantize(quantize(vectors, kind, ranges), kind, ranges)
    half = (ranges[1] - ranges[0]) / 255 / 2
    assert found.dtype == np.float32
    assert (np.abs(found - vectors) <= half * 1.001).all()


@pytest.mark.parametrize("kind", RANGED)
def test_a_dimension_that_is_constant_reads_back_to_its_value(kind: VectorType) -> None:
    vectors = unit_vectors(20, 4)
    vectors[:, 1], vectors[:, 2] = 0.0, -0.75
    ranges = ranges_of(vectors)
    stored = quantize(vectors, kind, ranges)
    lowest = -128 if kind is VectorType.INT8 else 0
    assert (stored[:, 1:3] == lowest).all()
    np.testing.assert_array_equal(dequantize(stored, kind, ranges)[:, 1:3], vectors[:, 1:3])
    # One vector alone: every dimension is constant, and it comes back as it was.
    alone = ranges_of(vectors[:1])
    np.testing.assert_array_equal(dequantize(quantize(vectors[:1], kind, alone), kind, alone), vectors[:1])


def test_only_what_is_above_zero_is_a_one_and_the_first_component_is_the_highest_bit() -> None:
    tiny = np.float32(1e-45)
    vectors = np.array([[1, -1, 0, tiny, -tiny, -0.0, 0.5, -2], [1] * 8, [-1] * 8], np.float32)
    assert quantize(vectors, VectorType.UBINARY).tolist() == [[0b10010010], [255], [0]]
    binary = quantize(vectors, VectorType.BINARY)
    assert binary.tolist() == [[0b10010010 - 128], [127], [-128]]
    np.testing.assert_array_equal(bits_of(binary, VectorType.BINARY), quantize(vectors, VectorType.UBINARY))


@pytest.mark.parametrize("kind", PACKED)
def test_signs_read_back_as_a_unit_vector(kind: VectorType) -> None:
    vectors = unit_vectors(30, 64)
    found = dequantize(quantize(vectors, kind), kind)
    np.testing.assert_array_equal(found > 0, vectors > 0)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("kind", VectorType)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_never_quantised(kind: VectorType, bad: float) -> None:
    vectors = unit_vectors(3, 8)
    ranges = ranges_of(vectors)
    vectors[1, 6] = bad
    with pytest.raises(EngineError, match="NaN or infinity"):
        quantize(vectors, kind, ranges)


@pytest.mark.parametrize("kind", PACKED)
def test_dimensions_that_do_not_fill_bytes_are_refused_for_binary(kind: VectorType) -> None:
    with pytest.raises(ValidationError, match="12 dimensions are no multiple of 8"):
        EncodingOptions(vector_type=kind, dimensions=12)
    assert (
        kind.fault(1023, None) == f"{kind} vectors pack 8 components into a byte: 1023 dimensions are no multiple of 8"
    )
    assert kind.fault(1024, None) is None


def test_ranges_read_back_the_same_and_unfit_ones_are_refused() -> None:
    ranges = ranges_of(unit_vectors(5, 7))
    np.testing.assert_array_equal(decode_ranges(encode_ranges(ranges)), ranges)
    for text in ("", "!", "AAAA", encode_ranges(ranges[::-1]), encode_ranges(np.full((2, 3), np.nan, np.float32))):
        with pytest.raises(ValueError, match="ranges"):
            decode_ranges(text)
    huge = np.float32(3e38)
    unfit = (ranges.astype(np.float64), ranges[:1], ranges[0], ranges[:, :0], np.array([[-huge], [huge]], np.float32))
    for array in unfit:
        with pytest.raises(ValueError, match="ranges"):
            checked_ranges(array)


def test_ranges_belong_to_the_types_that_use_them() -> None:
    ranges = encode_ranges(ranges_of(unit_vectors(5, 16)))
    found = EncodingOptions(vector_type=VectorType.INT8, vector_ranges=ranges, dimensions=16)
    assert found.ranges is not None
    assert found == EncodingOptions.model_validate_json(found.model_dump_json())
    assert len({found, EncodingOptions(**found.model_dump())}) == 1
    with pytest.raises(ValidationError, match="binary vectors have no ranges"):
        EncodingOptions(vector_type=VectorType.BINARY, vector_ranges=ranges)
    with pytest.raises(ValidationError, match=r"the ranges are \[2, 16\], those of 8 dimensions are \[2, 8\]"):
        EncodingOptions(vector_type=VectorType.INT8, vector_ranges=ranges, dimensions=8)
    with pytest.raises(ValidationError, match="base64"):
        EncodingOptions(vector_type=VectorType.INT8, vector_ranges="?")


@pytest.mark.parametrize("kind", VectorType)
def test_results_kept_in_redis_need_ranges_beforehand_where_the_type_has_them(kind: VectorType) -> None:
    def spec(encoding: EncodingOptions, sink: ParquetSink | StreamSink) -> RunSpec:
        return RunSpec(run="r", queue="q", encoding=encoding, sink=sink, created_at=1.0)

    bare = EncodingOptions(vector_type=kind)
    assert spec(bare, ParquetSink(path="/out")).encoding.vector_type is kind
    if kind.ranged:
        with pytest.raises(ValidationError, match="need vector_ranges"):
            spec(bare, StreamSink())
        bare = EncodingOptions(vector_type=kind, vector_ranges=encode_ranges(ranges_of(unit_vectors(5, 16))))
    assert RunSpec.decode(spec(bare, StreamSink()).encode()).encoding == bare


@pytest.mark.parametrize("kind", VectorType)
def test_a_batch_of_any_type_reads_back_the_same_and_so_does_any_slice(kind: VectorType) -> None:
    vectors = unit_vectors(9, 16)
    ranges = ranges_of(vectors)
    batch = batch_of(vectors).quantized(kind, ranges)
    expected = quantize(vectors, kind, ranges)
    decoded = VectorBatch.decode(batch.encode())
    assert (decoded.vector_type, decoded.dimension) == (kind, 16)
    assert decoded.vectors.dtype == kind.dtype
    np.testing.assert_array_equal(decoded.vectors, expected)
    assert decoded.table.schema.names == batch_of(vectors).table.schema.names
    np.testing.assert_array_equal(VectorBatch(decoded.table.slice(2, 5)).vectors, expected[2:7])
    np.testing.assert_array_equal(VectorBatch.decode(VectorBatch(batch.table.slice(4)).encode()).vectors, expected[4:])
    assert VectorBatch(batch.table.slice(3, 0)).vectors.shape == (0, kind.width(16))
    assert batch.quantized(kind, ranges) is batch
    assert VectorBatch(decoded.table.take(pa.array([8, 0]))).vectors.tolist() == expected[[8, 0]].tolist()


def test_compact_batches_are_as_small_on_the_wire_as_their_types_promise() -> None:
    vectors = unit_vectors(64, 1024)
    ranges = ranges_of(vectors)
    for kind in VectorType:
        payload = batch_of(vectors).quantized(kind, ranges).encode()
        assert len(payload) - 64 * kind.row_bytes(1024) < 8192


def with_vectors(column: pa.Array, metadata: dict[bytes, bytes] | None = None) -> bytes:
    table = batch_of(unit_vectors(2, 8)).table
    field = pa.field("vector", column.type, metadata=metadata)
    index = table.schema.get_field_index("vector")
    return bytes(ipc.encode(table.set_column(index, field, column), "vector_batch"))


def test_a_binary_column_without_a_known_type_is_refused() -> None:
    rows = pa.array([b"\0" * 16, b"\xff" * 16], pa.binary(16))
    for kind in VectorType:
        payload = with_vectors(rows, {TYPE_KEY: kind.encode()})
        if kind.floating:
            with pytest.raises(CodecError, match="no type of vector"):
                VectorBatch.decode(payload)
        else:
            assert VectorBatch.decode(payload).vectors.shape == (2, 16)
    for metadata in (None, {TYPE_KEY: b""}, {TYPE_KEY: b"int4"}, {TYPE_KEY: b"\xff\xfe"}, {b"other": b"int8"}):
        with pytest.raises(CodecError, match="no type of vector"):
            VectorBatch.decode(with_vectors(rows, metadata))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"a", None], pa.binary(1)),
        pa.array([b"", b""], pa.binary(0)),
        pa.array([b"ab", b"c"], pa.binary()),
        pa.array([bytes(65537)] * 2, pa.binary(65537)),
        pa.array([[np.float16(1), None], [np.float16(1)] * 2], pa.list_(pa.field("item", pa.float16()), 2)),
        pa.array([[1], [2]], pa.list_(pa.field("item", pa.int8()), 1)),
    ],
    ids=["null", "zero wide", "variable", "too wide", "null component", "list of int8"],
)
def test_a_column_that_is_no_compact_vector_is_refused(column: pa.Array) -> None:
    with pytest.raises(CodecError, match="vector"):
        VectorBatch.decode(with_vectors(column, {TYPE_KEY: b"int8"}))


@pytest.mark.parametrize("kind", COMPACT)
def test_a_damaged_payload_decodes_to_whole_vectors_or_not_at_all(kind: VectorType) -> None:
    vectors = unit_vectors(3, 8)
    payload = bytes(batch_of(vectors).quantized(kind, ranges_of(vectors)).encode())
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(payload)
        for at in rng.integers(0, len(payload), rng.integers(1, 4)):
            damaged[at] ^= rng.integers(1, 256)
        try:
            found = VectorBatch.decode(bytes(damaged))
        except CodecError:
            refused += 1
            continue
        assert found.vectors.shape == (found.num_documents, found.vector_type.width(found.dimension))
        found.vectors.sum()
    assert refused > 100


def test_the_type_of_a_column_survives_parquet(tmp_path: Path) -> None:
    vectors = unit_vectors(5, 8)
    for kind in VectorType:
        batch = batch_of(vectors).quantized(kind, ranges_of(vectors))
        path = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.Table.from_batches([batch.table]).replace_schema_metadata({"a": "b"}), path)
        (found,) = pq.ParquetFile(path).iter_batches(columns=["vector"])
        assert VectorBatch(found).vector_type is kind
        np.testing.assert_array_equal(VectorBatch(found).vectors, batch.vectors)
    assert vector_field(8, VectorType.FLOAT32).metadata is None
