"""Full disks, damaged and removed files, between staging and publication."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedq_schemas.manifest import read_manifest
from embedq_schemas.run import RunStatus
from pipeline import Pipeline
from servers import Server

FORWARD = "embed.forward:delay:every:0.1"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Take every byte that is left."""
    filler = place / "filler"
    descriptor = os.open(filler, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, b"\0" * 4096)
    os.close(descriptor)
    return filler


def test_a_full_disk_is_waited_out_with_the_vectors_in_hand(pipeline: Pipeline, small_disk: Path) -> None:
    pipeline.output = small_disk / "out"
    pipeline.produce()
    crew = pipeline.start(faults=FORWARD, once=False)
    pipeline.until(lambda: len(read_manifest(pipeline.output)) > 1, "the first files")
    filler = fill(small_disk)
    pipeline.until(lambda: "holding finished vectors" in pipeline.log(), "the disk's refusal")
    time.sleep(1.5)
    filler.unlink()
    pipeline.check()
    assert crew.deaths == []


def test_a_disk_that_fills_up_between_the_rename_and_the_manifest_loses_nothing(
    pipeline: Pipeline, small_disk: Path
) -> None:
    pipeline.output = small_disk / "out"
    pipeline.produce()
    pipeline.start(faults="publish.synced:delay:1:1.5")
    pipeline.until(lambda: pipeline.fired("publish.synced"), "the first publication")
    filler = fill(small_disk)
    # The manifest's last page may have room for a line; then this is the case of the test above.
    time.sleep(3)
    filler.unlink()
    pipeline.check()


def test_a_server_whose_own_disk_is_full_holds_everybody_and_loses_nothing(
    pipeline: Pipeline, small_disk: Path, own_server: Server
) -> None:
    own_server.stop()
    shutil.copytree(own_server.directory, small_disk / "server", ignore=shutil.ignore_patterns("*.sock", "*.log"))
    own_server.args = ("--dir", str(small_disk / "server"))
    own_server.start()
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False)
    pipeline.until(lambda: len(read_manifest(pipeline.output)) > 0, "the first file")
    filler = fill(small_disk)
    pipeline.until(lambda: "cannot persist" in pipeline.log(), "the server's refusal")
    time.sleep(1)
    filler.unlink()
    pipeline.check(pipeline.finish(60))
    own_server.stop()
    own_server.args = ()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
def test_a_committed_file_that_is_damaged_before_publication_never_counts(pipeline: Pipeline, damage: str) -> None:
    pipeline.broker = pipeline.broker.model_copy(update={"lease_s": 0.5})
    pipeline.produce()
    crew = pipeline.start(faults="publish.before:stop")
    pipeline.until(lambda: pipeline.fired("publish.before"), "the first publication")
    record = next(iter(pipeline.registry.unpublished("run")))
    staged = pipeline.output / record.file.staging_name
    content = bytearray(staged.read_bytes())
    if damage == "truncated":
        staged.write_bytes(content[:-100])
    elif damage == "flipped":
        content[len(content) // 3] ^= 0x10
        staged.write_bytes(content)
    else:
        staged.unlink()
    for pid in crew.pids("embedder"):
        os.kill(pid, 9)
    state = pipeline.finish()
    assert state.status is RunStatus.FAILED
    assert record.file.token in str(state.error)
    assert record.file.token not in read_manifest(pipeline.output)
    assert not (pipeline.output / record.file.name).exists()
    assert not (pipeline.output / "_SUCCESS").exists()


def test_an_output_directory_removed_in_the_middle_is_told_and_never_completed(pipeline: Pipeline) -> None:
    pipeline.produce()
    pipeline.start(faults=FORWARD, once=False)
    pipeline.until(lambda: len(read_manifest(pipeline.output)) > 1, "the first files")
    shutil.rmtree(pipeline.output, ignore_errors=True)
    state = pipeline.finish(60)
    assert state.status is RunStatus.FAILED
    assert state.error
    assert not (pipeline.output / "_SUCCESS").exists()


def test_slow_storage_is_no_hang(pipeline: Pipeline) -> None:
    pipeline.broker = pipeline.broker.model_copy(update={"lease_s": 0.5})
    producer = threading.Thread(target=pipeline.produce)
    producer.start()
    pipeline.start(faults="stage.written:delay:every:0.4")
    producer.join()
    pipeline.check()
