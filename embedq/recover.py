"""What an earlier `embedq run`, however it ended, left behind: work the server forgot, files that are gone, and leases
nobody holds.

A server that lost the end of its append-only file would embed again what files already hold; a file that was removed
or damaged would be missed for good. Either way the intact files are the truth: the run is registered anew with the
outcomes they prove, and its producer starts from the beginning, leaving those documents out.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import redis
from embedq_broker.consume import Stage, release_consumer
from embedq_broker.keys import Keys
from embedq_broker.liveness import bury, heartbeats
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.ordinals import OrdinalSet
from embedq_schemas.errors import RunNotFoundError
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.run import RunCounters, RunSpec, RunState, RunStatus
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.errors import keep_errors, read_errors


def release_the_dead(client: redis.Redis, keys: Keys, settings: BrokerSettings) -> None:
    """Give back, at once instead of after the lease time, what killed processes held.

    For a queue whose server has just started and serves this run alone: whoever is on record there is dead.
    """
    for beat in heartbeats(client, keys):
        stage = Stage.TOKENIZE if beat.role == "tokenizer" else Stage.EMBED
        release_consumer(client, keys, stage, beat.consumer, lease_ms=settings.lease_ms)
        bury(client, keys, beat.consumer)


def reconcile(
    registry: Registry,
    dataset: Dataset,
    spec: RunSpec,
    on_note: Callable[[str], None] = lambda _: None,
    *,
    alone: bool = True,
) -> OrdinalSet:
    """Make registry and dataset agree before a run goes on. No worker may be writing into the dataset.

    Args:
        alone: the queue serves this run only, so that its streams may be dropped. Otherwise only a run that the
            registry has lost whole is taken up from its dataset.

    Returns:
        Ordinals whose outcome the dataset settles and the registry has counted.
    """
    try:
        state = registry.state(spec.run)
    except RunNotFoundError:
        state = None
    if state is not None and not alone:
        return OrdinalSet()
    files = dataset.store.files()
    sizes = dataset.store.sizes()
    letters = list(read_errors(dataset))
    committed = {record.file.token: record.file for record in registry.unpublished(spec.run)} if state else {}
    broken = {token for token, file in files.items() if sizes.get(file.name) != file.size_bytes}
    reason = _reason(registry, dataset, state, files, sizes, len(letters), committed, broken)
    if reason is None:
        _drop_strangers(dataset, {*files, *committed})
        # A run that was taken up anew before may have been interrupted before its producer had passed all of these.
        pairs = _pairs({**files, **committed})
        return OrdinalSet([*pairs, *((o, o) for o in {letter.ordinal for letter in letters} if o >= 0)])
    dataset.withdraw(broken)
    files = {token: file for token, file in files.items() if token not in broken}
    # Named but never listed, or committed but never named: those documents are sent again.
    _drop_strangers(dataset, set(files))
    pairs = _pairs(files)
    held = OrdinalSet(pairs)
    # A document may have failed and, in a part of history the server lost, succeeded: its vector counts.
    failed = {letter.ordinal for letter in letters if letter.ordinal >= 0 and letter.ordinal not in held}
    keep_errors(dataset, failed)
    counters = RunCounters(
        succeeded=sum(file.rows for file in files.values()),
        failed=len(failed),
        tokens=sum(file.tokens for file in files.values() if not file.copied),
    )
    if state is not None or files or failed:
        registry.restore(spec, counters, files=len(files), tokens=files, drop_streams=alone)
        on_note(f"{reason}: {counters.settled} documents are taken from {dataset}, the others are sent again")
    return OrdinalSet([*pairs, *((ordinal, ordinal) for ordinal in failed)])


def _reason(
    registry: Registry,
    dataset: Dataset,
    state: RunState | None,
    files: dict[str, PublishedFile],
    sizes: dict[str, int],
    errors: int,
    committed: dict[str, PublishedFile],
    broken: set[str],
) -> str | None:
    """Why the registry cannot be gone on with; None where it can."""
    if state is None:
        return "the server does not know this run"
    if broken:
        return f"{len(broken)} files of the dataset are gone or damaged"
    if state.published_files < len(files) or state.counters.failed - state.dead_letters != errors:
        return "the server had lost work that the dataset holds"
    gone = [
        file
        for file in committed.values()
        if sizes.get(file.name) != file.size_bytes and not dataset.store.is_staged(file)
    ]
    if gone:
        return f"{len(gone)} committed files are gone or damaged"
    if state.status is RunStatus.FAILED:
        return f"the run had failed ({state.error})"
    missing = registry.missing(state.spec.run)
    if not state.input_closed and registry.streams_empty():
        missing = max(0, state.counters.input - state.counters.settled)
    if missing:
        return f"{missing} documents are in no stream any more"
    return None


def _pairs(files: dict[str, PublishedFile]) -> list[tuple[int, int]]:
    return [pair for file in files.values() for pair in file.ranges]


def _drop_strangers(dataset: Dataset, known: set[str]) -> None:
    names = {f"part-{token}.parquet" for token in known}
    parts = fnmatch.filter(dataset.store.sizes(), "part-*.parquet")
    dataset.store.delete(part for part in parts if part not in names)
