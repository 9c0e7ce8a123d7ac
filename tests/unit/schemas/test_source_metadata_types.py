"""The types that metadata columns may have travel by name, and no other type passes for one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from embedq_schemas.errors import CodecError
from embedq_schemas.job import decode_job, encode_job
from embedq_schemas.metadata_type import is_metadata_type, parse_metadata_type
from embedq_schemas.run import RunSpec, StreamSink
from hypothesis import given, settings
from hypothesis import strategies as st

PLAIN = st.sampled_from(
    [pa.string(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.date32()]
)
TYPES = st.recursive(
    PLAIN
    | st.builds(pa.timestamp, st.sampled_from(["s", "ms", "us", "ns"]), st.sampled_from([None, "UTC", "+01:00"]))
    | st.integers(1, 38).flatmap(lambda digits: st.builds(pa.decimal128, st.just(digits), st.integers(0, digits))),
    lambda inner: st.builds(lambda kind: pa.list_(pa.field("item", kind)), inner),
    max_leaves=4,
)


@settings(deadline=None)
@given(TYPES)
def test_a_type_is_found_again_by_its_name_and_passes_the_wire(kind: pa.DataType) -> None:
    assert parse_metadata_type(str(kind)) == kind
    assert is_metadata_type(kind)
    job = pa.record_batch({"id": ["a"], "ordinal": [0], "text": ["x"], "m": pa.nulls(1, kind)})
    assert decode_job(encode_job(job), "arrow").schema.field("m").type == kind


@pytest.mark.parametrize(
    "name",
    ["", "text", "binary", "struct<a: int64>", "map<string, int64>", "decimal128(39, 2)", "decimal128(2, 3)", "list<>",
     "timestamp[us, tz='; DROP']", "list<item: " * 9 + "int8" + ">" * 9, "int64 " * 100],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no type a metadata column can have"):
        parse_metadata_type(name)


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_string(), pa.struct([("a", pa.int8())]), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_a_job_with_a_column_of_another_type_is_refused(kind: pa.DataType) -> None:
    job = pa.record_batch({"id": ["a"], "ordinal": [0], "text": ["x"], "m": pa.nulls(1, kind)})
    with pytest.raises(CodecError, match="m"):
        decode_job(encode_job(job), "arrow")


def test_a_run_names_a_type_for_each_of_its_columns_or_for_none() -> None:
    def spec(**fields: object) -> RunSpec:
        return RunSpec.model_validate({"run": "r", "queue": "q", "sink": StreamSink(), "created_at": 1.0} | fields)

    assert spec(metadata=("a",)).metadata_fields == {"a": pa.string()}
    typed = spec(metadata=("a", "b"), metadata_types=("float64", "list<int8>"))
    assert typed.metadata_types == ("double", "list<item: int8>")
    assert list(typed.metadata_fields.values()) == [pa.float64(), pa.list_(pa.field("item", pa.int8()))]
    assert RunSpec.decode(typed.encode()) == typed
    for types in (("int64",), ("int64", "no such type"), ("int64",) * 3):
        with pytest.raises(ValueError, match="metadata"):
            spec(metadata=("a", "b"), metadata_types=types)
