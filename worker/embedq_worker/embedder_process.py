"""The embedder process: prefetch, forward pass, hand over to the writer; one per GPU or per tensor-parallel group."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import redis
from embedq_broker.commit import Commit
from embedq_broker.connect import connect
from embedq_broker.consume import Consumer, Stage, is_fatal
from embedq_broker.keys import Keys
from embedq_broker.liveness import bind_model
from embedq_broker.registry import Registry
from embedq_schemas.dead_letter import DeadLetter, clip
from embedq_schemas.dead_letter import Stage as FailedStage
from embedq_schemas.errors import DocumentErrorCode
from embedq_schemas.job import Codec
from embedq_schemas.names import LANES
from embedq_schemas.run import RunSpec
from embedq_schemas.token_batch import TokenBatch
from redis.exceptions import RedisError

from embedq_worker.checkpoint import Checkpoint
from embedq_worker.embed import Embedded, Embedding, RunPart, dead_letter
from embedq_worker.engine import Engine, load_engine
from embedq_worker.hold import until_accepted
from embedq_worker.keeper import Keeper, Progress, leave
from embedq_worker.prefetch import Fetched, Prefetcher
from embedq_worker.runs import RunCache
from embedq_worker.settings import ProcessConfig
from embedq_worker.sinks.finish import sweep_runs
from embedq_worker.writer import Writer

T = TypeVar("T")
log = logging.getLogger(__name__)


def run_embedder(config: ProcessConfig, stop: threading.Event, ready: Callable[[], None]) -> None:
    """Embed until `stop` is set, then finish what is under way, commit it, and give back the rest.

    Args:
        config: what the supervisor said.
        stop: set on SIGTERM, or when the supervisor is gone.
        ready: called once, when the first batch may come.
    """
    settings, url = config.worker, config.broker.redis_url
    checkpoint = settings.load_checkpoint()
    keys = Keys(config.broker.queue)
    client = connect(url, role="embedder")
    bind_model(client, keys, checkpoint.fingerprint, model_facts(checkpoint))
    engine = load_engine(checkpoint, config.engine)
    try:
        _serve(config, checkpoint, engine, client, keys, stop, ready)
    finally:
        engine.close()


def _serve(
    config: ProcessConfig,
    checkpoint: Checkpoint,
    engine: Engine,
    client: redis.Redis,
    keys: Keys,
    stop: threading.Event,
    ready: Callable[[], None],
) -> None:
    settings, url = config.worker, config.broker.redis_url
    consumer = Consumer(client, keys, Stage.EMBED, config.consumer, lease_ms=config.broker.lease_ms)
    consumer.ensure_groups()
    progress = Progress()
    keeper = Keeper(
        connect(url, role="keeper"),
        consumer,
        config.role,
        progress,
        steps=lambda: engine.steps,
        max_batch_tokens=engine.max_batch_tokens,
    )
    prefetcher = Prefetcher(
        consumer,
        lambda: connect(url, role="prefetch", blocking=True),
        depth=settings.prefetch,
        decode=lambda payload: TokenBatch.decode(
            payload, vocab_size=checkpoint.vocab_size, max_length=checkpoint.max_length
        ),
    )
    # One of each lane: a service's vectors do not wait while a file of a corpus is brought to the disk.
    writers = {
        lane: Writer(
            connect(url, role=f"writer-{lane}"),
            consumer,
            progress,
            url=url,
            roots=settings.output_roots,
            file_metadata=lambda spec: file_metadata(checkpoint, engine, spec),
            flush_interval_s=settings.flush_interval_s,
            storage_patience_s=settings.storage_patience_s,
            # Token batches under lease count as backlog; a quarter leaves room for those of other embedders.
            most_input_bytes=config.broker.max_backlog_bytes // 4,
            starved=lambda: prefetcher.starved,
        )
        for lane in LANES
    }
    embedder = Embedder(config, checkpoint, engine, client, consumer, stop)
    janitor = threading.Thread(target=_janitor, args=(config, keys, stop), name="janitor", daemon=True)
    keeper.start()
    for writer in writers.values():
        writer.start()
    prefetcher.start()
    janitor.start()
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in engine.description.items() if value)
    log.info("embedder ready: %s", facts)
    ready()

    def hand_over(settling: Settling) -> None:
        if (embedded := settling.outcome()) is not None:
            writers[embedded.entry.lane].submit(embedded)

    try:
        under_way: Settling | None = None
        while not stop.is_set() or under_way is not None:
            # While most of a batch is still to run, what comes next is open: urgent work must not find it decided.
            if under_way is not None:
                under_way.most_done()
            fetched = None if stop.is_set() else prefetcher.take(0.5 if under_way is None else 0)
            for writer in writers.values():
                writer.check()
            if fetched is None and under_way is None:
                progress.enter("idle")
                continue
            progress.enter("working")
            # A batch whose turn may end the process must not take finished work with it.
            overlaps = under_way is not None and under_way.background and fetched and fetched.entry.deliveries == 1
            if under_way is not None and not overlaps:
                hand_over(under_way)
                under_way = None
            following = None if fetched is None else embedder.begin(fetched)
            if under_way is not None:
                hand_over(under_way)
            under_way = following
        progress.enter("draining")
        prefetcher.stop()
        deadline = time.monotonic() + settings.grace_s
        for writer in writers.values():
            writer.drain()
        for writer in writers.values():
            writer.close(max(0.1, deadline - time.monotonic()))
    finally:
        keeper.stop()
        leave(client, consumer)


class Settling(Protocol):
    """A batch on its way to its outcome; in the `background` if the next may begin before it is there."""

    @property
    def background(self) -> bool: ...

    def most_done(self) -> None:
        """Return when the next batch should begin."""

    def outcome(self) -> Embedded | None:
        """None where it is already committed."""


@dataclass(frozen=True)
class Settled:
    """A batch that has its outcome."""

    embedded: Embedded | None
    background: bool = False

    def most_done(self) -> None:
        """Nothing is under way."""

    def outcome(self) -> Embedded | None:
        return self.embedded


class Embedder:
    """What becomes of one fetched token batch."""

    def __init__(
        self,
        config: ProcessConfig,
        checkpoint: Checkpoint,
        engine: Engine,
        client: redis.Redis,
        consumer: Consumer,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._engine = engine
        self._client = client
        self._consumer = consumer
        self._stop = stop
        registry = Registry(client, consumer.keys)
        self._runs = RunCache(registry, url=config.broker.redis_url, give_up=stop.is_set)

    def begin(self, fetched: Fetched) -> Settling:
        """Launch a batch, or decide what else becomes of its documents."""
        entry, batch = fetched.entry, fetched.batch
        if batch is None:
            letter = DeadLetter(
                ordinal=-1,
                stage=FailedStage.EMBED,
                code=DocumentErrorCode.INVALID_BATCH,
                message=clip(fetched.fault or "the entry is not a token batch"),
            )
            parts = (RunPart(s.run, None, 0, (letter,) * s.documents) for s in entry.shares)
            return Settled(Embedded(entry, tuple(parts)))
        spec = next(filter(None, (self._runs.spec(share.run) for share in entry.shares)), None)
        if spec is None or not any(self._runs.wanted(share.run) for share in entry.shares):
            skipped = (RunPart(s.run, None, 0, (), skipped=s.documents) for s in entry.shares)
            return Settled(Embedded(entry, tuple(skipped)))
        normalize = self._checkpoint.normalize if spec.encoding.normalize is None else spec.encoding.normalize
        if entry.deliveries == 1:
            return Embedding(self._engine, entry, batch, spec.encoding, normalize)
        # What was delivered before may be what ended its process: whether this try comes back is put on record.
        tries = self._ask(lambda: self._consumer.begin_try(entry))
        if is_fatal(entry, tries, self._config.broker.max_deliveries):
            outcome = self._isolate(fetched, batch)
        else:
            outcome = Embedding(self._engine, entry, batch, spec.encoding, normalize).outcome()
        self._ask(lambda: self._consumer.end_try(entry))
        return Settled(outcome)

    def _ask(self, question: Callable[[], T]) -> T:
        return until_accepted(question, url=self._config.broker.redis_url, give_up=self._stop.is_set)

    def _isolate(self, fetched: Fetched, batch: TokenBatch) -> Embedded | None:
        """A batch delivered again and again: split it into single documents; a single one is the guilty one."""
        entry = fetched.entry
        deliveries = entry.deliveries - 1
        if batch.num_documents == 1:
            message = f"given up after {deliveries} deliveries: the embedder process ended on this document each time"
            letter = dead_letter(batch, 0, DocumentErrorCode.MAX_DELIVERIES, message)
            return Embedded(entry, (RunPart(entry.shares[0].run, None, 0, (letter,)),))
        log.warning("token batch %s is split into %d after %d deliveries", entry.id, batch.num_documents, deliveries)
        commit = Commit(self._consumer, inputs=[entry])
        row = 0
        for share in entry.shares:
            for _ in range(share.documents):
                single = type(share)(share.run, 1)
                commit.add_again(entry, [single], Codec.ARROW, batch.slice(row, 1).encode())
                row += 1
        self._ask(lambda: commit.send(self._client))
        return None


def model_facts(checkpoint: Checkpoint) -> dict[str, str | int]:
    """What producers and services may want to know of the queue's model."""
    return {
        "model_id": checkpoint.model_id,
        "revision": checkpoint.revision or "",
        "dimension": checkpoint.dimension,
        "max_length": checkpoint.max_length,
        "vocab_size": checkpoint.vocab_size,
        "prompts": json.dumps(dict(checkpoint.prompts)),
        "default_prompt_name": checkpoint.default_prompt_name or "",
    }


def file_metadata(checkpoint: Checkpoint, engine: Engine, spec: RunSpec) -> Mapping[str, str]:
    """What a Parquet file says of how its vectors were made."""
    from importlib.metadata import version

    encoding = spec.encoding
    normalize = checkpoint.normalize if encoding.normalize is None else encoding.normalize
    facts = {
        "model_id": checkpoint.model_id,
        "revision": checkpoint.revision or "",
        "fingerprint": checkpoint.fingerprint,
        "pooling": checkpoint.pooling,
        "normalized": str(normalize).lower(),
        "dimensions": str(encoding.dimensions or checkpoint.dimension),
        "dtype": engine.description.get("dtype", ""),
        "prompt": encoding.prompt,
        "run": spec.run,
        "version": version("embedq"),
    }
    return {f"embedq.{name}": value for name, value in facts.items()}


def _janitor(config: ProcessConfig, keys: Keys, stop: threading.Event) -> None:
    """Housekeeping beside the embedding: what dead workers left is published, what is settled is finished."""
    client = connect(config.broker.redis_url, role="janitor")
    while not stop.wait(random.uniform(0.75, 1.25)):  # noqa: S311
        try:
            sweep_runs(client, keys, config.worker.output_roots, older_than_ms=config.broker.lease_ms)
        except RedisError as error:
            log.warning("housekeeping: %s", error)
        except Exception:
            # Housekeeping must not end: the next round may find the cause gone.
            log.exception("housekeeping failed")
