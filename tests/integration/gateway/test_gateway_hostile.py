"""Requests that are wrong, large or malicious: each is refused with the status and the code that say why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import Gateway, Stack, error_of

KEYS = ("first-tenant-key", "second-tenant-key")

BAD_BODIES: dict[str, tuple[Any, int, str, str | None]] = {
    "empty list": ({"input": []}, 400, "empty_input", "input"),
    "empty string": ({"input": ""}, 400, "empty_input", "input"),
    "one empty string": ({"input": ["a", ""]}, 400, "empty_input", "input[1]"),
    "empty list of ids": ({"input": [[1], []]}, 400, "empty_input", "input[1]"),
    "no input": ({}, 400, "missing_field", "input"),
    "null": ({"input": None}, 400, "invalid_value", "input"),
    "object": ({"input": {"text": "a"}}, 400, "invalid_value", "input"),
    "number": ({"input": 7}, 400, "invalid_value", "input"),
    "mixed list": ({"input": ["a", 7]}, 400, "invalid_value", "input[1]"),
    "lists of lists of lists": ({"input": [[[1]]]}, 400, "invalid_value", "input[0][0]"),
    "list of 100,000": ({"input": ["a"] * 100_000}, 413, "too_many_inputs", "input"),
    "too many ids": ({"input": [[1] * 600_000] * 2}, 413, "too_many_tokens", "input"),
    "fraction as id": ({"input": [1.5]}, 400, "invalid_value", "input[0]"),
    "negative id": ({"input": [5, -1]}, 400, "invalid_value", "input[1]"),
    "id above 32 bits": ({"input": [[5, 1 << 40]]}, 400, "invalid_value", "input[0][1]"),
    "negative dimensions": ({"input": "a", "dimensions": -8}, 400, "invalid_dimensions", "dimensions"),
    "no dimensions": ({"input": "a", "dimensions": 0}, 400, "invalid_dimensions", "dimensions"),
    "dimensions above the model's": ({"input": "a", "dimensions": 33}, 400, "invalid_dimensions", "dimensions"),
    "dimensions as text": ({"input": "a", "dimensions": "8"}, 400, "invalid_value", "dimensions"),
    "unknown encoding": ({"input": "a", "encoding_format": "hex"}, 400, "invalid_value", "encoding_format"),
    "unknown field": ({"input": "a", "temperature": 1}, 400, "unknown_field", "temperature"),
    "unknown prompt": ({"input": "a", "prompt_name": "poem"}, 400, "unknown_prompt", "prompt_name"),
    "unknown input type": ({"input": "a", "input_type": "poem"}, 400, "invalid_value", "input_type"),
    "prompt twice": (
        {"input": "a", "input_type": "query", "prompt_name": "query"},
        400,
        "invalid_prompt",
        "prompt_name",
    ),
    "prompt for ids": ({"input": [1, 2], "input_type": "query"}, 400, "invalid_prompt", "input_type"),
    "another model": ({"input": "a", "model": "gpt-9"}, 404, "model_not_found", "model"),
    "text too long": ({"input": ["a", "long " * 200]}, 400, "too_long", "input[1]"),
}
RAW_BODIES = {
    "not JSON": b'{"input": "a", ',
    "empty": b"",
    "NaN dimensions": b'{"input": "a", "model": "tiny-embedding", "dimensions": NaN}',
    "NaN as id": b'{"input": [NaN], "model": "tiny-embedding"}',
    "bad UTF-8": b'{"input": "\xff\xfe", "model": "tiny-embedding"}',
    "half a character": b'{"input": "\\ud800", "model": "tiny-embedding"}',
    "100,000 brackets": b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model": "tiny-embedding"}',
    "a list": b"[]",
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_wrong_request_is_refused_and_named(stack: Stack, name: str) -> None:
    fields, status, code, param = BAD_BODIES[name]
    error = stack.refused(status, json={"model": stack.model.name, **fields})
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"].endswith(".")


@pytest.mark.parametrize("name", RAW_BODIES)
def test_bytes_that_are_no_request_are_refused(stack: Stack, name: str) -> None:
    stack.refused(400, content=RAW_BODIES[name], headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
def test_a_body_of_40_mb_is_refused_while_it_is_read(stack: Stack, chunked: bool) -> None:
    piece = b" " * (1 << 20)

    def pieces() -> Iterator[bytes]:
        yield from (piece for _ in range(40))

    content = pieces() if chunked else piece * 40
    error = stack.refused(413, content=content, headers={"Content-Type": "application/json"})
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Content-Encoding": "gzip"}],
    ids=["text", "gzip"],
)
def test_a_body_of_another_kind_is_refused(stack: Stack, headers: dict[str, str]) -> None:
    stack.refused(415, content=b'{"input": "a"}', headers=headers)


def test_the_tei_route_refuses_what_it_cannot_do(stack: Stack) -> None:
    for body, param in (
        ({"inputs": []}, "inputs"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ({"inputs": "a", "raw_scores": True}, "raw_scores"),
        ({"inputs": ["a", "long " * 200]}, "inputs[1]"),
    ):
        assert stack.refused(400, "/embed", json=body)["param"] == param


UPLOADS: dict[str, tuple[dict[str, Any], int, str]] = {
    "no file": ({"data": {"purpose": "batch"}, "files": {"other": ("a", b"x")}}, 400, "unknown_field"),
    "no form": ({"json": {"purpose": "batch"}}, 415, "unsupported_media_type"),
    "another purpose": ({"data": {"purpose": "vision"}, "files": {"file": ("a", b"x")}}, 400, "invalid_purpose"),
    "bad expiry": (
        {"data": {"purpose": "batch", "expires_after[seconds]": "NaN"}, "files": {"file": ("a", b"x")}},
        400,
        "invalid_value",
    ),
    "cut off": (
        {
            "content": b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf',
            "headers": {"Content-Type": "multipart/form-data; boundary=x"},
        },
        400,
        "invalid_form",
    ),
    "no boundary": ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "invalid_form"),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_a_wrong_upload_is_refused_and_leaves_nothing(stack: Stack, name: str) -> None:
    arguments, status, code = UPLOADS[name]
    before = stack.get("/v1/files").json()["data"]
    assert stack.refused(status, "/v1/files", **arguments)["code"] in (code, "missing_field")
    assert stack.get("/v1/files").json()["data"] == before
    assert list((stack.data / "tmp").iterdir()) == []


def test_a_file_above_the_limit_is_refused_and_leaves_nothing(stack: Stack, tmp_path: Path) -> None:
    with stack.another("--max-file-bytes", 100_000, data=tmp_path) as gateway:
        for size in (100_001, 8 << 20):
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * size)}}
            assert gateway.refused(413, "/v1/files", **form)["code"] == "request_too_large"
    assert list((tmp_path / "tmp").iterdir()) == list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/b\\c.jsonl", "\u202egnp.exe", "x" * 300], ids=["parents", "slashes", "bidi", "long"]
)
def test_a_files_name_is_only_a_name(stack: Stack, name: str) -> None:
    answer = stack.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, b"{}")})
    assert answer.status_code == 200
    assert "/" not in answer.json()["filename"]
    assert stack.get(f"/v1/files/{answer.json()['id']}/content").content == b"{}"


@pytest.mark.parametrize(
    "file_id", ["file-none", "..%2F..%2Fstore-id", "%00", "x" * 4000], ids=["none", "up", "nul", "long"]
)
def test_an_id_that_names_nothing_is_a_404(stack: Stack, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        error_of(stack.get(path), 404)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/chat/completions"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"metadata": {"k": 7}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"priority": 1}, "priority"),
    ],
    ids=["file", "endpoint", "window", "long window", "long metadata", "number", "expiry", "unknown"],
)
def test_a_wrong_batch_is_refused_and_named(stack: Stack, fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-none", "endpoint": "/v1/embeddings", "completion_window": "24h", **fields}
    assert stack.refused(400, "/v1/batches", json=body)["param"] == param


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=-1", "order=up", "after=" + "x" * 300])
def test_a_wrong_page_is_refused(stack: Stack, query: str) -> None:
    error_of(stack.get(f"/v1/files?{query}"), 400)


def test_another_keys_files_and_batches_do_not_exist(stack: Stack, tmp_path: Path) -> None:
    with stack.another(data=tmp_path, EMBEDQ_API_KEYS=",".join(KEYS)) as gateway:
        check_tenants(gateway)


def check_tenants(stack: Gateway) -> None:
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    for headers, code in ((None, "missing_api_key"), ({"Authorization": "Bearer wrong-key"}, "invalid_api_key")):
        error = error_of(stack.get("/v1/files", headers=headers), 401)
        assert (error["code"], error["type"]) == (code, "authentication_error")
    assert stack.get("/health").status_code == stack.get("/ready").status_code == 200
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}
    content = json.dumps({**line, "body": {"model": stack.model.name, "input": "a"}})
    form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", content)}}
    file_id = stack.post("/v1/files", headers=mine, **form).json()["id"]
    request = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch_id = stack.post("/v1/batches", headers=mine, json=request).json()["id"]
    assert stack.get("/v1/files", headers=theirs).json()["data"] == []
    assert stack.get("/v1/batches", headers=theirs).json()["data"] == []
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
        assert stack.get(path, headers=mine).status_code == 200
        error_of(stack.get(path, headers=theirs), 404)
    error_of(stack.post(f"/v1/batches/{batch_id}/cancel", headers=theirs), 404)
    assert stack.refused(400, "/v1/batches", json=request, headers=theirs)["param"] == "input_file_id"
    assert stack.get(f"/v1/files/{file_id}", headers=mine).status_code == 200
