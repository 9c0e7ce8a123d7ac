"""A position survives the way through JSON, and nothing else passes for one."""

from __future__ import annotations

import pytest
from embedq_producer.position import START, Position
from embedq_schemas.errors import CodecError


def test_a_position_survives_json() -> None:
    for position in (START, Position(2**20, 2**60, 2**55, 2**54), Position(0, 9, 3, 2, 7)):
        assert Position.from_json(position.to_json()) == position
    assert START.to_json() == '{"file":0,"offset":0,"line":0,"ordinal":0}'


@pytest.mark.parametrize(
    "source",
    [
        "",
        "null",
        "[0, 0, 0, 0]",
        '{"file": 0, "offset": 0, "line": 0}',
        '{"byte_offset": 0, "line": 0, "ordinal": 0}',
        '{"file": 0, "offset": 0, "line": 0, "ordinal": 0, "more": 0}',
        '{"file": 0, "offset": -1, "line": 0, "ordinal": 0}',
        '{"file": 0, "offset": 0, "line": 0, "ordinal": 0, "chunks": -1}',
        '{"file": 0, "offset": 1.0, "line": 0, "ordinal": 0}',
        '{"file": 0, "offset": true, "line": 0, "ordinal": 0}',
        '{"file": 0, "offset": "0", "line": 0, "ordinal": 0}',
        "[" * 100_000,
    ],
)
def test_what_is_no_position_is_refused(source: str) -> None:
    with pytest.raises(CodecError):
        Position.from_json(source)
