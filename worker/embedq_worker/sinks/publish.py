"""Publishing: a committed file gets its final name, its manifest line, and loses its commit record.

Any process that sees the dataset may do it, and doing it twice is harmless.
"""

from __future__ import annotations

from pathlib import Path

import redis
from embedq_broker import metrics
from embedq_broker.commit import CommitRecord, published
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys
from embedq_schemas.errors import StorageError
from embedq_schemas.manifest import MANIFEST_NAME, PublishedFile, read_manifest

from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.files import append_line, fsync_directory, storage_errors
from embedq_worker.sinks.parquet import verify_content


class CommittedFileError(StorageError):
    """A committed file is gone or damaged: its rows are lost unless they are computed again."""


def publish(client: redis.Redis, keys: Keys, dataset: Dataset, record: CommitRecord, *, replay: bool = False) -> None:
    """Publish one committed file.

    Args:
        replay: another process may have begun: look into the manifest before appending to it.

    Raises:
        StorageError: the disk refused, or the committed file is gone.
    """
    with metrics.stage_duration.labels("publish").time():
        _publish(client, keys, dataset, record, replay)


def _publish(client: redis.Redis, keys: Keys, dataset: Dataset, record: CommitRecord, replay: bool) -> None:
    staging = dataset.path / record.file.staging_name
    final = dataset.path / record.file.name
    fault_point("publish.before")
    with storage_errors(f"publish {final}"):
        _check(final if final.exists() else staging, record.file, thoroughly=replay)
        if final.exists():
            staging.unlink(missing_ok=True)
        else:
            try:
                # The name holds a token of its own, so nothing can be overwritten by it.
                staging.rename(final)
            except FileNotFoundError:
                # Between our look and the rename another process may have published it.
                if not final.exists():
                    raise CommittedFileError(
                        f"{final} was committed, but neither it nor {staging} exists: something removed it"
                    ) from None
        fault_point("publish.renamed")
        fsync_directory(dataset.path)
        fault_point("publish.synced")
        if not (replay and record.file.token in read_manifest(dataset.path)):
            append_line(dataset.path / MANIFEST_NAME, record.file.encode())
    fault_point("publish.listed")
    published(client, keys, record)
    fault_point("publish.dropped")


def _check(path: Path, file: PublishedFile, *, thoroughly: bool) -> None:
    """What was staged is what gets published. One that another process staged is read whole."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    if size != file.size_bytes:
        raise CommittedFileError(f"{path} holds {size} bytes, {file.size_bytes} were committed")
    if thoroughly:
        try:
            verify_content(path, file.rows)
        except StorageError as error:
            if path.exists():
                raise CommittedFileError(str(error)) from None
