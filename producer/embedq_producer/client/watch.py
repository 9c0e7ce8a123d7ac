"""Waiting for many runs with one connection.

The queue's event stream names the runs that changed. One thread reads it, looks at those that somebody waits for, all
in one round trip, and wakes their waiters. Events are hints: every few seconds, and after a lost connection, it looks
at every run that is waited for, so a missed event costs a delay and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import redis
from embedq_broker import scripts
from embedq_broker.connect import translate
from embedq_broker.keys import Keys
from embedq_broker.outcome import Cursor, Look, look_at
from embedq_broker.registry import Registry, forget_call
from embedq_broker.scripts import text
from embedq_schemas.errors import UsageError
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

_BLOCK_MS = 1000
_SWEEP_S = 5.0
_LINGER_S = 10.0
"""How long the thread goes on reading after nobody waits any more."""
_GIVE_UP_S = 60.0
"""How long a server may be unreachable before waiting for it ends with an error."""
_PAGE_ENTRIES = 16
_LOOKS_AT_ONCE = 256


class Waiter:
    """One wait for news of a run behind a cursor; `future` gets the look that has them."""

    def __init__(self, run: str, cursor: Cursor | None, *, owned: bool = False) -> None:
        self.run = run
        #: Nobody else knows the run: it is of no use once this wait is given up.
        self.owned = owned
        #: None: only the run's end is news.
        self.cursor = cursor
        #: The run is on the server, or should be: if it is not known there, that is news.
        self.sent = not owned
        self.future: Future[Look] = Future()

    def offer(self, look: Look) -> bool:
        """Take `look` if it has news."""
        if not (look.over or look.results or look.letters):
            return False
        # Two threads may look at once; both see the same, and either will do.
        with suppress(InvalidStateError):
            self.future.set_result(look)
        return True

    def fail(self, error: BaseException) -> None:
        """End the wait with `error`, unless it is over."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Watcher:
    """The waiters of one client, and the thread that serves them."""

    def __init__(self, client: redis.Redis, connect_reader: Callable[[], redis.Redis], keys: Keys, url: str) -> None:
        self._client = client
        self._connect_reader = connect_reader
        self._keys = keys
        self._url = url
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._waiters: dict[str, list[Waiter]] = {}
        self._done: list[str] = []
        self._cursor = "0-0"
        self._reader: redis.Redis | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, waiters: Iterable[Waiter]) -> None:
        """Begin waits. What changes from now on is seen; for what is there already, `look`."""
        with self._starting:
            # Asked before the waits begin, and not under the lock that ending a wait takes: the server may hang.
            cursor = self._last_event() if self._thread is None else None
            with self._lock:
                if self._closed:
                    raise UsageError("the client is closed")
                if self._thread is None:
                    # One that ended since knows how far it had read.
                    self._cursor = cursor or self._cursor
                    self._thread = threading.Thread(target=self._run, name="embedq-client-watch", daemon=True)
                    self._thread.start()
                for waiter in waiters:
                    mine = self._waiters.setdefault(waiter.run, [])
                    if waiter not in mine:
                        mine.append(waiter)

    def look(self, waiter: Waiter) -> None:
        """Begin a wait, and look now, in the calling thread, at what is there already."""
        self.add([waiter])
        self._look([waiter])

    def drop(self, waiter: Waiter) -> None:
        """End a wait; its future is cancelled if it has no outcome yet."""
        waiter.future.cancel()
        with self._lock:
            mine = self._waiters.get(waiter.run, [])
            if waiter in mine:
                mine.remove(waiter)
            if not mine:
                self._waiters.pop(waiter.run, None)

    def forget(self, run: str) -> None:
        """Have a run that is over dropped from the server soon."""
        with self._lock:
            self._done.append(run)

    def close(self) -> None:
        """End the thread. Waits that are still on get a UsageError, and runs that only they know are cancelled."""
        with self._lock:
            self._closed = True
            thread, reader = self._thread, self._reader
            lost = [waiter.run for each in self._waiters.values() for waiter in each if waiter.owned]
        if reader is not None:
            # A blocked read ends with its socket.
            reader.connection_pool.disconnect()
        if thread is not None:
            thread.join(timeout=5)
        self._fail(UsageError("the client was closed"))
        with suppress(RedisError):
            self._forget_done()
            Registry(self._client, self._keys).cancel_many(lost)

    def _last_event(self) -> str:
        entries: Any = self._client.xrevrange(self._keys.events, count=1)
        return text(entries[0][0]) if entries else "0-0"

    def _run(self) -> None:
        with self._lock:
            reader = self._reader = self._connect_reader()
        try:
            self._serve(reader)
        except BaseException as error:
            # Whoever waits must hear of it, whatever it is.
            log.exception("the thread that waits for results ended")
            with self._lock:
                self._thread = None
            self._fail(error)
        finally:
            reader.close()

    def _serve(self, reader: redis.Redis) -> None:
        swept = waited = time.monotonic()
        lost_at: float | None = None
        while True:
            now = time.monotonic()
            with self._lock:
                if self._waiters:
                    waited = now
                if self._closed or now - waited > _LINGER_S:
                    self._thread = None
                    return
            try:
                changed = self._read(reader)
                if lost_at is not None or now - swept > _SWEEP_S:
                    swept = now
                    self._look(self._waiting(None))
                elif changed:
                    self._look(self._waiting(changed))
                self._forget_done()
                lost_at = None
            except RedisError as error:
                if self._closed:
                    continue
                if lost_at is None:
                    lost_at = now
                    log.warning("lost the connection while waiting for results: %s", error)
                failure = translate(error, self._url)
                if now - lost_at > _GIVE_UP_S:
                    self._fail(failure)
                time.sleep(0.1)

    def _read(self, reader: redis.Redis) -> set[str]:
        """Runs that changed; empty after a while without any."""
        reply: Any = reader.xread({self._keys.events: self._cursor}, count=1000, block=_BLOCK_MS)
        changed: set[str] = set()
        for _, entries in reply or ():
            for entry_id, fields in entries:
                self._cursor = text(entry_id)
                changed.update(text(fields.get(b"runs", b"")).split(","))
        return changed

    def _waiting(self, runs: Iterable[str] | None) -> list[Waiter]:
        with self._lock:
            if runs is None:
                # One that is still being sent may not be on the server yet.
                return [waiter for each in self._waiters.values() for waiter in each if waiter.sent]
            return [waiter for name in runs for waiter in self._waiters.get(name, ())]

    def _look(self, waiters: list[Waiter]) -> None:
        for start in range(0, len(waiters), _LOOKS_AT_ONCE):
            part = waiters[start : start + _LOOKS_AT_ONCE]
            looks = look_at(self._client, self._keys, [(w.run, w.cursor) for w in part], count=_PAGE_ENTRIES)
            for waiter, look in zip(part, looks, strict=True):
                if waiter.offer(look):
                    self.drop(waiter)

    def _forget_done(self) -> None:
        with self._lock:
            runs, self._done = self._done, []
        if runs:
            scripts.call_many(self._client, [forget_call(self._keys, run) for run in runs], allow_oom=True)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            waiters = [waiter for each in self._waiters.values() for waiter in each]
            self._waiters.clear()
        for waiter in waiters:
            waiter.fail(error)
