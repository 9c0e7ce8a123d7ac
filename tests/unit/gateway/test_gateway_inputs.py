"""A request's JSON becomes inputs and options, and every limit is the exact one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from embedq_gateway.errors import ApiError
from embedq_gateway.inputs import (
    EmbeddingsRequest,
    Limits,
    check_model,
    embeddings_request,
    encoding_options,
    parse_inputs,
    tei_request,
)
from embedq_gateway.watch import ServedModel
from embedq_schemas.encoding import OnLong, TruncationSide
from hypothesis import given
from hypothesis import strategies as st

LIMITS = Limits(max_inputs=3, max_request_tokens=5, on_long=OnLong.ERROR)
MODEL = ServedModel(
    id="org/model",
    fingerprint="f",
    revision="",
    dimension=32,
    max_length=64,
    prompts={"query": "Q: ", "passage": "P: "},
)
BARE = ServedModel(id="bare", fingerprint="f", revision="", dimension=32, max_length=64, prompts={})


def request(**fields: Any) -> EmbeddingsRequest:
    return embeddings_request(json.dumps({"input": "a", "model": "m", **fields}).encode())


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("value", "texts", "token_ids"),
    [
        ("a", ["a"], None),
        (["a", "b"], ["a", "b"], None),
        ([1, 2], None, [[1, 2]]),
        ([[1], [2, 3]], None, [[1], [2, 3]]),
        ([0], None, [[0]]),
    ],
    ids=["text", "texts", "ids", "lists of ids", "zero"],
)
@pytest.mark.parametrize("space", ["", " \n\t"], ids=["dense", "spaced"])
def test_the_four_forms_of_input(value: Any, texts: Any, token_ids: Any, space: str) -> None:
    text = json.dumps(value).replace("[", f"{space}[{space}").replace("]", f"{space}]")
    inputs = parse_inputs(msgspec.Raw((space + text).encode()), LIMITS)
    assert (inputs.texts, inputs.token_ids) == (texts, token_ids)
    assert len(inputs) == len(texts or token_ids)


def test_many_spaces_do_not_hide_what_the_input_is() -> None:
    assert parse_inputs(msgspec.Raw(b" " * 1000 + b'"a"'), LIMITS).texts == ["a"]
    assert parse_inputs(msgspec.Raw(b"[" + b" " * 1000 + b"[7]]"), LIMITS).token_ids == [[7]]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_any_other_input_is_refused_with_400_or_413(value: Any) -> None:
    refusal, found = None, None
    try:
        found = parse_inputs(raw(value), LIMITS)
    except ApiError as error:
        refusal = error
    if found is not None:
        documents = found.documents
        assert value in (documents, documents[0])
    else:
        assert refusal is not None
        assert refusal.status in (400, 413)
        assert (refusal.param or "input").startswith("input")


def test_the_limits_hold_exactly() -> None:
    assert len(parse_inputs(raw(["a"] * 3), LIMITS)) == 3
    assert len(parse_inputs(raw([[1, 2], [3, 4, 5]]), LIMITS)) == 2
    for value, code in ((["a"] * 4, "too_many_inputs"), ([[1, 2], [3, 4, 5, 6]], "too_many_tokens")):
        with pytest.raises(ApiError) as refused:
            parse_inputs(raw(value), LIMITS)
        assert (refused.value.status, refused.value.code) == (413, code)


@pytest.mark.parametrize("dimensions", [1, 32, None])
def test_dimensions_up_to_the_models(dimensions: int | None) -> None:
    assert encoding_options(request(dimensions=dimensions), MODEL, LIMITS).dimensions == dimensions


@pytest.mark.parametrize("dimensions", [0, -1, 33, 1 << 62])
def test_other_dimensions_are_refused(dimensions: int) -> None:
    with pytest.raises(ApiError) as refused:
        encoding_options(request(dimensions=dimensions), MODEL, LIMITS)
    assert refused.value.param == "dimensions"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, ""),
        ({"prompt_name": "query"}, "Q: "),
        ({"input_type": "query"}, "Q: "),
        ({"input_type": "search_query"}, "Q: "),
        ({"input_type": "document"}, "P: "),
        ({"input_type": "passage"}, "P: "),
    ],
    ids=["none", "by name", "query", "search query", "document", "passage"],
)
def test_prompts_come_from_the_checkpoint(fields: dict[str, str], prompt: str) -> None:
    assert encoding_options(request(**fields), MODEL, LIMITS).prompt == prompt


def test_a_model_without_prompts_needs_none() -> None:
    assert encoding_options(request(input_type="query"), BARE, LIMITS).prompt == ""
    with pytest.raises(ApiError):
        encoding_options(request(prompt_name="query"), BARE, LIMITS)


def test_a_model_with_prompts_but_none_for_queries_refuses_queries() -> None:
    model = replace(MODEL, prompts={"s2s": "S: "})
    with pytest.raises(ApiError) as refused:
        encoding_options(request(input_type="query"), model, LIMITS)
    assert refused.value.param == "input_type"
    assert encoding_options(request(input_type="document"), model, LIMITS).prompt == ""


@pytest.mark.parametrize(
    ("truncate", "on_long"), [(None, OnLong.ERROR), (True, OnLong.TRUNCATE), (False, OnLong.ERROR)], ids=str
)
def test_what_happens_to_long_texts_is_the_requests_choice(truncate: bool | None, on_long: OnLong) -> None:
    assert encoding_options(request(truncate=truncate), MODEL, LIMITS).on_long is on_long


def test_tei_requests_are_normalised_and_not_cut_unless_they_say_so() -> None:
    plain = encoding_options(tei_request(b'{"inputs": "a"}'), MODEL, LIMITS)
    assert (plain.normalize, plain.on_long, plain.truncation_side) == (True, OnLong.ERROR, TruncationSide.RIGHT)
    other = tei_request(b'{"inputs": "a", "normalize": false, "truncate": true, "truncation_direction": "Left"}')
    options = encoding_options(other, MODEL, LIMITS)
    assert (options.normalize, options.on_long, options.truncation_side) == (
        False,
        OnLong.TRUNCATE,
        TruncationSide.LEFT,
    )


def test_only_the_served_model_and_its_aliases_exist() -> None:
    for name in ("org/model", "alias", None):
        check_model(name, MODEL, ("alias",))
    for name in ("model", "", "ALIAS"):
        with pytest.raises(ApiError) as refused:
            check_model(name, MODEL, ("alias",))
        assert refused.value.status == 404


@pytest.mark.parametrize("body", [b'{"\xff": 1}', b'{"model": "\xff", "input": "a"}'], ids=["name", "text"])
def test_bytes_that_are_no_utf8_are_called_that(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        embeddings_request(body)
    assert refused.value.code == "invalid_utf8"
