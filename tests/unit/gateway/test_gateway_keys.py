"""API keys: who gets in, as whom, and which files of keys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedq_gateway.auth import ApiKeys, read_keys
from embedq_gateway.errors import ApiError
from embedq_schemas.errors import UsageError

KEYS = ApiKeys(["key-number-one", "key-number-two"])


def test_each_key_is_a_tenant_of_its_own_and_its_name_is_not_the_key() -> None:
    one, two = (KEYS.tenant(f"Bearer key-number-{name}") for name in ("one", "two"))
    assert one != two
    assert KEYS.tenant("bearer  key-number-one ") == one
    assert "key" not in one


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic key-number-one",
        "Bearer key-number-three",
        "Bearer KEY-NUMBER-ONE",
        "Bearer \udcff",
    ],
    ids=["none", "empty", "scheme", "blank", "basic", "other", "case", "bytes"],
)
def test_anything_else_is_refused(header: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        KEYS.tenant(header)
    assert refused.value.status == 401
    assert refused.value.headers["WWW-Authenticate"] == "Bearer"


def test_without_keys_everybody_is_one_tenant() -> None:
    open_to_all = read_keys(None, ())
    assert not open_to_all.required
    assert open_to_all.tenant(None) == open_to_all.tenant("Bearer whatever")


def test_keys_come_from_a_file_and_the_variable_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nkey-number-one\n")
    keys = read_keys(file, ["key-number-two"])
    for name in ("one", "two"):
        assert keys.tenant(f"Bearer key-number-{name}") == KEYS.tenant(f"Bearer key-number-{name}")


@pytest.mark.parametrize("content", [None, "# nothing\n", "short\n", "with spaces in it\n", "schlüssel-mit-umlaut\n"])
def test_a_file_without_good_keys_opens_no_door(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError):
        read_keys(file, ())
