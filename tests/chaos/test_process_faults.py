"""Processes that freeze, hang, die on a document, or lose their supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from embedq_broker.liveness import heartbeats
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.errors import DocumentErrorCode
from embedq_schemas.names import Lane
from embedq_schemas.run import RunStatus
from embedq_worker.keeper import EXIT_STUCK
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.errors import read_errors
from pipeline import EMBEDQ, Pipeline

FORWARD = "embed.forward:delay:every:0.15"


def letters(pipeline: Pipeline) -> list[DeadLetter]:
    """Error rows other than those of the corpus itself."""
    return [
        letter
        for letter in read_errors(Dataset(pipeline.output))
        if letter.code not in (DocumentErrorCode.TOO_LONG, DocumentErrorCode.INVALID_JSON)
    ]


@pytest.mark.parametrize("point", ["embed.forwarded", "stage.verified", "tokenize.encode", "publish.before"])
def test_a_frozen_worker_that_wakes_up_after_its_lease_commits_nothing_twice(pipeline: Pipeline, point: str) -> None:
    pipeline.produce()
    zombies = pipeline.start(faults=f"{point}:stop")
    pipeline.until(lambda: pipeline.fired(point), f"stopping at {point}")
    pipeline.start()
    if point == "publish.before":
        time.sleep(3)
    else:
        pipeline.until(lambda: pipeline.registry.state("run").counters.settled >= 50, "the others' work")
    zombies.signal(signal.SIGCONT)
    pipeline.check()


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("embed.forward@doc-17:exit137:every", DocumentErrorCode.MAX_DELIVERIES),
        ("tokenize.encode@doc-17:exit137:every", DocumentErrorCode.MAX_DELIVERIES),
        ("tokenize.encode@doc-17:raise:every", DocumentErrorCode.MAX_DELIVERIES),
        ("embed.forward@doc-17:raise:every", DocumentErrorCode.MAX_DELIVERIES),
        ("embed.forward@doc-17:delay:every:60", DocumentErrorCode.MAX_DELIVERIES),
    ],
    ids=["embedder exits 137", "tokenizer exits 137", "tokenizer raises", "embedder raises", "embedder hangs"],
)
def test_only_the_guilty_document_of_a_crash_is_dead_lettered(
    pipeline: Pipeline, fault: str, code: DocumentErrorCode
) -> None:
    pipeline.broker = pipeline.broker.model_copy(update={"max_deliveries": 1, "lease_s": 0.5})
    pipeline.produce()
    crew = pipeline.start(faults=fault, once=False)
    found = pipeline.check(pipeline.finish(90))
    assert [(letter.id, letter.code) for letter in letters(pipeline)] == [("doc-17", code)]
    assert found.rows == 57
    if "delay" in fault:
        assert EXIT_STUCK in {status for _, _, status in crew.deaths}


def test_a_text_that_makes_the_engine_return_nan_is_the_only_one_without_a_vector(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    import numpy as np
    from embedq_worker.engine.generate import generate_checkpoint
    from safetensors.numpy import load_file, save_file
    from tokenizers import Tokenizer

    model = generate_checkpoint(tmp_path / "poisoned", hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16)
    weights = load_file(model / "model.safetensors")
    token = Tokenizer.from_file(str(model / "tokenizer.json")).encode("@").ids[0]
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name][token] = np.nan
    save_file(weights, model / "model.safetensors")
    lines = pipeline.corpus.path.read_text().splitlines()
    poisoned = json.loads(lines[20])
    poisoned["text"] += " @"
    pipeline.corpus.texts[poisoned["id"]] = poisoned["text"]
    pipeline.corpus.path.write_text("\n".join([*lines[:20], json.dumps(poisoned), *lines[21:]]) + "\n")
    pipeline.worker = pipeline.worker.model_copy(update={"model": str(model)})
    pipeline.engine = pipeline.engine.model_copy(update={"kind": "native", "device": "cpu", "threads": 1})
    pipeline.produce()
    pipeline.start()
    pipeline.check(pipeline.finish(90))
    assert [(letter.id, letter.code) for letter in letters(pipeline)] == [("doc-20", DocumentErrorCode.NOT_FINITE)]


def test_a_hung_device_loses_its_lease_and_its_process_is_replaced(pipeline: Pipeline) -> None:
    pipeline.broker = pipeline.broker.model_copy(update={"lease_s": 0.5})
    pipeline.produce()
    crew = pipeline.start(faults="embed.forward:delay:1:120")
    pipeline.until(lambda: any(beat.state == "stuck" for beat in heartbeats(pipeline.client, pipeline.keys)), "stuck")
    pipeline.check()
    assert [status for _, _, status in crew.deaths] == [EXIT_STUCK]


def test_sigterm_drains_within_the_grace_period_and_keeps_what_was_computed(pipeline: Pipeline) -> None:
    pipeline.worker = pipeline.worker.model_copy(update={"flush_interval_s": 60.0})
    pipeline.produce()
    crew = pipeline.start(faults=FORWARD, once=False)
    pipeline.until(lambda: embeds(pipeline), "a batch under way")
    time.sleep(2)
    crew.signal(signal.SIGTERM)
    deadline = time.monotonic() + pipeline.worker.grace_s
    while any(member.process.is_alive() for member in crew.members):
        assert time.monotonic() < deadline, "the workers did not end within their grace period"
        time.sleep(0.05)
    assert [member.process.exitcode for member in crew.members] == [0, 0]
    assert heartbeats(pipeline.client, pipeline.keys) == []
    assert pipeline.registry.state("run").counters.succeeded > 0
    pipeline.crews.remove(crew)
    pipeline.start()
    pipeline.check()


def embeds(pipeline: Pipeline) -> bool:
    beats = heartbeats(pipeline.client, pipeline.keys)
    return any(beat.role == "embedder" and beat.state == "working" for beat in beats)


def worker_command(pipeline: Pipeline) -> list[str]:
    command = [EMBEDQ, "worker", "--redis", pipeline.broker.redis_url, "--queue", "chaos", "--engine", "null"]
    command += ["--model", pipeline.worker.model, "--output-root", str(pipeline.folder), "--lease-s", "1"]
    return [*command, "--flush-interval-s", "0.2", "--grace-s", "1", "--tokenizer-backend", "huggingface"]


def test_a_killed_supervisor_leaves_no_orphan(pipeline: Pipeline) -> None:
    worker = subprocess.Popen(worker_command(pipeline), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        pipeline.until(lambda: len(heartbeats(pipeline.client, pipeline.keys)) == 2, "two processes", 60)
        pids = [beat.pid for beat in heartbeats(pipeline.client, pipeline.keys)]
    finally:
        worker.kill()
        worker.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and "Z" not in status_of(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes outlive their supervisor"
        time.sleep(0.1)


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("version", ["0", "2"])
def test_entries_of_another_schema_version_are_dead_letters_with_a_clear_reason(
    pipeline: Pipeline, version: str
) -> None:
    pipeline.produce()
    stream = pipeline.keys.jobs(Lane.BULK)
    entry_id, fields = pipeline.client.xrange(stream, count=1)[0]
    pipeline.client.xadd(stream, fields | {b"v": version})
    pipeline.client.xdel(stream, entry_id)
    pipeline.start()
    state = pipeline.finish()
    assert state.status is RunStatus.COMPLETED
    assert state.counters.settled == state.counters.input
    broken = letters(pipeline)
    assert len(broken) == int(fields[b"n"])
    assert {letter.code for letter in broken} == {DocumentErrorCode.INVALID_JOB}
    assert f"version '{version}'" in broken[0].message


def test_heartbeats_from_clocks_that_are_far_off_stop_nobody(pipeline: Pipeline) -> None:
    for name, at in (("past", 0.0), ("future", time.time() + 10**9)):
        beat = {"consumer": name, "role": "embedder", "host": "h", "pid": 1, "started_at": at, "at": at}
        beat |= {"state": "idle", "state_s": 0, "held": 0, "documents": 0, "tokens": 0, "max_batch_tokens": 256}
        pipeline.client.hset(pipeline.keys.workers, name, json.dumps(beat))
    pipeline.produce()
    pipeline.start()
    pipeline.check()


def test_passwords_never_reach_a_log(pipeline: Pipeline) -> None:
    secret = "s3cr3t-w0rd"
    pipeline.client.config_set("requirepass", secret)
    url = pipeline.broker.redis_url.replace("redis://", f"redis://:{secret}@")
    wrong = pipeline.broker.redis_url.replace("redis://", f"redis://:{secret}-wrong@")
    outputs = []
    for target in (url, wrong, url.replace(url.rpartition(":")[2], "1/0")):
        command = [EMBEDQ, "produce", str(pipeline.corpus.path), "--redis", target, "--output", str(pipeline.output)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        outputs.append(ended.stdout + ended.stderr)
    command = worker_command(pipeline)
    command[command.index("--redis") + 1] = url
    worker = subprocess.Popen(
        [*command, "--log-level", "DEBUG"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"EMBEDQ_LOG_LEVEL": "DEBUG"},
    )  # fmt: skip
    time.sleep(5)
    worker.terminate()
    outputs += list(worker.communicate(timeout=30))
    pipeline.client.config_set("requirepass", "")
    assert any("***" in output for output in outputs)
    assert not any(secret in output for output in outputs)
