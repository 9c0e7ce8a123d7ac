"""The commit: one atomic step in which outputs become visible and inputs are acknowledged.

A `Commit` is built from entries (inputs), streams to add to (outputs) and counters to move, then sent as one script
call. Sending the same commit again is harmless: its token makes the second call answer `dup`.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import redis
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.errors import BrokerUnavailableError, CodecError, UsageError
from embedq_schemas.job import Codec
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.names import Lane
from embedq_schemas.run import Durability
from redis.exceptions import ResponseError

from embedq_broker import metrics, scripts
from embedq_broker.consume import Consumer, Entry, Share, Stage, envelope
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys
from embedq_broker.once import warn_once
from embedq_broker.scripts import text

log = logging.getLogger(__name__)

#: How long the token of a commit that names a file is remembered; no retry lasts longer.
TOKEN_TTL_MS = 24 * 3600 * 1000
#: The same where all outputs are in Redis: a retry after it finds its inputs gone, and has nothing to discard. Services
#: commit thousands of small batches a minute, each with a token.
SHORT_TOKEN_TTL_MS = 600 * 1000
#: How long WAIT and WAITAOF may take.
DURABLE_TIMEOUT_MS = 10_000
_POINTS = {
    Stage.TOKENIZE: ("tokenize.commit.before", "tokenize.commit.after"),
    Stage.EMBED: ("embed.commit.before", "embed.commit.after"),
}


class CommitOutcome(StrEnum):
    OK = "ok"
    DUP = "dup"  # an earlier call of this very commit succeeded
    LOST = "lost"  # some inputs are another consumer's now; nothing was written


@dataclass(frozen=True)
class Committed:
    """Reply to a commit."""

    outcome: CommitOutcome
    #: For OK: the ids of the added entries, '' where the run is gone. Empty for DUP.
    added: tuple[str, ...] = ()
    #: For LOST: (stream, id) of the inputs that are not ours any more.
    lost: tuple[tuple[str, str], ...] = ()


@dataclass
class Commit:
    """A commit under construction, for the leases of one consumer."""

    consumer: Consumer
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    inputs: list[Entry] = field(default_factory=list)
    #: Results stay in Redis, so a server at maxmemory must refuse this commit; all others free more than they add.
    keeps_memory: bool = False
    _adds: list[dict[str, Any]] = field(default_factory=list)
    _payloads: list[bytes | memoryview] = field(default_factory=list)
    _counters: dict[tuple[str, str], int] = field(default_factory=dict)
    _names_file: bool = False
    _codes: list[str] = field(default_factory=list)

    def count(self, run: str, counter: str, by: int) -> None:
        """Move one of a run's counters."""
        if by:
            key = (self.consumer.keys.run(run), counter)
            self._counters[key] = self._counters.get(key, 0) + by

    def add_batch(self, lane: Lane, shares: Sequence[Share], payload: memoryview) -> None:
        """A token batch for the embedders."""
        self._add_payload(self.consumer.keys.batches(lane), envelope(Codec.ARROW, shares), payload)

    def add_again(self, entry: Entry, shares: Sequence[Share], codec: str, payload: bytes | memoryview) -> None:
        """Part of `entry`, as an entry of its own in the same stream."""
        self._add_payload(entry.stream, envelope(codec, shares), payload)

    def add_result(self, run: str, documents: int, payload: memoryview, *, ttl_ms: int) -> None:
        """A vector batch for a run's result stream."""
        self.keeps_memory = True
        fields = envelope(Codec.ARROW, [Share(run, documents)])
        self._add_payload(self.consumer.keys.results(run), fields, payload, run=run, ttl_ms=ttl_ms)

    def add_file(self, file: PublishedFile, dataset: str) -> None:
        """The commit record of a staged file of `dataset`, a directory or an object store prefix."""
        fields = ["run", file.run, "dataset", dataset, "file", file.encode().decode()]
        self._adds.append({"key": self.consumer.keys.commits, "fields": fields, "run": file.run})
        self._names_file = True
        self.count(file.run, "committed_files", 1)

    def add_dead_letter(self, run: str, letter: DeadLetter) -> None:
        """One document's failure, counted."""
        self._add_payload(self.consumer.keys.dead(run), [], letter.encode(), run=run, name="letter")
        self.count(run, "failed", 1)
        self._codes.append(letter.code)

    def send(self, client: redis.Redis, *, durability: Durability = Durability.PROCESS) -> Committed:
        """Make it so, or write nothing at all.

        With `durability` above `process` the client must hold a single connection: WAITAOF and WAIT speak of the
        writes of their own connection.
        """
        names = self.consumer.keys
        keys = [names.token(self.token), names.bytes, names.events, names.held]
        plan = self._plan(keys)
        args = [json.dumps(plan, separators=(",", ":")), *self._payloads]
        before, after = _POINTS[self.consumer.stage]
        fault_point(before)
        try:
            with metrics.stage_duration.labels("commit").time():
                reply = scripts.call(client, "commit", keys, args, allow_oom=not self.keeps_memory)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            # The group is gone, and with it every lease; what the streams still hold is delivered again.
            self.consumer.ensure_groups()
            committed = Committed(CommitOutcome.LOST, lost=tuple((e.stream, e.id) for e in self.inputs))
        else:
            committed = _parse_reply(reply)
        fault_point(after)
        if committed.outcome is not CommitOutcome.LOST:
            _wait_durable(client, durability)
        self._observe(committed)
        lost = set(committed.lost)
        self.consumer.forget(entry for entry in self.inputs if not lost or (entry.stream, entry.id) in lost)
        return committed

    def _observe(self, committed: Committed) -> None:
        """Count what this call settled; a commit whose reply was lost is counted by the call that finds it done."""
        metrics.leases_lost.labels(self.consumer.stage).inc(len(committed.lost))
        if committed.outcome is CommitOutcome.LOST:
            return
        for (_, counter), by in self._counters.items():
            if counter in ("succeeded", "failed", "skipped"):
                metrics.documents.labels(counter).inc(by)
            elif counter == "tokens":
                metrics.tokens.inc(by)
        for code in self._codes:
            metrics.dead_letters.labels(code).inc()

    def _add_payload(
        self,
        key: str,
        fields: list[str | int],
        payload: bytes | memoryview,
        *,
        run: str | None = None,
        ttl_ms: int = 0,
        name: str = "payload",
    ) -> None:
        self._payloads.append(payload)
        self._adds.append(
            {
                "key": key,
                "field": self.consumer.keys.suffix(key),
                "fields": [str(value) for value in fields],
                "payload": len(self._payloads) + 1,
                "name": name,
                "run": run,
                "ttl_ms": ttl_ms,
            }
        )

    def _plan(self, keys: list[str]) -> dict[str, Any]:
        """The script's plan; appends the keys it uses to `keys`."""

        def index(key: str) -> int:
            if key not in keys:
                keys.append(key)
            return keys.index(key) + 1

        by_stream: dict[str, list[Entry]] = {}
        for entry in self.inputs:
            by_stream.setdefault(entry.stream, []).append(entry)
        adds = []
        for add in self._adds:
            planned = {"k": index(add["key"]), "fields": add["fields"]}
            for name in ("field", "payload", "name", "ttl_ms"):
                if add.get(name):
                    planned[name] = add[name]
            if add.get("run"):
                planned["run"] = index(self.consumer.keys.run(add["run"]))
            adds.append(planned)
        return {
            "ttl_ms": TOKEN_TTL_MS if self._names_file else SHORT_TOKEN_TTL_MS,
            "group": self.consumer.stage,
            "consumer": self.consumer.name,
            "inputs": [
                {
                    "k": index(stream),
                    "field": self.consumer.keys.suffix(stream),
                    "ids": [entry.id for entry in entries],
                    "deliveries": [entry.deliveries for entry in entries],
                    "sizes": [len(entry.payload) for entry in entries],
                }
                for stream, entries in by_stream.items()
            ],
            "adds": adds,
            "incrs": [{"k": index(key), "counter": counter, "by": by} for (key, counter), by in self._counters.items()],
        }


def _parse_reply(reply: list[Any]) -> Committed:
    outcome = CommitOutcome(text(reply[0]))
    if outcome is CommitOutcome.LOST:
        flat = [text(value) for value in reply[1]]
        return Committed(outcome, lost=tuple(zip(flat[::2], flat[1::2], strict=True)))
    return Committed(outcome, added=tuple(text(value) for value in reply[1:]))


def check_durability(client: redis.Redis, durability: Durability) -> None:
    """Raise UsageError if the server cannot confirm commits as asked, before anybody relies on it."""
    if durability is not Durability.FSYNC:
        return
    raw: Any = client
    try:
        raw.execute_command("WAITAOF", 1, 0, 1)
    except ResponseError as error:
        raise UsageError(
            "durability fsync needs Redis 7.2, or Valkey, with its append-only file on; "
            f"this server says: {str(error).partition(', with args')[0]}"
        ) from None


def _wait_durable(client: redis.Redis, durability: Durability) -> None:
    raw: Any = client
    if durability is Durability.FSYNC:
        if raw.execute_command("WAITAOF", 1, 0, DURABLE_TIMEOUT_MS)[0] < 1:
            raise BrokerUnavailableError(
                f"the server did not bring the commit to its disk within {DURABLE_TIMEOUT_MS // 1000} s"
            )
    elif durability is Durability.REPLICA and raw.execute_command("WAIT", 1, DURABLE_TIMEOUT_MS) < 1:
        raise BrokerUnavailableError(f"no replica confirmed the commit within {DURABLE_TIMEOUT_MS // 1000} s")


@dataclass(frozen=True)
class CommitRecord:
    """A committed file that may not have its final name yet."""

    id: str
    dataset: str
    file: PublishedFile

    @property
    def age_base_ms(self) -> int:
        """Server time of the commit, in ms since the epoch."""
        return int(self.id.partition("-")[0])


def unpublished(client: redis.Redis, keys: Keys, *, page: int = 1000) -> Iterator[CommitRecord]:
    """Commit records in the order of their commits. One that cannot be read is left where it is, and told of."""
    start = "-"
    while True:
        entries: Any = client.xrange(keys.commits, start, "+", count=page)
        for entry_id, fields in entries:
            try:
                yield CommitRecord(text(entry_id), text(fields[b"dataset"]), PublishedFile.decode(fields[b"file"]))
            except (CodecError, KeyError) as error:
                warn_once(log, f"commit record {text(entry_id)} in {keys.commits} cannot be read: {error!r}")
        if len(entries) < page:
            return
        start = f"({text(entries[-1][0])}"


def published(client: redis.Redis, keys: Keys, record: CommitRecord) -> bool:
    """Drop the commit record of a file that has its final name. False if another process did before."""
    reply = scripts.call(client, "published", [keys.commits, keys.run(record.file.run)], [record.id], allow_oom=True)
    return bool(reply)
