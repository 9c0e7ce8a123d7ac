"""SIGKILL at every numbered step of the protocol: the run completes, and nothing is lost, doubled or miscounted."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from embedq_broker.faults import POINTS
from pipeline import EMBEDQ, Pipeline

WORKER_POINTS = [point for point in POINTS if not point.startswith(("produce.", "copy.", "switch.", "compact."))]
PRODUCER_POINTS = [point for point in POINTS if point.startswith("produce.")]
KINDS = ("valkey", "redis")
# Two texts are too long, one line is no JSON.
ROWS, ERRORS = 58, 3


def produce_command(pipeline: Pipeline) -> list[str]:
    command = [EMBEDQ, "produce", str(pipeline.corpus.path), "--redis", pipeline.broker.redis_url]
    command += ["--queue", "chaos", "--run", "run", "--output", str(pipeline.output), "--job-documents", "8"]
    return [*command, "--max-length", "64", "--on-long", "error"]


@pytest.mark.parametrize("own_server", ["valkey", pytest.param("redis", marks=pytest.mark.long)], indirect=True)
def test_workers_killed_once_at_every_step_lose_and_double_nothing(pipeline: Pipeline) -> None:
    found = pipeline.killed_once_at_each(WORKER_POINTS)
    assert (found.rows, found.errors) == (ROWS, ERRORS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("own_server", "point"),
    [(KINDS[index % 2], point) for index, point in enumerate(WORKER_POINTS)],
    indirect=["own_server"],
)
def test_a_worker_killed_at_one_step_loses_and_doubles_nothing(pipeline: Pipeline, point: str) -> None:
    faults = f"{point}:kill"
    pipeline.start(faults=faults)
    pipeline.produce()
    pipeline.until(lambda: pipeline.fired(faults), f"passing {point}")
    found = pipeline.check()
    assert (found.rows, found.errors) == (ROWS, ERRORS)


def test_a_producer_killed_at_every_step_resumes_without_doubling_a_job(pipeline: Pipeline) -> None:
    command = produce_command(pipeline)
    for faults in (f"{PRODUCER_POINTS[0]}:kill:1", f"{PRODUCER_POINTS[1]}:kill:2", f"{PRODUCER_POINTS[0]}:kill:3"):
        killed = subprocess.run(command, env=os.environ | {"EMBEDQ_FAULTS": faults}, capture_output=True, timeout=60)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    pipeline.start()
    found = pipeline.check()
    assert (found.rows, found.errors) == (ROWS, ERRORS)
