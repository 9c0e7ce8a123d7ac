"""Names that become parts of keys and paths, and entries whose envelope lies."""

from __future__ import annotations

import pytest
from embedq_broker.keys import Keys, check_queue_name, check_run_id
from embedq_schemas.errors import UsageError
from embedq_schemas.names import LANES
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "/a", "-a", "_a", "a b", "a,b", "a{b", "a}b", "{a}", "a:b", "a*"),
        *("a\n", "\na", "a\0", "a\r\n", "a\u2028", "é", "١", "a١", "𝐚", "a" * 101),
    ],
)
def test_a_name_that_could_mean_something_else_is_refused(name: str) -> None:
    for check in (check_queue_name, check_run_id, Keys):
        with pytest.raises(UsageError):
            check(name)


@pytest.mark.parametrize("name", ["a", "0", "a.b_c-D", "a" * 100, "a..b"])
def test_a_plain_name_is_itself(name: str) -> None:
    assert check_queue_name(name) == check_run_id(name) == name


@given(st.text(max_size=5))
def test_an_accepted_name_is_ascii_without_separators(name: str) -> None:
    try:
        check_run_id(name)
    except UsageError:
        return
    assert name.isascii()
    assert not set(name) & set("/{},: \n\t\0")
    assert name[0].isalnum()


def test_every_key_of_a_queue_has_its_hash_tag_and_no_two_are_equal() -> None:
    keys = Keys("q")
    found = [keys.commits, keys.bytes, keys.held, keys.events, keys.model, keys.workers, keys.runs, keys.open_datasets]
    found += [make("x") for make in (keys.run, keys.results, keys.dead, keys.token, keys.lock)]
    found += [make(lane) for make in (keys.jobs, keys.batches) for lane in LANES]
    assert len(set(found)) == len(found)
    assert all(key.startswith("embedq:{q}:") and key.count("{") == 1 for key in found)
    assert [keys.suffix(key) for key in (keys.jobs(LANES[0]), keys.results("r"))] == ["jobs:interactive", "results:r"]
    assert keys.of("results:r") == keys.results("r")
