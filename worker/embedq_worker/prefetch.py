"""Prefetching: token batches are read, decoded and validated while the device computes."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import redis
from embedq_broker.connect import translate
from embedq_broker.consume import Consumer, Entry
from embedq_broker.faults import fault_point
from embedq_schemas.errors import CodecError
from embedq_schemas.names import LANES, Lane
from embedq_schemas.token_batch import TokenBatch
from redis.exceptions import RedisError

from embedq_worker.hold import passes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """A token batch under lease, or the reason why its entry is not one."""

    entry: Entry
    batch: TokenBatch | None
    fault: CodecError | None


class Prefetcher:
    """One reading thread per lane, each with a bounded number of batches ahead.

    The lanes do not share a thread: a blocking read of one would keep the other waiting.
    """

    def __init__(
        self,
        consumer: Consumer,
        connect_reader: Callable[[], redis.Redis],
        *,
        depth: int,
        decode: Callable[[bytes], TokenBatch],
        block_ms: int = 1000,
    ) -> None:
        self._consumer = consumer
        self._connect_reader = connect_reader
        self._depth = depth
        self._decode = decode
        self._block_ms = block_ms
        self._ready: dict[Lane, deque[Fetched]] = {lane: deque() for lane in LANES}
        self._change = threading.Condition()
        #: The taker waits, or went away empty-handed: nothing is being computed, and nothing is ready.
        self.starved = True
        self._stopping = False
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"prefetch-{lane}", daemon=True) for lane in LANES
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def take(self, timeout_s: float) -> Fetched | None:
        """The next batch, interactive ones first; None when none came in time."""
        with self._change:
            self.starved = not any(self._ready.values())
            self._change.wait_for(lambda: any(self._ready.values()) or self._failure is not None, timeout_s)
            self.starved = not any(self._ready.values())
            if self._failure is not None:
                raise self._failure
            for lane in LANES:
                if self._ready[lane]:
                    fetched = self._ready[lane].popleft()
                    self._change.notify_all()
                    return fetched
        return None

    def stop(self) -> None:
        """End the threads and give back what was read but not taken."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join(timeout=self._block_ms / 1000 + 5)
        leftover = [fetched.entry for lane in LANES for fetched in self._ready[lane]]
        self._consumer.release(leftover)

    def _run(self, lane: Lane) -> None:
        try:
            self._read_lane(lane)
        except BaseException as error:  # the taking thread must hear of it, whatever it is
            with self._change:
                self._failure = error
                self._change.notify_all()

    def _read_lane(self, lane: Lane) -> None:
        reader = self._connect_reader()
        lease_s = self._consumer.lease_ms / 1000
        next_sweep = 0.0
        adopt = starved = False
        failures = 0
        while True:
            # One batch of requests ahead: what waits in the stream instead tells the tokenizers to let requests gather.
            depth = self._depth if lane is Lane.BULK else 1
            with self._change:
                ready = self._ready[lane]
                # Several batches a round trip: a read for each one taken would cost a fast engine more than decoding.
                low = depth // 2
                self._change.wait_for(lambda ready=ready, low=low: self._stopping or len(ready) <= low)  # type: ignore[misc]
                if self._stopping:
                    return
                room = depth - len(ready)
            try:
                if adopt:
                    self._put(lane, self._consumer.adopt(lane, count=room))
                    adopt = False
                    continue
                if time.monotonic() >= next_sweep:
                    # Jittered, so that many workers do not sweep at once.
                    next_sweep = time.monotonic() + lease_s / 4 * random.uniform(0.75, 1.25)  # noqa: S311
                    if claimed := self._consumer.claim_expired(lane, count=room):
                        log.info(
                            "took over %d token batches that another worker released, or let run out", len(claimed)
                        )
                        next_sweep = 0.0
                        self._put(lane, claimed)
                        continue
                    if starved and (rescued := self._consumer.rescue(lane, count=room)):
                        log.warning("took over %d token batches whose consumer was deleted", len(rescued))
                        self._put(lane, rescued)
                        continue
                wait_ms = max(1, min(self._block_ms, round((next_sweep - time.monotonic()) * 1000)))
                fresh = self._consumer.read(reader, [lane], count=room, block_ms=wait_ms)
                starved = not fresh
                self._put(lane, fresh)
                failures = 0
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                # The reply may have been lost with entries already ours: ask for those first.
                adopt = True
                failures += 1
                if failures == 1:
                    log.warning("lost the connection while reading: %s", error)
                time.sleep(min(0.05 * 2 ** min(failures, 5), 1.0))
            except RedisError as error:
                failures += 1
                if failures > 20 and not passes(translate(error)):
                    raise
                log.warning("cannot read token batches: %s", error)
                time.sleep(min(0.05 * 2 ** min(failures, 5), 1.0))

    def _put(self, lane: Lane, entries: list[Entry]) -> None:
        if entries:
            fault_point("embed.read")
        fetched = []
        for entry in entries:
            batch, fault = None, entry.fault
            if fault is None:
                try:
                    batch = self._decode(entry.payload)
                    if batch.num_documents != entry.documents:
                        raise CodecError(
                            f"the batch holds {batch.num_documents} documents, its entry says {entry.documents}"
                        )
                except CodecError as error:
                    batch, fault = None, error
            fetched.append(Fetched(entry, batch, fault))
        if fetched:
            with self._change:
                self._ready[lane].extend(fetched)
                self._change.notify_all()
