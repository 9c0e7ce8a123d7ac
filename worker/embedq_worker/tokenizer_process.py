"""The tokenizer process: reads windows of jobs and commits them as token batches."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Set

import redis
from embedq_broker.commit import Commit, Committed
from embedq_broker.connect import connect, translate
from embedq_broker.consume import Consumer, Entry, Stage, lane_loads
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys
from embedq_broker.liveness import bind_model, wanted_batch_tokens
from embedq_broker.registry import Registry
from embedq_schemas.names import LANES, Lane
from redis.exceptions import RedisError

from embedq_worker.embedder_process import model_facts
from embedq_worker.hold import passes, until_accepted
from embedq_worker.keeper import Keeper, Progress, leave
from embedq_worker.runs import RunCache
from embedq_worker.settings import ProcessConfig
from embedq_worker.tokenization import TextTokenizer
from embedq_worker.tokenizer_stage import DEFAULT_BATCH_TOKENS, TokenizerStage

log = logging.getLogger(__name__)

_BLOCK_MS = 1000
_WAIT_FOR_EMBEDDER_S = 60.0
_INTERACTIVE_JOBS = 64
_BULK_WINDOW_S = 0.1
"""What a window of several bulk jobs may take, as the last one tells: interactive jobs wait for it."""
_GATHER_SHARE = 0.05
_MOST_GATHER_S = 0.05
"""How long requests may gather once a batch of them is wanted: a share of the time that none was, at most this."""


def run_tokenizer(config: ProcessConfig, stop: threading.Event, ready: Callable[[], None]) -> None:
    """Tokenize until `stop` is set; a window under way is finished first. Arguments as for `run_embedder`."""
    settings, url = config.worker, config.broker.redis_url
    checkpoint = settings.load_checkpoint()
    keys = Keys(config.broker.queue)
    client = connect(url, role="tokenizer")
    bind_model(client, keys, checkpoint.fingerprint, model_facts(checkpoint))
    tokenizer = TextTokenizer.load(
        checkpoint.tokenizer_file, max_length=checkpoint.max_length, backend=settings.tokenizer_backend, threads=1
    )
    for note in tokenizer.notes:
        log.warning("%s", note)
    consumer = Consumer(client, keys, Stage.TOKENIZE, config.consumer, lease_ms=config.broker.lease_ms)
    consumer.ensure_groups()
    progress = Progress()
    runs = RunCache(Registry(client, keys), url=url, give_up=stop.is_set)
    stage = TokenizerStage(
        consumer,
        tokenizer,
        runs,
        config.broker,
        max_length=checkpoint.max_length,
        vocab_size=checkpoint.vocab_size,
        share_prefixes=checkpoint.shares_prefixes and config.engine.kind in ("auto", "native"),
    )
    keeper = Keeper(connect(url, role="keeper"), consumer, config.role, progress)
    keeper.start()
    log.info("tokenizer ready: %s", tokenizer.backend)
    ready()
    try:
        _Loop(config, client, consumer, stage, progress, stop).run()
    finally:
        keeper.stop()
        leave(client, consumer)


class _Loop:
    """Reading and settling windows, with backpressure from the embedders."""

    def __init__(
        self,
        config: ProcessConfig,
        client: redis.Redis,
        consumer: Consumer,
        stage: TokenizerStage,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._client = client
        self._reader = connect(config.broker.redis_url, role="tokenizer-read", blocking=True)
        self._consumer = consumer
        self._stage = stage
        self._progress = progress
        self._stop = stop
        self._started = time.monotonic()
        self._next_sweep = 0.0
        self._adopt = False
        self._budget: int | None = None
        self._embedders: Set[str] = frozenset()
        self._full_since: float | None = None
        self._gather_until = 0.0
        self._budget_at = 0.0
        self._ahead = False
        self._starved = False
        self._most_jobs = config.worker.window_jobs

    def run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            self._progress.enter("idle")
            try:
                entries = self._next()
                failures = 0
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                # The reply may have been lost with jobs already ours: ask for those first.
                self._adopt = True
                failures += 1
                if failures == 1:
                    log.warning("lost the connection while reading: %s", error)
                self._stop.wait(min(0.05 * 2 ** min(failures, 5), 1.0))
                continue
            except RedisError as error:
                # A server that cannot write refuses to deliver, too.
                if not passes(translate(error)):
                    raise
                failures += 1
                if failures == 1:
                    log.warning("cannot read jobs: %s", error)
                self._stop.wait(min(0.05 * 2 ** min(failures, 5), 1.0))
                continue
            if entries:
                fault_point("tokenize.read")
            for lane in LANES:
                if mine := [entry for entry in entries if entry.lane is lane]:
                    self._settle(mine, lane)

    def _settle(self, entries: list[Entry], lane: Lane) -> None:
        self._progress.enter("working")
        budget = self._budget or DEFAULT_BATCH_TOKENS
        began = time.monotonic()
        documents, tokens = self._stage.settle(self._send, entries, lane, budget)
        if lane is Lane.BULK:
            per_job_s = (time.monotonic() - began) / len(entries)
            self._most_jobs = max(1, int(_BULK_WINDOW_S / max(per_job_s, 1e-6)))
        self._progress.done(documents, tokens)

    def _send(self, commit: Commit) -> Committed:
        def attempt() -> Committed:
            self._progress.ticks += 1  # waiting for the server is not a hang
            return commit.send(self._client)

        return until_accepted(attempt, url=self._config.broker.redis_url, give_up=self._stop.is_set)

    def _next(self) -> list[Entry]:
        """The next window's jobs, or none after a while."""
        if self._adopt:
            adopted = [entry for lane in LANES for entry in self._consumer.adopt(lane, count=self._window())]
            self._adopt = False
            if adopted:
                return adopted
        if not self._embedders_known():
            self._stop.wait(0.1)
            return []
        lanes = self._lanes_with_room()
        if not lanes:
            # The embedders are busy for a while; a batch takes longer than this.
            self._stop.wait(0.005)
            return []
        if time.monotonic() >= self._next_sweep:
            # Jittered, so that many workers do not sweep at once.
            self._next_sweep = time.monotonic() + self._config.broker.lease_s / 4 * random.uniform(0.75, 1.25)  # noqa: S311
            claimed = [entry for lane in lanes for entry in self._consumer.claim_expired(lane, count=self._window())]
            if claimed:
                log.info("took over %d jobs that another worker released, or let run out", len(claimed))
                self._next_sweep = 0.0
                return claimed
            if self._starved:
                rescued = [entry for lane in lanes for entry in self._consumer.rescue(lane, count=self._window())]
                if rescued:
                    log.warning("took over %d jobs whose consumer was deleted", len(rescued))
                    return rescued
        entries = self._read(lanes)
        self._starved = not entries
        return entries

    def _read(self, lanes: list[Lane]) -> list[Entry]:
        if lanes[0] is Lane.INTERACTIVE:
            self._stop.wait(max(0.0, self._gather_until - time.monotonic()))
            # All that wait, so that many small requests share a batch.
            found = self._consumer.read(self._reader, [Lane.INTERACTIVE], count=_INTERACTIVE_JOBS, block_ms=None)
            if found:
                return found
        if Lane.BULK in lanes:
            found = self._consumer.read(self._reader, [Lane.BULK], count=self._window(), block_ms=None)
            if found:
                return found
        if Lane.INTERACTIVE not in lanes:
            # Requests wait for their turn, which may come at any moment.
            self._stop.wait(0.002)
            return []
        sweep_ms = round((self._next_sweep - time.monotonic()) * 1000)
        found = self._consumer.read(self._reader, lanes, count=1, block_ms=max(1, min(_BLOCK_MS, sweep_ms)))
        if any(entry.lane is Lane.INTERACTIVE for entry in found):
            # The first of several requests ended the wait; the others came with it, or while this process woke up.
            try:
                found += self._consumer.read(
                    self._reader, [Lane.INTERACTIVE], count=_INTERACTIVE_JOBS - 1, block_ms=None
                )
            except RedisError as error:
                # What was read is settled first; the reply that was lost is asked for afterwards.
                log.warning("lost the connection while reading: %s", error)
                self._adopt = True
        return found

    def _window(self) -> int:
        """Jobs to take at once: one while embedders wait for work, several while they have some."""
        return min(self._config.worker.window_jobs, self._most_jobs) if self._ahead else 1

    def _lanes_with_room(self) -> list[Lane]:
        loads = lane_loads(self._client, self._consumer.keys, Stage.EMBED, LANES)
        bulk, urgent = loads[Lane.BULK], loads[Lane.INTERACTIVE]
        self._ahead = bulk.undelivered > 0
        # An embedder computes one batch: what else it has taken waits. While a batch of requests waits for each of
        # them, further requests gather, and share the next one. Behind a corpus they do not: its batches go between.
        taken = sum(max(0, held - 1) for consumer, held in urgent.held.items() if consumer in self._embedders)
        waiting = urgent.undelivered if self._ahead else urgent.undelivered + taken
        full = waiting >= max(1, len(self._embedders))
        if self._ahead:
            self._full_since = None
        else:
            self._note_full(full)
        lanes = [] if full else [Lane.INTERACTIVE]
        return [*lanes, Lane.BULK] if bulk.undelivered < self._config.broker.max_ready_batches else lanes

    def _note_full(self, full: bool) -> None:
        """Let requests gather for a moment once there is room: those answered just now come back together."""
        now = time.monotonic()
        if full:
            self._full_since = self._full_since or now
        elif self._full_since is not None:
            self._gather_until = now + min(_MOST_GATHER_S, _GATHER_SHARE * (now - self._full_since))
            self._full_since = None

    def _embedders_known(self) -> bool:
        """Refresh the token budget; False while it is too early to pack without one."""
        now = time.monotonic()
        if self._budget is None or now - self._budget_at > 1.0:
            fresh_s = max(10.0, 2 * self._config.broker.lease_s)
            wanted = wanted_batch_tokens(self._client, self._consumer.keys, fresh_s=fresh_s)
            self._budget = min(wanted.values(), default=self._budget)
            self._embedders = wanted.keys()
            self._budget_at = now
        return self._budget is not None or now - self._started > _WAIT_FOR_EMBEDDER_S
