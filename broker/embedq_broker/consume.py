"""Consuming a stage: reading entries under a lease, keeping the lease, taking over what others left.

A lease is (consumer name, delivery count). Only the entry's current holder can commit it: the commit script compares
both. A consumer name belongs to one process for its lifetime.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis
from embedq_schemas.errors import CodecError, UnsupportedVersionError, UsageError
from embedq_schemas.names import LANES, SCHEMA_VERSION, Lane
from redis.exceptions import ResponseError

from embedq_broker import metrics, scripts
from embedq_broker.keys import Keys, check_run_id
from embedq_broker.scripts import Arg, text

MAX_ENTRY_DOCUMENTS = 1 << 16
"""Documents one entry may hold: if it turns out broken, each of them gets a dead letter in one commit."""

TRIES_TTL_MS = 7 * 86400 * 1000
"""How long tries are remembered after the last one."""
UNTRIED_DELIVERIES = 10
"""Times `max_deliveries` after which an entry counts as fatal although no try of it was ever seen to begin."""


class Stage(StrEnum):
    """A consumer group with the streams it reads. The value is the group's name."""

    TOKENIZE = "tokenizers"
    EMBED = "embedders"

    def stream(self, keys: Keys, lane: Lane) -> str:
        """The stream this stage reads in `lane`."""
        return keys.jobs(lane) if self is Stage.TOKENIZE else keys.batches(lane)


@dataclass(frozen=True)
class Share:
    """How many documents of an entry belong to one run."""

    run: str
    documents: int


@dataclass(frozen=True)
class Entry:
    """One stream entry under this consumer's lease."""

    stream: str
    lane: Lane
    id: str
    deliveries: int
    codec: str
    #: In the order of the documents. One share, except in token batches that mix runs.
    shares: tuple[Share, ...]
    payload: bytes
    #: Why the envelope itself cannot be used; None for a good one.
    fault: CodecError | None

    @property
    def documents(self) -> int:
        return sum(share.documents for share in self.shares)


def envelope(codec: str, shares: Sequence[Share]) -> list[str | int]:
    """Entry fields before `payload`, as a flat list."""
    runs = ",".join(share.run for share in shares)
    counts = ",".join(str(share.documents) for share in shares)
    return ["v", SCHEMA_VERSION, "codec", codec, "run", runs, "n", counts]


def parse_entry(stream: str, lane: Lane, entry_id: bytes, fields: dict[bytes, bytes], deliveries: int) -> Entry:
    """An entry from its raw fields. Never raises: a fault in the envelope is kept for whoever must settle it."""
    fault: CodecError | None = None
    shares: tuple[Share, ...] = ()
    version = text(fields.get(b"v", b""))
    try:
        runs = text(fields[b"run"]).split(",")
        counts = [int(count) for count in text(fields[b"n"]).split(",")]
        shares = tuple(Share(check_run_id(run), count) for run, count in zip(runs, counts, strict=True))
        if min(counts) < 1 or sum(counts) > MAX_ENTRY_DOCUMENTS:
            raise ValueError
        if b"payload" not in fields:
            raise CodecError("the entry has no payload")
        if version != str(SCHEMA_VERSION):
            raise UnsupportedVersionError(f"entry version {version[:20]!r}; this build knows {SCHEMA_VERSION}")
    except CodecError as error:
        fault = error
    except (KeyError, ValueError, UsageError):
        shares = ()
        fault = CodecError("the entry does not say which runs its documents belong to")
    codec, payload = text(fields.get(b"codec", b"")), fields.get(b"payload", b"")
    return Entry(stream, lane, text(entry_id), deliveries, codec, shares, payload, fault)


class Consumer:
    """One process's membership of a stage's group, and the record of what it holds.

    Safe to use from several threads; blocking reads need a client of their own.
    """

    def __init__(self, client: redis.Redis, keys: Keys, stage: Stage, name: str, *, lease_ms: int) -> None:
        self._client = client
        self.keys = keys
        self.stage = stage
        self.name = name
        self.lease_ms = lease_ms
        self._lanes = {stage.stream(keys, lane): lane for lane in LANES}
        self._cursors = dict.fromkeys(self._lanes, "-")
        self._held: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def ensure_groups(self) -> None:
        """Create missing groups, from the streams' beginning: nothing added before is skipped."""
        for stream in self._lanes:
            scripts.call(self._client, "ensure_group", [stream], [self.stage], allow_oom=True)

    def read(self, reader: redis.Redis, lanes: Sequence[Lane], *, count: int, block_ms: int | None) -> list[Entry]:
        """New entries of `lanes`, at most `count` from each; blocks up to `block_ms` (None: not at all).

        After any error of this call use `adopt`: its reply may have been lost with entries already delivered.
        """
        streams: dict[Any, Any] = {self.stage.stream(self.keys, lane): ">" for lane in lanes}
        try:
            reply = reader.xreadgroup(self.stage, self.name, streams, count=count, block=block_ms)
        except ResponseError as error:
            # Redis 7.0 tells a waiting reader that its stream is gone, in other words.
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            # Flushed, or deleted by hand. Whatever is still in the streams comes again from their beginning.
            self.ensure_groups()
            return []
        pairs: Iterable[Any] = reply or ()
        fresh = (
            parse_entry(text(stream), self._lanes[text(stream)], entry_id, fields, 1)
            for stream, entries in pairs
            for entry_id, fields in entries
            if fields is not None
        )
        # A server that lost its latest history may deliver again what is in hand: the lease is the one we have, and a
        # commit of both copies would count their documents twice.
        return [self._fresh(entry) for entry in fresh if not self._holds(entry)]

    def claim_expired(self, lane: Lane, *, count: int) -> list[Entry]:
        """Take over up to `count` entries of `lane` whose lease ran out, with their delivery counts raised."""
        stream = self.stage.stream(self.keys, lane)
        args: list[Arg] = [self.stage, self.name, self.lease_ms, self._cursors[stream], count, *self._held_of(stream)]
        reply = self._with_groups("claim", stream, args, empty=[b"-"])
        self._cursors[stream] = text(reply[0])
        return self._take(stream, lane, reply[1:])

    def adopt(self, lane: Lane, *, count: int) -> list[Entry]:
        """Entries this consumer owns on the server but never received."""
        stream = self.stage.stream(self.keys, lane)
        held = self._held_of(stream)
        reply = self._with_groups("adopt", stream, [self.stage, self.name, count, *held], empty=[])
        return self._take(stream, lane, reply)

    def rescue(self, lane: Lane, *, count: int) -> list[Entry]:
        """Lease entries that were delivered to a consumer somebody deleted; nobody else would ever see them again.

        It walks the stream, so it is for moments when nothing new is to be had although the stream is not empty.
        """
        stream = self.stage.stream(self.keys, lane)
        if undelivered(self._client, self.keys, self.stage, lane) <= 0:
            return []
        return self._take(stream, lane, self._with_groups("rescue", stream, [self.stage, self.name, count], empty=[]))

    def begin_try(self, entry: Entry) -> int:
        """Note that work on `entry` begins. Returns how many earlier tries never came back.

        A delivery alone proves nothing: whatever else a process held when it died is delivered again too.
        """
        args: list[Arg] = [self._name_of(entry), 1, TRIES_TTL_MS]
        return int(scripts.call(self._client, "try", [self.keys.tries], args, allow_oom=True))

    def end_try(self, entry: Entry) -> None:
        """Note that work on `entry` came back, whatever came of it."""
        scripts.call(self._client, "try", [self.keys.tries], [self._name_of(entry), 0, TRIES_TTL_MS], allow_oom=True)

    def _name_of(self, entry: Entry) -> str:
        return f"{self.keys.suffix(entry.stream)}/{entry.id}"

    def renew(self) -> list[tuple[str, str]]:
        """Extend every held lease. Returns (stream, id) of those that another consumer took over, each once."""
        held = self._snapshot()
        lost = self._set_idle(list(held), 0)
        self._forget({item: held[item] for item in lost})
        return lost

    def release(self, entries: Iterable[Entry]) -> None:
        """Give entries back at once: the next sweep of any consumer takes them."""
        entries = list(entries)
        self._set_idle([(entry.stream, entry.id) for entry in entries], self.lease_ms * 10)
        self.forget(entries)

    def release_all(self) -> None:
        """Give back everything held."""
        held = self._snapshot()
        self._set_idle(list(held), self.lease_ms * 10)
        self._forget(held)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Stop renewing entries: they were committed, released, or lost."""
        self._forget({(entry.stream, entry.id): entry.deliveries for entry in entries})

    def _forget(self, leases: Mapping[tuple[str, str], int]) -> None:
        # A consumer may take its own entry over again once its lease ran out: that later lease is another one.
        with self._lock:
            for item, deliveries in leases.items():
                if self._held.get(item) == deliveries:
                    del self._held[item]

    def held(self) -> int:
        """Entries under lease."""
        with self._lock:
            return len(self._held)

    def _held_of(self, stream: str) -> list[str]:
        with self._lock:
            return [entry_id for key, entry_id in self._held if key == stream]

    def _snapshot(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._held)

    def _hold(self, entry: Entry) -> Entry:
        with self._lock:
            self._held[entry.stream, entry.id] = entry.deliveries
        return entry

    def _holds(self, entry: Entry) -> bool:
        with self._lock:
            return self._held.get((entry.stream, entry.id)) == entry.deliveries

    def _fresh(self, entry: Entry) -> Entry:
        metrics.waited(self.stage, entry.lane, entry.id)
        return self._hold(entry)

    def _take(self, stream: str, lane: Lane, rows: Iterable[Any]) -> list[Entry]:
        taken = []
        for entry_id, flat, deliveries in rows:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            taken.append(self._hold(parse_entry(stream, lane, entry_id, fields, int(deliveries))))
        if taken:
            metrics.redelivered.labels(self.stage).inc(len(taken))
        return taken

    def _set_idle(self, items: Sequence[tuple[str, str]], idle_ms: int) -> list[tuple[str, str]]:
        lost = []
        for stream in self._lanes:
            ids = [entry_id for key, entry_id in items if key == stream]
            for start in range(0, len(ids), 1000):
                args: list[Arg] = [self.stage, self.name, idle_ms, *ids[start : start + 1000]]
                gone = self._with_groups("renew", stream, args, empty=ids[start : start + 1000])
                lost += [(stream, text(entry_id)) for entry_id in gone]
        return lost

    def _with_groups(self, script: str, stream: str, args: list[Arg], *, empty: list[Any]) -> list[Any]:
        try:
            reply: list[Any] = scripts.call(self._client, script, [stream], args, allow_oom=True)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self.ensure_groups()
            return empty
        return reply


def is_fatal(entry: Entry, tries: int, max_deliveries: int) -> bool:
    """Whether `entry` ended the processes that tried it, `tries` times without coming back after its first delivery."""
    return tries >= max(1, max_deliveries - 1) or entry.deliveries > UNTRIED_DELIVERIES * max_deliveries


def undelivered(client: redis.Redis, keys: Keys, stage: Stage, *lanes: Lane) -> int:
    """Entries no consumer of the stage holds. (`lag` would tell, but is null once an entry was deleted.)"""
    return sum(load.undelivered for load in lane_loads(client, keys, stage, lanes).values())


@dataclass(frozen=True)
class LaneLoad:
    """Entries of one stage in one lane."""

    undelivered: int
    #: Under lease, by consumer.
    held: Mapping[str, int]


def lane_loads(client: redis.Redis, keys: Keys, stage: Stage, lanes: Sequence[Lane]) -> dict[Lane, LaneLoad]:
    """What each lane of a stage holds, in one round trip."""
    # Not a transaction: a full server refuses to queue even reads.
    pipe = client.pipeline(transaction=False)
    for lane in lanes:
        pipe.xlen(stage.stream(keys, lane))
        pipe.xpending(stage.stream(keys, lane), stage)
    replies: list[Any] = pipe.execute(raise_on_error=False)
    found = {}
    for lane, length, pending in zip(lanes, replies[::2], replies[1::2], strict=True):
        if isinstance(pending, ResponseError) and "NOGROUP" in str(pending):
            pending = {"pending": 0, "consumers": []}
        for reply in (length, pending):
            if isinstance(reply, Exception):
                raise reply
        held = {text(consumer["name"]): int(consumer["pending"]) for consumer in pending["consumers"]}
        found[lane] = LaneLoad(max(0, int(length) - int(pending["pending"])), held)
    return found


def release_consumer(client: redis.Redis, keys: Keys, stage: Stage, name: str, *, lease_ms: int) -> int:
    """Release all leases of a consumer whose process is known to be dead. Returns how many there were."""
    released = 0
    for lane in LANES:
        args: list[Arg] = [stage, name, lease_ms * 10]
        try:
            released += scripts.call(client, "release_consumer", [stage.stream(keys, lane)], args, allow_oom=True)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
    return released
