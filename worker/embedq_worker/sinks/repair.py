"""Files that do not count: telling whole ones from damaged ones, and taking out of a dataset what must not be read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from embedq_schemas.manifest import MANIFEST_NAME, PublishedFile, read_manifest

from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.files import storage_errors, write_durably


def intact(path: Path, file: PublishedFile) -> bool:
    """Whether `path` exists with the size that was committed."""
    try:
        return path.stat().st_size == file.size_bytes
    except OSError:
        return False


def withdraw(dataset: Dataset, tokens: Collection[str]) -> None:
    """Take files out of the manifest, then remove them; a repeated call goes on where one ended.

    Raises:
        StorageError: the disk refused.
    """
    if not tokens:
        return
    kept = [file.encode() + b"\n" for token, file in read_manifest(dataset.path).items() if token not in tokens]
    with storage_errors(f"withdraw files from {dataset.path}"):
        write_durably(dataset.path / MANIFEST_NAME, b"".join(kept))
        for token in tokens:
            (dataset.path / f"part-{token}.parquet").unlink(missing_ok=True)
