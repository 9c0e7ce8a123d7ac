"""Jobs of token ids: read back exactly, and refused as a whole where they are not what they say."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from embedq_schemas import ipc
from embedq_schemas.errors import CodecError
from embedq_schemas.job import INPUT_IDS_TYPE, KIND, Codec, decode_job, encode_job, holds_ids
from hypothesis import given, settings
from hypothesis import strategies as st

TOKEN_IDS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=20), min_size=1, max_size=20)


def job(lists: Any, kind: pa.DataType = INPUT_IDS_TYPE, **more: Any) -> pa.RecordBatch:
    n = len(lists)
    columns = {"id": [str(i) for i in range(n)], "ordinal": list(range(n)), "input_ids": pa.array(lists, kind)}
    return pa.RecordBatch.from_pydict(columns | more)


def json_job(*documents: dict[str, Any]) -> bytes:
    return json.dumps({"v": 1, "documents": [{"id": str(i)} | each for i, each in enumerate(documents)]}).encode()


@settings(max_examples=60, deadline=None)
@given(TOKEN_IDS, st.data())
def test_token_ids_read_back_the_same_from_either_codec_and_from_a_slice(lists: Any, data: st.DataObject) -> None:
    table = job(lists, lang=["x"] * len(lists))
    decoded = decode_job(encode_job(table), Codec.ARROW)
    assert decoded.to_pydict() == table.to_pydict()
    assert holds_ids(decoded)
    start = data.draw(st.integers(0, len(lists) - 1))
    part = decode_job(encode_job(table.slice(start)), Codec.ARROW)
    assert part.to_pydict() == table.slice(start).to_pydict()
    documents = [{"input_ids": ids, "metadata": {"lang": "x"}} for ids in lists]
    assert decode_job(json_job(*documents), Codec.JSON).to_pydict() == table.to_pydict()


def test_a_job_of_texts_holds_no_ids() -> None:
    assert not holds_ids(decode_job(json_job({"text": "a"}), Codec.JSON))


@pytest.mark.parametrize(
    "documents",
    [
        [{}],
        [{"text": "a", "input_ids": [1]}],
        [{"text": None, "input_ids": None}],
        [{"text": "a"}, {"input_ids": [1]}],
        [{"input_ids": [-1]}],
        [{"input_ids": [2**32]}],
        [{"input_ids": [1.5]}],
        [{"input_ids": ["1"]}],
        [{"input_ids": [True]}],
        [{"input_ids": [None]}],
        [{"input_ids": 1}],
        [{"input_ids": [1], "metadata": {"input_ids": "x"}}],
    ],
    ids=["neither", "both", "nulls", "mixed", "negative", "wide", "fraction", "string", "bool", "null", "bare", "name"],
)
def test_a_json_job_that_is_not_clear_is_refused(documents: list[dict[str, Any]]) -> None:
    with pytest.raises(CodecError):
        decode_job(json_job(*documents), Codec.JSON)


@pytest.mark.parametrize(
    "table",
    [
        job([[1], None]),
        job([[1], [None]]),
        job([[1], [2]], pa.list_(pa.field("item", pa.int32()))),
        job([[1], [2]], pa.large_list(pa.field("item", pa.uint32()))),
        job([[1], [2]], text=["a", "b"]),
    ],
    ids=["null list", "null id", "signed", "large list", "a text besides"],
)
def test_an_arrow_job_of_other_columns_is_refused(table: pa.RecordBatch) -> None:
    with pytest.raises(CodecError):
        decode_job(ipc.encode(table, KIND), Codec.ARROW)
