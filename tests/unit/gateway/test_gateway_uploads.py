"""Multipart forms are parsed the same however their bytes are cut, and broken ones are refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from embedq_gateway.errors import ApiError
from embedq_gateway.files import FileStore
from embedq_gateway.uploads import UploadForm, expiry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONTENT = b'{"a": 1}\r\n--bound\r\n-\r\n\x00\xff' * 20


def form(*parts: tuple[bytes, bytes]) -> bytes:
    pieces = [
        b"--boundary\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + body + b"\r\n" for head, body in parts
    ]
    return b"".join(pieces) + b"--boundary--\r\n"


WHOLE = form(
    (b'name="purpose"', b"batch"),
    (b'name="file"; filename="in.jsonl"\r\nContent-Type: application/jsonl', CONTENT),
    (b'name="expires_after[anchor]"', b"created_at"),
)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_form_is_the_same_however_it_arrives(tmp_path: Path, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(WHOLE)]
    with FileStore(tmp_path).writing() as draft:
        parsed = UploadForm(b"boundary", draft)
        for start, stop in itertools.pairwise(bounds):
            parsed.write(WHOLE[start:stop])
        draft.file.flush()
        assert draft.path.read_bytes() == CONTENT
        assert draft.size == len(CONTENT)
    assert parsed.complete
    assert parsed.filename == "in.jsonl"
    assert parsed.fields == {"purpose": "batch", "expires_after[anchor]": "created_at"}


@pytest.mark.parametrize(
    "body",
    [
        form((b'filename="a"', b"x")),
        form((b'name="file"; filename="a"', b"x"), (b'name="file"; filename="b"', b"y")),
        form((b'name="purpose"', b"batch"), (b'name="purpose"', b"batch")),
        form((b'name="purpose"', b"x" * 5000)),
        b"--other\r\n",
        form((b'name="a"\r\n' + b"X: y\r\n" * 100, b"x")),
        form(*((b'name="%d"' % number, b"x") for number in range(100))),
    ],
    ids=["no name", "two files", "twice", "long field", "other boundary", "many headers", "many fields"],
)
def test_a_broken_form_is_refused(tmp_path: Path, body: bytes) -> None:
    with FileStore(tmp_path).writing() as draft, pytest.raises(ApiError) as refused:
        UploadForm(b"boundary", draft).write(body)
    assert refused.value.status == 400


def test_an_expiry_is_an_anchor_and_seconds_within_bounds() -> None:
    names = ("expires_after[anchor]", "expires_after[seconds]")
    assert expiry({}) is None
    assert expiry(dict(zip(names, ("created_at", "3600"), strict=True))) == 3600
    for values in (("created_at", "3599"), ("created_at", "x"), ("now", "3600"), ("created_at", "٣٦٠٠")):
        with pytest.raises(ApiError):
            expiry(dict(zip(names, values, strict=True)))
    for name in names:
        with pytest.raises(ApiError):
            expiry({name: "3600"})
