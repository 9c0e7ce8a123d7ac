"""`embedq run`: one command from a corpus to a dataset, on one machine, resumable at any moment.

The command starts an embedded server (unless it is given one), a worker's processes and a producer, watches them, and
publishes what they commit. Everything the run needs to resume lies in its output directory.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from embedq_broker.connect import broker_errors, check_server, connect
from embedq_broker.embedded import EmbeddedServer, find_server_binary, running_server_url
from embedq_broker.keys import Keys
from embedq_broker.liveness import bind_model
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import Corpus
from embedq_producer.feed import Stopped, feed
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import OutputError, RunIncompleteError, RunNotFoundError, UsageError
from embedq_schemas.ipc import METADATA_TYPE
from embedq_schemas.run import ParquetSink, RunSpec, RunState, RunStatus
from embedq_worker.checkpoint import Checkpoint
from embedq_worker.embedder_process import model_facts
from embedq_worker.sinks.dataset import Dataset, dataset_at, is_url
from embedq_worker.sinks.errors import read_errors
from embedq_worker.sinks.finish import finish_run
from embedq_worker.sinks.store import SUCCESS_NAME
from embedq_worker.supervisor import ProcessEndedError, Slot, Supervisor, plan_slots
from redis.exceptions import RedisError

from embedq.chunks import cut_long_texts
from embedq.claim import check_apart, check_output, claim, holds_nothing, refuse_other_run
from embedq.dataset.reader import DatasetReader, open_dataset
from embedq.directory import LocalState, finished_state, local_state, owned
from embedq.estimate import Estimate, estimate, measured_speed
from embedq.generation import Generation, finish_switch, require_same_vectors
from embedq.known import KnownVectors
from embedq.option_base import usage_errors
from embedq.options import RunOptions, check_vector_type
from embedq.ownership import Ownership
from embedq.recover import reconcile, release_the_dead

EXIT_FAILED_DOCUMENTS = 3
_POLL_S = 0.1
_RESTARTS_WITHOUT_PROGRESS = 6
"""Times `max_deliveries`: isolating one document that ends its process takes two rounds of deliveries."""


@dataclass(frozen=True)
class Snapshot:
    """What a progress display shows."""

    state: RunState
    ready: bool  # every worker process is up
    restarts: int
    elapsed_s: float


@dataclass(frozen=True)
class Watching:
    """Who looks on while a run is made; fields as `run_corpus` says."""

    stopping: Callable[[], bool]
    on_progress: Callable[[Snapshot], None]
    on_note: Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """What a command asks for, worked out before anything is changed."""

    corpus: Corpus
    read_options: ReadOptions
    options: RunOptions
    dataset: Dataset
    wanted: RunSpec
    checkpoint: Checkpoint

    @property
    def state(self) -> LocalState:
        """What the run keeps on this machine."""
        return local_state(self.dataset, self.options.state)


def _task(sources: Sequence[str | Path], options: RunOptions) -> Task:
    if options.output is None:
        raise UsageError("--output is missing: name the directory for the dataset")
    dataset = dataset_at(options.output if is_url(options.output) else os.path.realpath(options.output))
    if not dataset.is_directory and (options.incremental or options.reindex):
        raise UsageError(
            f"--incremental and --reindex need a dataset in a directory, {dataset} is on an object store; "
            "embed the corpus into another prefix"
        )
    check_output(dataset)
    corpus = options.open_corpus(sources)
    check_apart(sources, corpus, dataset)
    checkpoint = options.checkpoint()
    encoding = options.encoding(dict(checkpoint.prompts))
    check_encoding(checkpoint, encoding)
    read_options = cut_long_texts(options.read_options(corpus), encoding, checkpoint)
    wanted = _request(corpus, read_options, dataset, options, checkpoint, encoding)
    return Task(corpus, read_options, options, dataset, wanted, checkpoint)


def run_corpus(
    sources: Sequence[str | Path],
    options: RunOptions,
    *,
    stopping: Callable[[], bool],
    on_progress: Callable[[Snapshot], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> RunState:
    """Embed the documents of `sources` into the dataset `options.output`, or go on where an earlier call stopped.

    Args:
        sources: files, directories, globs, URLs, or `-` for standard input; read in this order.
        options: everything else.
        stopping: asked a few times a second; True drains the workers and leaves a run that can be resumed.
        on_progress: called a few times a second.
        on_note: called with one sentence for the person at the terminal.

    Returns:
        The run's final state.

    Raises:
        RunIncompleteError: stopped before its end.
        EmbedqError: with the leaf that says why it cannot go on.
    """
    slots = _slots(options)
    task = _task(sources, options)
    dataset, wanted = task.dataset, task.wanted
    _go_on_with_switch(dataset)
    owner = dataset.run_spec()
    if owner is not None and owner.same_request(wanted):
        finished = finished_state(dataset, owner)
        if finished is not None:
            on_note(f"{options.output} is already complete")
            if running_server_url(task.state.server) is None:
                # Left by a command that was killed after its last step.
                shutil.rmtree(task.state.folder, ignore_errors=True)
            return finished
    for note in (*filter(None, [left_out(task.corpus)]), *options.notes()):
        on_note(note)
    watching = Watching(stopping, on_progress, on_note)
    update = (options.incremental or options.reindex) and owner is not None and not holds_nothing(dataset, task.state)
    if not update or (owner is not None and owner.same_request(wanted)):
        return _complete(task, slots, watching)
    with owned(dataset):
        return _replace(task, slots, watching)


def estimate_run(sources: Sequence[str | Path], options: RunOptions) -> Estimate:
    """What `run_corpus` would do. Changes nothing; raises what `run_corpus` raises before it starts."""
    task = _task(sources, options)
    dataset, wanted, checkpoint = task.dataset, task.wanted, task.checkpoint
    owner = dataset.run_spec()
    older = None
    if owner is not None:
        older = open_dataset(str(dataset), partial=True)
        if not owner.same_request(wanted):
            if older.complete and options.incremental and not options.reindex:
                require_same_vectors(older, wanted, options.dtype)
            elif not (older.complete and options.reindex):
                refuse_other_run(dataset, owner, wanted, task.state)
    return estimate(
        task.corpus,
        task.read_options,
        wanted,
        checkpoint,
        older,
        lambda: measured_speed(checkpoint, options.engine_settings()),
        keeps_vectors=owner is not None and (owner.same_request(wanted) or not options.reindex),
    )


def _go_on_with_switch(dataset: Dataset) -> None:
    """Where an earlier command was killed while a new generation took the place of the dataset."""
    if not dataset.is_directory:
        return
    generation = Generation(dataset)
    if generation.complete or generation.is_left_over:
        with owned(dataset):
            finish_switch(dataset)


def _replace(task: Task, slots: Sequence[Slot], watching: Watching) -> RunState:
    """Make the dataset's next generation, from its own vectors where their texts are still there; then switch."""
    dataset, wanted, options = task.dataset, task.wanted, task.options
    if not dataset.store.exists(SUCCESS_NAME):
        raise OutputError(f"{dataset} is not complete; repeat the command that made it, then bring it up to date")
    generation = Generation(dataset)
    older = None if options.reindex else open_dataset(dataset.path)
    if older is not None:
        dtype = require_same_vectors(older, wanted, options.dtype)
        options = options.model_copy(update={"dtype": dtype})
    if generation.make_room(wanted):
        watching.on_note(f"an unfinished update of {dataset.path} for another corpus or other options was removed")
    before = generation.take_ranges if older is not None else None
    fresh = replace(task, options=options, dataset=generation.dataset, wanted=generation.asked(wanted))
    state = _complete(fresh, slots, watching, older, before)
    if generation.empty:
        first = next(iter(read_errors(generation.dataset)), None)
        generation.drop()
        why = f" ({first.code}: {first.message})" if first is not None else ""
        raise OutputError(
            f"no document of the corpus {task.corpus.name} has a vector{why}, so {dataset.path} would lose all of its "
            "own; it stays as it is; remove it first if that is meant"
        )
    if state.status is RunStatus.COMPLETED:
        generation.switch()
        spec = dataset.run_spec()
        state = (finished_state(dataset, spec) if spec is not None else None) or state
    elif state.status is RunStatus.CANCELLED:
        generation.drop()
    return state


def _complete(
    task: Task,
    slots: Sequence[Slot],
    watching: Watching,
    older: DatasetReader | None = None,
    before: Callable[[], None] | None = None,
) -> RunState:
    """Make the dataset that `wanted` describes, or go on with it. `before` is called once the directory is claimed."""
    options, dataset, wanted = task.options, task.dataset, task.wanted
    owner = dataset.run_spec()
    # Whatever can fail before the directory is claimed, fails before: then another command may still use it.
    if options.redis_url is None:
        find_server_binary()
    else:
        queue = (owner if owner is not None and owner.same_request(wanted) else wanted).queue
        _check_queue(options.redis_url, Keys(queue), task.checkpoint, watching.on_note)
    spec = claim(dataset, wanted, task.state)
    with ExitStack() as stack:
        ownership = stack.enter_context(owned(dataset, task.state))
        if not dataset.is_directory and options.redis_url is None:
            watching.on_note(f"what this run needs to resume is kept in {task.state.folder} until it is complete")
        if before is not None:
            before()
        url = options.redis_url
        server: EmbeddedServer | None = None
        if url is None:
            server = stack.enter_context(EmbeddedServer(task.state.server))
            url = server.url
        broker = options.broker(redis_url=url, queue=spec.queue)
        folder = stack.enter_context(options.metrics(broker, processes=True))
        with broker_errors(url):
            state = _drive(task, spec, older, slots, broker, folder, server, watching, ownership)
    if not state.counters.input:
        watching.on_note(f"the corpus {task.corpus.name} holds no documents")
    if state.status is RunStatus.COMPLETED:
        if server is not None or not dataset.is_directory:
            shutil.rmtree(task.state.folder, ignore_errors=True)
        if copied := sum(file.rows for file in dataset.store.files().values() if file.copied):
            watching.on_note(
                f"{copied:,} of the {state.counters.succeeded:,} vectors were known and not computed again"
            )
    return state


def exit_status(state: RunState) -> int:
    """0: complete; 3: complete with failed documents; 1: the run failed or was cancelled."""
    if state.status is not RunStatus.COMPLETED:
        return 1
    return EXIT_FAILED_DOCUMENTS if state.counters.failed else 0


def _drive(
    task: Task,
    spec: RunSpec,
    older: DatasetReader | None,
    slots: Sequence[Slot],
    broker: BrokerSettings,
    metrics_folder: Path | None,
    server: EmbeddedServer | None,
    watching: Watching,
    ownership: Ownership,
) -> RunState:
    options, dataset, checkpoint = task.options, task.dataset, task.checkpoint
    max_length = spec.encoding.longest(checkpoint.max_length)
    # An embedded server that is gone stays gone: nothing waits for it.
    url = broker.redis_url
    client = connect(url, role="run", blocking=server is not None)
    keys = Keys(spec.queue)
    registry = Registry(client, keys)
    done = reconcile(registry, dataset, spec, watching.on_note, alone=server is not None)
    if server is not None:
        release_the_dead(client, keys, broker)
    spec = registry.create(spec)
    roots = (str(dataset),)
    supervisor = Supervisor(
        slots,
        broker,
        options.worker_settings(roots),
        ends_on_infrastructure=True,
        log_level=options.log_level,
        metrics_folder=metrics_folder,
    )
    halt = threading.Event()

    def produce() -> None:
        own = connect(url, role="producer", blocking=server is not None)
        sender = Registry(own, keys)
        known = None
        # A stream is read once: what would turn out to be unknown after all could not be sent any more.
        if all(file.place.repeatable for file in task.corpus.files):
            spool = task.state.spool
            known = KnownVectors(own, sender, dataset, spec, max_length=max_length, done=done, spool=spool, older=older)
        feed(
            sender,
            spec,
            task.corpus,
            task.read_options,
            broker,
            skip_duplicate_ids=options.on_duplicate_id == "skip",
            done=done,
            vectors=known,
            stopping=halt.is_set,
        )

    feeder = _Feeder(produce)
    started = time.monotonic()
    patience = _Patience(most=_RESTARTS_WITHOUT_PROGRESS * broker.max_deliveries)
    try:
        supervisor.poll()
        feeder.start()
        while True:
            state = registry.state(spec.run)
            watching.on_progress(Snapshot(state, supervisor.ready, supervisor.restarts, time.monotonic() - started))
            if state.status.terminal:
                if state.status is RunStatus.COMPLETED and spec.queue == spec.run:
                    supervisor.drain()
                    registry.drop_queue(spec.run)
                return state
            if state.status in (RunStatus.FINALIZING, RunStatus.CANCELLING):
                ownership.confirm()
                finish_run(client, keys, spec.run, roots)
            elif watching.stopping():
                break
            if server is not None:
                server.check()
            feeder.check()
            ownership.check()
            supervisor.poll()
            patience.check(state.counters.settled, supervisor.restarts)
            time.sleep(0.01 if state.status is RunStatus.FINALIZING else _POLL_S)
    except RedisError:
        if server is not None:
            # Its guard needs a moment to see and tell that it ended.
            for _ in range(20):
                server.check()
                time.sleep(0.1)
        raise
    except RunNotFoundError:
        raise RunIncompleteError(
            f"the server lost run {spec.run}, as after FLUSHALL; the same command resumes from {dataset}"
        ) from None
    finally:
        halt.set()
        if server is not None and server.poll() is not None:
            supervisor.kill()
        supervisor.drain()
        feeder.join()
    # What was under way when the stop came was still finished and committed.
    counters = registry.state(spec.run).counters
    raise RunIncompleteError(
        f"stopped: {counters.settled:,} of the {counters.input:,} documents read so far are done; "
        "the same command resumes"
    )


def _slots(options: RunOptions) -> tuple[Slot, ...]:
    """The worker processes of this run, at least one of each kind; raises UsageError."""
    if not options.tokenizers or not (options.gpus or options.embedders):
        raise UsageError("--tokenizers and --embedders must be at least 1 in embedq run, which nobody else helps")
    with usage_errors():
        return plan_slots(
            tokenizers=options.tokenizers,
            embedders=options.embedders,
            gpus=options.gpus,
            engine=options.engine_settings(),
        )


def _check_queue(url: str, keys: Keys, checkpoint: Checkpoint, on_note: Callable[[str], None]) -> None:
    """Reach the server and bind the queue to the model, or raise the EmbedqError that says why not."""
    client = connect(url, role="run")
    with broker_errors(url):
        for warning in check_server(client, url):
            on_note(warning)
        bind_model(client, keys, checkpoint.fingerprint, model_facts(checkpoint))
    client.close()


class _Patience:
    """Ends a run whose processes end again and again without settling a document."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._settled = 0
        self._restarts = 0

    def check(self, settled: int, restarts: int) -> None:
        """Raise ProcessEndedError once `most` restarts have passed since the last progress."""
        if settled > self._settled:
            self._settled, self._restarts = settled, restarts
        if restarts - self._restarts > self._most:
            raise ProcessEndedError(
                f"worker processes ended {restarts - self._restarts} times without finishing a document; "
                "their log lines say why"
            )


class _Feeder:
    """The producer's thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the producer early, except that the run was cancelled."""
        if self._failure is not None and not isinstance(self._failure, Stopped):
            raise self._failure

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the watching thread must hear of it, whatever it is
            self._failure = error


def left_out(corpus: Corpus) -> str:
    """A sentence about files that a directory holds besides the corpus; empty where there are none."""
    count = len(corpus.left_out)
    more = ", ..." if count > 3 else ""
    names = ", ".join(corpus.left_out[:3])
    return f"left out, for no format is known: {names}{more} ({count} in all); --format reads them" if count else ""


def _request(
    corpus: Corpus,
    read_options: ReadOptions,
    dataset: Dataset,
    options: RunOptions,
    checkpoint: Checkpoint,
    encoding: EncodingOptions,
) -> RunSpec:
    run = time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)
    with usage_errors():
        return RunSpec(
            run=run,
            # On a shared server a queue of its own, unless one is named: foreign workers may not see the directory.
            queue=run if options.redis_url and "queue" not in options.model_fields_set else options.queue,
            model_fingerprint=checkpoint.fingerprint,
            encoding=encoding,
            sink=ParquetSink(path=str(dataset), file_bytes=options.file_bytes),
            durability=options.durability,
            metadata=tuple(read_options.columns),
            metadata_types=metadata_type_names(read_options),
            keep_text=options.keep_text,
            created_at=time.time(),
            corpus=options.corpus_identity(corpus),
        )


def metadata_type_names(options: ReadOptions) -> tuple[str, ...]:
    """For a run's specification: none where all are strings."""
    types = options.columns.values()
    return () if all(kind == METADATA_TYPE for kind in types) else tuple(map(str, types))


def check_encoding(checkpoint: Checkpoint, encoding: EncodingOptions) -> None:
    """Refuse options above the model's; raises UsageError."""
    for option, asked, most in (
        ("--dimensions", encoding.dimensions, checkpoint.dimension),
        ("--max-length", encoding.max_length, checkpoint.max_length),
        ("--chunk-tokens", encoding.chunk_tokens, checkpoint.max_length),
    ):
        if asked is not None and asked > most:
            raise UsageError(f"{option} {asked} is above the model's {most}")
    check_vector_type(encoding, checkpoint.dimension)
