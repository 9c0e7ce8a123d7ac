"""How much work waits in a queue, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from embedq_schemas.names import LANES, Lane

from embedq_broker import scripts
from embedq_broker.consume import Stage
from embedq_broker.keys import Keys


@dataclass(frozen=True)
class Depth:
    """One stage's stream of one lane at one moment."""

    stage: Stage
    lane: Lane
    #: Entries that no consumer has taken.
    waiting: int
    #: Entries under lease: taken, not committed.
    leased: int
    #: Age of the oldest entry in seconds by the server's clock, leased ones included; 0 for an empty stream.
    oldest_s: float


def depths(client: redis.Redis, keys: Keys) -> list[Depth]:
    """All stages and lanes, in one call whose cost does not depend on how much waits."""
    streams = [(stage, lane) for stage in Stage for lane in LANES]
    names = [stage.stream(keys, lane) for stage, lane in streams]
    now, *flat = map(int, scripts.call(client, "depths", names, [stage for stage, _ in streams], allow_oom=True))
    rows = zip(streams, flat[::3], flat[1::3], flat[2::3], strict=True)
    return [
        Depth(stage, lane, max(0, entries - leased), leased, max(0, now - oldest) / 1000 if oldest >= 0 else 0.0)
        for (stage, lane), entries, leased, oldest in rows
    ]
