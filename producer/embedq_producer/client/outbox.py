"""Sending what many callers want embedded: whatever waits at a moment goes out in one round trip."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from embedq_broker.connect import translate
from embedq_broker.registry import Registry
from embedq_schemas.errors import EmbedqError, UsageError
from redis.exceptions import RedisError

from embedq_producer.client.submission import Submission
from embedq_producer.client.watch import Waiter, Watcher

log = logging.getLogger(__name__)

_LINGER_S = 10.0
_AT_ONCE = 256
"""Most runs in one round trip: the server serves others in between."""


@dataclass(eq=False)
class _Item:
    submission: Submission
    waiter: Waiter
    due: float = 0.0


class Outbox:
    """The sending thread of one client. It starts with the first item and ends when it has been idle for a while."""

    def __init__(self, registry: Registry, watcher: Watcher, url: str) -> None:
        self._registry = registry
        self._watcher = watcher
        self._url = url
        self._items: queue.SimpleQueue[_Item | str | None] = queue.SimpleQueue()
        self._given_up: list[str] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, submission: Submission, waiter: Waiter) -> None:
        """Send `submission` soon; what goes wrong is the outcome of `waiter`, as is what becomes of the run.

        Once the waiter's future is cancelled nothing more of it is sent.
        """
        self._put(_Item(submission, waiter))

    def cancel(self, run: str) -> None:
        """Cancel a run soon, after what was put before. Where the server cannot be reached, the log says so."""
        self._put(run)

    def _put(self, item: _Item | str) -> None:
        with self._lock:
            if self._closed:
                raise UsageError("the client is closed")
            self._items.put(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="embedq-client-send", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread. What it has not sent ends with UsageError."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._items.put(None)
        if thread is not None:
            thread.join(timeout=20)

    def _run(self) -> None:
        waiting: list[_Item] = []
        try:
            self._serve(waiting)
        except Exception as error:
            # Whoever waits must hear of it, whatever it is.
            log.exception("the thread that sends ended")
            with self._lock:
                self._thread = None
            for item in waiting:
                self._fail(item, error)

    def _serve(self, waiting: list[_Item]) -> None:
        used = time.monotonic()
        while True:
            waiting += self._take(waiting)
            now = time.monotonic()
            used = now if waiting or self._given_up else used
            with self._lock:
                if self._closed:
                    break
                if now - used > _LINGER_S and self._items.empty():
                    self._thread = None
                    return
            ready = [item for item in waiting if item.due <= now][:_AT_ONCE]
            sent = set(ready)
            again = self._attempt(ready)
            waiting[:] = [item for item in waiting if item not in sent] + again
            self._cancel()
        for item in waiting:
            self._fail(item, UsageError("the client was closed"))
        self._cancel()

    def _take(self, waiting: list[_Item]) -> list[_Item]:
        """New items; waits for one, or until one of those that wait is due."""
        timeout = max(0.0, min(item.due for item in waiting) - time.monotonic()) if waiting else _LINGER_S
        taken: list[_Item] = []
        with suppress(queue.Empty):
            item = self._items.get(timeout=timeout) if timeout else self._items.get_nowait()
            while True:
                if isinstance(item, str):
                    self._given_up.append(item)
                elif item is not None:
                    taken.append(item)
                item = self._items.get_nowait()
        return taken

    def _attempt(self, items: list[_Item]) -> list[_Item]:
        """Send the next job of each item; returns those that have more to send, or must wait."""
        live = [item for item in items if not item.waiter.future.done()]
        whole: list[_Item] = []
        stepwise: list[_Item] = []
        for item in live:
            try:
                (whole if item.submission.whole else stepwise).append(item)
            except Exception as error:
                self._fail(item, error)
        again: list[_Item] = []
        if whole:
            try:
                # Watched before they are sent: then nothing that becomes of them is missed.
                self._watcher.add([item.waiter for item in whole])
                outcomes = self._registry.submit([item.submission.request() for item in whole])
            except Exception as error:
                for item in whole:
                    self._fail(item, error)
            else:
                for item, outcome in zip(whole, outcomes, strict=True):
                    self._settle(item, lambda item, outcome=outcome: item.submission.take(outcome), again)  # type: ignore[misc]
        for item in stepwise:
            self._settle(item, self._step, again)
        return again

    def _step(self, item: _Item) -> float | None:
        self._watcher.add([item.waiter])
        return item.submission.step()

    def _cancel(self) -> None:
        runs, self._given_up = self._given_up, []
        if not runs:
            return
        try:
            self._registry.cancel_many(runs)
        except (RedisError, EmbedqError) as error:
            log.warning("cannot cancel what nobody waits for (runs: %d): %s", len(runs), error)

    def _settle(self, item: _Item, send: Callable[[_Item], float | None], again: list[_Item]) -> None:
        try:
            wait_s = send(item)
        except Exception as error:
            self._fail(item, error)
            return
        if wait_s is not None:
            item.due = time.monotonic() + wait_s
            again.append(item)
            return
        item.waiter.sent = True

    def _fail(self, item: _Item, error: Exception) -> None:
        item.waiter.fail(translate(error, self._url) if isinstance(error, RedisError) else error)
        self._watcher.drop(item.waiter)
