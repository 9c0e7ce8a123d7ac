"""Fault points: what a test asks for happens where and when it asked, and nothing otherwise."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from embedq_broker import faults
from embedq_broker.faults import POINTS, FaultError, arm, fault_point
from embedq_schemas.errors import UsageError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm(None)


def passages(point: str, times: int) -> list[int]:
    """At which of `times` passages the fault raised."""
    raised = []
    for n in range(1, times + 1):
        try:
            fault_point(point)
        except FaultError:
            raised.append(n)
    return raised


def test_disarmed_points_do_nothing() -> None:
    assert faults._armed is None
    assert passages("publish.renamed", 3) == []


@pytest.mark.parametrize(
    ("when", "expected"), [("", [1]), (":2", [2]), (":every", [1, 2, 3, 4]), (":0.0", []), (":1.0", [1, 2, 3, 4])]
)
def test_a_fault_happens_at_the_passages_it_names(when: str, expected: list[int]) -> None:
    arm(f"publish.renamed:raise{when}")
    assert passages("publish.renamed", 4) == expected
    assert passages("publish.before", 4) == []


def test_a_probability_repeats_with_its_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        arm("publish.renamed:raise:0.5", seed=seed)
        drawn.append(passages("publish.renamed", 50))
    assert drawn[0] == drawn[1] != drawn[2]
    assert 10 < len(drawn[0]) < 40


def test_a_fault_may_wait_for_one_document() -> None:
    arm("embed.forward@b:raise:every")
    fault_point("embed.forward", pa.array(["a", "c"]))
    fault_point("embed.forward")
    with pytest.raises(FaultError):
        fault_point("embed.forward", pa.array(["a", "b"]))


def test_once_means_once_over_all_processes(tmp_path: Path) -> None:
    for _ in range(2):
        arm("publish.renamed:raise,publish.before:raise", once=str(tmp_path))
        fired = passages("publish.renamed", 1)
    assert fired == []
    assert passages("publish.before", 1) == [1]


def test_a_delay_lasts_as_long_as_asked() -> None:
    arm("publish.renamed:delay:1:0.05")
    started = time.monotonic()
    fault_point("publish.renamed")
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("text", ["nowhere:kill", "publish.renamed:explode", "publish.renamed:kill:soon", "x"])
def test_a_misspelt_fault_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        arm(text)


def test_every_point_is_passed_somewhere() -> None:
    folders = ("broker", "worker", "embedq")
    sources = "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert {point for point in POINTS if not re.search(rf'fault_point\(\s*"{re.escape(point)}"', sources)} <= {
        f"{stage}.commit.{when}" for stage in ("tokenize", "embed") for when in ("before", "after")
    }
