"""A run's dead letters, moved from Redis into the dataset's `_errors/part-*.jsonl`.

JSON lines, not Parquet, so that no recursive glob takes them for vectors. A part is named for the range of dead
letters it holds, and the range is written down before the part: a repeated move writes the same part again.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from fnmatch import fnmatch

import redis
from embedq_broker import scripts
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_schemas.dead_letter import DeadLetter

from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.files import storage_errors
from embedq_worker.sinks.store import ERRORS_NAME

PART_ROWS = 10_000


def drain(client: redis.Redis, registry: Registry, keys: Keys, dataset: Dataset, run: str) -> int:
    """Move one part of the run's dead letters into the dataset. Returns how many; 0 when none is left."""
    run_key = keys.run(run)
    planned = client.hget(run_key, "drain_range")
    if planned is None:
        page = registry.dead_letters(run, count=PART_ROWS)
        if not page:
            return 0
        planned = scripts.call(client, "plan_drain", [run_key], [f"{page[0][0]}/{page[-1][0]}"], allow_oom=True)
        if planned is None:
            return 0
    fault_point("drain.planned")
    span = scripts.text(planned)
    first, _, last = span.partition("/")
    page = [(i, letter) for i, letter in registry.dead_letters(run, count=PART_ROWS) if _order(i) <= _order(last)]
    if page and page[0][0] == first:
        with storage_errors(f"write errors of run {run} into {dataset}/{ERRORS_NAME}"):
            rows = b"".join(letter.encode() + b"\n" for _, letter in page)
            dataset.store.replace(f"{ERRORS_NAME}/part-{first}-{last}.jsonl", rows)
    fault_point("drain.written")
    ids = [entry_id for entry_id, _ in page]
    dead = keys.dead(run)
    backlog = [keys.bytes, keys.held]
    scripts.call(client, "drain", [dead, run_key, *backlog], [span, keys.suffix(dead), *ids], allow_oom=True)
    fault_point("drain.dropped")
    return len(page)


def read_errors(dataset: Dataset) -> Iterator[DeadLetter]:
    """Dead letters already in the dataset."""
    for part in _parts(dataset):
        with dataset.store.lines(part) as lines:
            for line in lines:
                yield DeadLetter.decode(line)


def _parts(dataset: Dataset) -> list[str]:
    names = sorted(dataset.store.sizes(ERRORS_NAME))
    return [f"{ERRORS_NAME}/{name}" for name in names if fnmatch(name, "part-*.jsonl")]


def keep_errors(dataset: Dataset, ordinals: Collection[int]) -> None:
    """Keep one error row for each of `ordinals` and drop the others.

    Raises:
        StorageError: the disk refused.
    """
    letters = list(read_errors(dataset))
    kept = {letter.ordinal: letter for letter in letters if letter.ordinal in ordinals}
    if len(kept) == len(letters):
        return
    old = _parts(dataset)
    with storage_errors(f"write errors into {dataset}/{ERRORS_NAME}"):
        if kept:
            rows = b"".join(letter.encode() + b"\n" for letter in kept.values())
            dataset.store.replace(f"{ERRORS_NAME}/part-{uuid.uuid4().hex}.jsonl", rows)
        dataset.store.delete(old)


def keep_one_error_each(dataset: Dataset, failed: int) -> None:
    """Drop repeated error rows of a document, where there are more rows than the `failed` documents counted."""
    ordinals = [letter.ordinal for letter in read_errors(dataset)]
    if len(ordinals) > failed and min(ordinals) >= 0:
        keep_errors(dataset, set(ordinals))


def _order(entry_id: str) -> tuple[int, int]:
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)
