"""Reading what became of a run with a result stream: its status, a page of vectors and a page of failures at once.

A look is three commands, so that a reader that waits for many runs asks for all of them in one round trip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import redis
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.errors import UsageError
from embedq_schemas.run import RunCounters, RunStatus
from embedq_schemas.vector_batch import VectorBatch

from embedq_broker.keys import Keys
from embedq_broker.registry import COUNTERS, parse_letters
from embedq_broker.scripts import text

_FIELDS = ("status", "error", *COUNTERS)
_ID = r"0|\d+-\d+"
_CURSOR = re.compile(rf"({_ID})(?:/({_ID}))?")


@dataclass(frozen=True)
class Cursor:
    """A place in a run's results and failures; both streams keep their order for as long as they live."""

    results: str = "0"
    letters: str = "0"

    @classmethod
    def parse(cls, cursor: str) -> Self:
        """A cursor from its text, which may leave out the failures; raises UsageError."""
        match = _CURSOR.fullmatch(cursor)
        if match is None:
            raise UsageError(f"{cursor[:80]!r} is not a cursor that an earlier page had")
        return cls(match[1], match[2] or "0")

    def __str__(self) -> str:
        return f"{self.results}/{self.letters}"


@dataclass(frozen=True)
class Look:
    """A run at one moment, and what follows a cursor."""

    #: None: the registry does not know the run.
    status: RunStatus | None
    error: str | None
    counters: RunCounters
    #: (entry id, Arrow payload), at most as many as were asked for.
    results: Sequence[tuple[str, bytes]]
    #: (entry id, letter), at most as many as were asked for.
    letters: Sequence[tuple[str, DeadLetter]]
    #: More may follow in the streams already.
    full: bool = False

    @property
    def over(self) -> bool:
        """Nothing follows that is not in the streams already."""
        return self.status is None or self.status.terminal

    def batches(self) -> list[tuple[str, VectorBatch]]:
        """The results, decoded; raises CodecError."""
        return [(entry_id, VectorBatch.decode(payload)) for entry_id, payload in self.results]

    def cursor(self, before: Cursor) -> Cursor:
        """The place after this look's results and letters."""
        return Cursor(
            self.results[-1][0] if self.results else before.results,
            self.letters[-1][0] if self.letters else before.letters,
        )


def look_at(client: redis.Redis, keys: Keys, wanted: Sequence[tuple[str, Cursor | None]], *, count: int) -> list[Look]:
    """Look at (run, cursor) pairs, with at most `count` result entries and dead letters each; no cursor, none."""
    # Not a transaction: a full server refuses to queue even reads.
    pipe = client.pipeline(transaction=False)
    for run, cursor in wanted:
        # The status comes first: what is in the streams after a final one is all there will be.
        pipe.hmget(keys.run(run), _FIELDS)
        if cursor is not None:
            pipe.xrange(keys.results(run), _after(cursor.results), "+", count=count)
            pipe.xrange(keys.dead(run), _after(cursor.letters), "+", count=count)
    replies: Iterator[Any] = iter(pipe.execute())
    looks = []
    for _, cursor in wanted:
        values = next(replies)
        looks.append(_parse(values, (next(replies), next(replies)) if cursor is not None else ((), ()), count))
    return looks


def _after(entry_id: str) -> str:
    return "-" if entry_id == "0" else f"({entry_id}"


def _parse(values: list[bytes | None], pages: tuple[Any, Any], count: int) -> Look:
    results, letters = pages
    fields = dict(zip(_FIELDS, values, strict=True))
    status, error = fields["status"], fields["error"]
    return Look(
        status=None if status is None else RunStatus(text(status)),
        error=None if error is None else text(error),
        counters=RunCounters(**{name: int(fields[name] or 0) for name in COUNTERS}),
        results=[(text(entry_id), entry[b"payload"]) for entry_id, entry in results],
        letters=parse_letters(letters),
        full=max(len(results), len(letters)) >= count,
    )
