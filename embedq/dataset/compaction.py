"""Fewer, larger files (`embedq compact`), with the same rows, at any moment of which the process may be killed.

The small files of a complete dataset, and those that may hold doubled rows, are merged in input order into new files,
which are staged, made durable and verified like any other. Then, in this order: the new files get their names;
`_SUCCESS` says how many rows fall away; one rename replaces the manifest; the replaced files move to `_superseded/`,
out of every glob's way, where a reader that opened the old manifest still finds them. A later call removes them there.
Whoever reads through the manifest sees the old files or the new ones; a glob sees both for the moment between the
first and the last of these steps.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from embedq_broker.faults import fault_point
from embedq_schemas.errors import OutputError, RunConflictError, RunIncompleteError, RunNotFoundError, UsageError
from embedq_schemas.manifest import MANIFEST_NAME, PublishedFile
from embedq_schemas.vector_batch import VectorBatch
from embedq_worker.sinks.dataset import Dataset, is_url
from embedq_worker.sinks.files import fsync_directory, storage_errors, write_durably
from embedq_worker.sinks.parquet import row_weight, stage
from numpy.typing import NDArray

from embedq.dataset.reader import DatasetReader, facts_in, open_dataset
from embedq.dataset.superseded import tidy
from embedq.directory import owned
from embedq.generation import finish_switch


@dataclass(frozen=True)
class Compaction:
    """What was done. `waiting_files` lie in `_superseded/` for readers that may still need them."""

    files_before: int
    files_after: int
    rows_dropped: int
    waiting_files: int


def compact_dataset(path: str | Path, *, file_bytes: int, grace_s: float) -> Compaction:
    """Merge files below half of `file_bytes` (bytes of vectors), and keep only the newest row of a doubled document.

    Doubled rows, equal in id and ordinal, come from a server that lost acknowledged work. Replaced files are removed
    once they have waited for `grace_s` seconds, by this call or a later one. Repeating a call that was killed goes on
    where it ended.

    Raises:
        RunNotFoundError: the directory holds no run.
        RunIncompleteError: its run is not complete.
        RunConflictError: another process works on it.
        OutputError: a file is gone or damaged.
        UsageError: the dataset is on an object store.
        StorageError: the disk refused; the dataset is as it was.
    """
    if is_url(path):
        raise UsageError(
            f"embedq compact renames files, which no object store can: copy {path} to a directory first, or write "
            "it anew with larger --file-bytes"
        )
    dataset = Dataset(Path(path).resolve())
    if dataset.run_spec() is None:
        raise RunNotFoundError(f"{path} holds no run")
    with _alone(dataset):
        finish_switch(dataset)
        if not dataset.success.exists():
            raise RunIncompleteError(f"{path} is not complete; its run comes first")
        reader = open_dataset(dataset.path)
        tidy(dataset, reader.files, grace_s)
        chosen = _chosen(reader, file_bytes) if reader.files else []
        fresh = _merge(dataset, replace(reader, files=tuple(chosen)), file_bytes) if chosen else []
        dropped = sum(file.rows for file in chosen) - sum(file.rows for file in fresh)
        files = list(reader.files)
        if dropped or len(fresh) < len(chosen):
            files = [file for file in reader.files if file not in chosen] + fresh
            _swap(dataset, reader, fresh, files)
        waiting = tidy(dataset, files, grace_s)
        fault_point("compact.moved")
        return Compaction(len(reader.files), len(files), reader.rows - sum(file.rows for file in files), waiting)


@contextmanager
def _alone(dataset: Dataset) -> Iterator[None]:
    try:
        with owned(dataset):
            yield
    except RunConflictError:
        raise RunConflictError(f"another embedq run or embedq compact works on {dataset.path}") from None


def _chosen(reader: DatasetReader, file_bytes: int) -> list[PublishedFile]:
    """The files to merge: small ones, if there are several, and all that share ordinals with another."""
    small = {f.token for f in reader.files if f.rows * _weight(reader) < file_bytes / 2}
    doubled = _overlapping(reader.files)
    if len(small) < 2 and not doubled:
        return []
    return [file for file in reader.files if file.token in small | doubled]


def _weight(reader: DatasetReader) -> int:
    return row_weight(reader.vector_type, reader.dimensions)


def _overlapping(files: Sequence[PublishedFile]) -> set[str]:
    """Tokens of the files that hold an ordinal which another file holds too."""
    ranges = [np.array(file.ordinals, dtype=np.int64).reshape(-1, 2) for file in files]
    pairs = np.concatenate(ranges)
    owners = np.repeat(np.arange(len(files)), [len(own) for own in ranges])
    order = np.argsort(pairs[:, 0], kind="stable")
    pairs, owners = pairs[order], owners[order]
    reach = np.maximum.accumulate(pairs[:, 1])
    # For each range, the earlier one that reaches furthest: whatever begins inside any earlier one begins inside it.
    leads = np.append(True, pairs[1:, 1] > reach[:-1])
    furthest = np.maximum.accumulate(np.where(leads, np.arange(len(pairs)), 0))
    inside = np.flatnonzero(pairs[1:, 0] <= reach[:-1])
    found = {*owners[inside + 1].tolist(), *owners[furthest[inside]].tolist()}
    return {files[number].token for number in found}


def _merge(dataset: Dataset, reader: DatasetReader, file_bytes: int) -> list[PublishedFile]:
    """Stage the rows of the reader's files as new ones; nothing stays staged where that fails."""
    limit = _token_limit(reader)
    metadata = _metadata(reader)
    fresh: list[PublishedFile] = []
    with storage_errors(f"write into {dataset.staging}"):
        dataset.staging.mkdir(exist_ok=True)
    try:
        for batches in _files_worth(reader, max(1, file_bytes // _weight(reader))):
            tokens = sum(_tokens(batch, limit) for batch in batches)
            fresh.append(stage(dataset, uuid.uuid4().hex, reader.spec.run, batches, metadata, tokens))
    except BaseException:
        for file in fresh:
            (dataset.path / file.staging_name).unlink(missing_ok=True)
        raise
    fault_point("compact.staged")
    return fresh


def _files_worth(reader: DatasetReader, rows: int) -> Iterator[list[VectorBatch]]:
    """The rows in input order, `rows` of them at a time."""
    held: list[VectorBatch] = []
    room = rows
    for batch in reader.batches(order="input", batch_rows=min(rows, reader.batch_rows)):
        rest = batch
        while rest.num_rows:
            part = rest.slice(0, room)
            held.append(VectorBatch(part))
            rest, room = rest.slice(part.num_rows), room - part.num_rows
            if not room:
                yield held
                held, room = [], rows
    if held:
        yield held


def _metadata(reader: DatasetReader) -> dict[str, str]:
    """The facts of all the files; where they differ, as in the dtype of different machines, each of them."""
    found: dict[str, dict[str, None]] = {}
    for file in reader.files:
        with reader.opened(file) as opened:
            for name, text in facts_in(opened.schema_arrow).items():
                found.setdefault(name, {})[text] = None
    return {f"embedq.{name}": ", ".join(texts) for name, texts in found.items()}


def _token_limit(reader: DatasetReader) -> int:
    """The length that the run cut texts to, which the rows do not say but their files' sums do; 0 if none was cut."""
    limits = set()
    schema = reader.select(["n_tokens", "truncated"])
    for file in reader.files:
        cut = whole = 0
        for batch in reader.file_batches(file, schema, 1 << 20):
            lengths, truncated = _lengths(batch)
            cut += int(truncated.sum())
            whole += int(lengths[~truncated].sum())
        if cut:
            limits.add((file.tokens - whole) / cut)
        elif whole != file.tokens:
            raise OutputError(f"{reader.path / file.name} holds {whole} tokens, its manifest says {file.tokens}")
    if len(limits) > 1 or not all(limit.is_integer() for limit in limits):
        raise OutputError(f"the token counts in the manifest of {reader.path} are not those of its files")
    return int(limits.pop()) if limits else 0


def _lengths(batch: Any) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    return batch.column("n_tokens").to_numpy(), batch.column("truncated").to_numpy(zero_copy_only=False)


def _tokens(batch: VectorBatch, limit: int) -> int:
    lengths, truncated = _lengths(batch.table)
    return int(lengths[~truncated].sum()) + limit * int(truncated.sum())


def _swap(
    dataset: Dataset, reader: DatasetReader, fresh: Sequence[PublishedFile], files: Sequence[PublishedFile]
) -> None:
    """Make `files` the dataset; `fresh` of them are staged."""
    with storage_errors(f"compact {dataset.path}"):
        for file in fresh:
            (dataset.path / file.staging_name).rename(dataset.path / file.name)
        fault_point("compact.renamed")
        fsync_directory(dataset.path)
        superseded = reader.summary["succeeded"] - sum(file.rows for file in files)
        summary = reader.summary | {"files": len(files)} | ({"superseded": superseded} if superseded else {})
        write_durably(dataset.success, json.dumps(summary).encode() + b"\n")
        fault_point("compact.noted")
        write_durably(dataset.path / MANIFEST_NAME, b"".join(file.encode() + b"\n" for file in files))
        fault_point("compact.listed")
