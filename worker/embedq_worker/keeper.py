"""Keeping leases alive while work moves, and letting them go when it does not.

A process renews its leases only while its progress counter moves: a hung device or a deadlocked thread stops moving
it, the leases run out, and another worker takes over. A process stuck for several leases ends itself, so that its
supervisor can start a fresh one.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis
from embedq_broker.consume import Consumer
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys
from embedq_broker.liveness import Heartbeat, beat, bury
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

EXIT_STUCK = 70
"""Exit status of a process that ended itself because nothing moved."""
_STUCK_LEASES = 4


@dataclass
class Progress:
    """What a process's threads say of themselves; read by its keeper."""

    state: str = "starting"
    since: float = field(default_factory=time.monotonic)
    ticks: int = 0
    documents: int = 0
    tokens: int = 0
    #: What keeps finished work from being written, why, and since when.
    held: tuple[str, str, float] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def enter(self, state: str) -> None:
        """Change state, and count it as progress."""
        if state != self.state:
            self.since = time.monotonic()
        self.state = state
        self.ticks += 1

    def hold(self, state: str, reason: str) -> None:
        """Show `state` with its reason until `let_go`, whatever else this process does; counts as progress."""
        self.held = (state, reason, self.held[2] if self.held else time.monotonic())
        self.ticks += 1

    def let_go(self) -> None:
        """What was held is written, or given up."""
        self.held = None

    def shown(self) -> tuple[str, str, float]:
        """State, its reason if it has one, and since when."""
        return self.held or (self.state, "", self.since)

    def done(self, documents: int, tokens: int) -> None:
        """Count committed work."""
        # Two writers may be done at once. All else is plain assignment, or may miss a tick.
        with self._lock:
            self.documents += documents
            self.tokens += tokens
        self.ticks += 1


class Keeper:
    """A thread that renews a consumer's leases and publishes its heartbeat, every quarter of a lease."""

    def __init__(
        self,
        client: redis.Redis,
        consumer: Consumer,
        role: str,
        progress: Progress,
        *,
        steps: Callable[[], int] = lambda: 0,
        max_batch_tokens: int = 0,
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._keys: Keys = consumer.keys
        self._role = role
        self._progress = progress
        self._steps = steps
        self._max_batch_tokens = max_batch_tokens
        self._started_at = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="keeper", daemon=True)

    def start(self) -> None:
        """Publish the first heartbeat, then go on in the background."""
        self._beat("starting")
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        lease_s = self._consumer.lease_ms / 1000
        seen: tuple[int, int] | None = None
        moved = time.monotonic()
        renewed = 0.0
        while not self._stop.wait(min(lease_s / 4, 1.0)):
            now = time.monotonic()
            position = (self._progress.ticks, self._steps())
            if position != seen:
                seen, moved = position, now
            stuck_s = now - moved
            try:
                fault_point("keep.renew")
                if stuck_s < lease_s and now - renewed >= min(lease_s / 4, 5.0):
                    renewed = now
                    for stream, entry_id in self._consumer.renew():
                        log.warning("lease of %s in %s was taken over by another worker", entry_id, stream)
                self._beat("stuck" if stuck_s >= lease_s else None)
            except RedisError as error:
                log.warning("cannot renew leases: %s", error)
                # Whoever waits for the server is not stuck: the clock starts when it answers again.
                moved = time.monotonic()
                continue
            if stuck_s > _STUCK_LEASES * lease_s:
                log.error(
                    "nothing has moved for %.0f s in state %r; ending this process", stuck_s, self._progress.state
                )
                logging.shutdown()
                # A hung device call cannot be interrupted from Python; only the process's end frees it.
                os._exit(EXIT_STUCK)

    def _beat(self, state: str | None) -> None:
        progress = self._progress
        shown, reason, since = progress.shown()
        beat(
            self._client,
            self._keys,
            Heartbeat(
                consumer=self._consumer.name,
                role=self._role,
                host=socket.gethostname(),
                pid=os.getpid(),
                started_at=self._started_at,
                at=time.time(),
                state=state or shown,
                state_s=time.monotonic() - since,
                held=self._consumer.held(),
                documents=progress.documents,
                tokens=progress.tokens,
                max_batch_tokens=self._max_batch_tokens,
                detail=reason,
            ),
        )


def leave(client: redis.Redis, consumer: Consumer) -> None:
    """Give back what is still held and take the name off the board."""
    try:
        consumer.release_all()
        bury(client, consumer.keys, consumer.name)
    except RedisError as error:
        log.warning("cannot release leases, they run out by themselves: %s", error)
