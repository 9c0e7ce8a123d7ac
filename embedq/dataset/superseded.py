"""Files that no manifest names any more: out of every glob's way, and readable for a while for whoever knew them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from embedq_schemas.manifest import PublishedFile
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.files import fsync_directory, storage_errors

from embedq.dataset.reader import SUPERSEDED_NAME

GRACE_S = 3600.0
"""Seconds that replaced files stay readable."""


def tidy(dataset: Dataset, files: Sequence[PublishedFile], grace_s: float) -> int:
    """Put away what is in no manifest, and remove what has waited long enough. Returns how many files still wait.

    For a complete dataset, `files` of which count, and whose lock the caller holds.
    """
    listed = {file.name for file in files}
    superseded = dataset.path / SUPERSEDED_NAME
    with storage_errors(f"tidy {dataset.path}"):
        for leftover in (*dataset.staging.glob("*.tmp"), *dataset.path.glob("._*.tmp")):
            # The run is over and we are alone: a process that was killed left it.
            leftover.unlink(missing_ok=True)
        for part in dataset.path.glob("part-*.parquet"):
            if part.name not in listed:
                superseded.mkdir(exist_ok=True)
                # The time from which it waits.
                os.utime(part)
                part.rename(superseded / f"{part.name}.old")
        if not superseded.is_dir():
            return 0
        waiting = 0
        for part in superseded.iterdir():
            if time.time() - part.stat().st_mtime >= grace_s:
                part.unlink()
            else:
                waiting += 1
        if not waiting:
            superseded.rmdir()
        fsync_directory(dataset.path)
    return waiting
