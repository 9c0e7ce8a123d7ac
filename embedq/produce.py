"""`embedq produce`: a corpus into the queue, for workers that run elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redis
from embedq_broker.connect import broker_errors, check_server, connect
from embedq_broker.keys import Keys, check_run_id
from embedq_broker.liveness import heartbeats, model_facts
from embedq_broker.registry import Registry
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import Corpus
from embedq_producer.feed import Stopped, feed
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import OutputError, RunConflictError, RunIncompleteError, UsageError
from embedq_schemas.run import ParquetSink, RunSpec, RunState, RunStatus, StreamSink
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.sinks.dataset import dataset_at, is_url
from embedq_worker.sinks.store import SUCCESS_NAME

from embedq.chunks import cut_long_texts
from embedq.option_base import usage_errors
from embedq.options import ProduceOptions, check_vector_type
from embedq.run import check_encoding, exit_status, left_out, metadata_type_names

_FIRST_WORD_S = 3.0
_NEXT_WORD_S = 15.0


def produce_corpus(
    sources: Sequence[str | Path],
    options: ProduceOptions,
    *,
    stopping: Callable[[], bool],
    on_note: Callable[[str], None],
) -> tuple[RunState, int]:
    """Send the documents of `sources` as a run, or go on with it. Returns (state, exit status).

    Raises:
        EmbedqError: with the leaf that says why it cannot go on; RunIncompleteError when told to stop.
    """
    corpus = options.open_corpus(sources)
    identity = options.corpus_identity(corpus)
    for note in (*filter(None, [left_out(corpus)]), *options.notes()):
        on_note(note)
    client = connect(options.redis_url, role="producer")
    with broker_errors(options.redis_url), options.metrics(options.broker()):
        for warning in check_server(client, options.redis_url):
            on_note(warning)
        keys = Keys(options.queue)
        registry = Registry(client, keys)
        facts = model_facts(client, keys)
        encoding = options.encoding(json.loads(facts.get("prompts", "{}")))
        read_options = _read_options(corpus, encoding, options, facts)
        wanted = _request(identity, read_options, options, encoding, int(facts.get("dimension", 0)))
        _check_dataset(wanted)
        spec = registry.create(wanted)
        if not spec.same_request(wanted):
            raise RunConflictError(
                f"run {spec.run} was made with another corpus or other options; choose another --run"
            )
        if spec.created_at != wanted.created_at:
            _check_goes_on(registry.state(spec.run), on_note)
        try:
            feed(
                registry,
                spec,
                corpus,
                read_options,
                options.broker(),
                skip_duplicate_ids=options.on_duplicate_id == "skip",
                stopping=stopping,
                on_full=on_note,
            )
        except Stopped as stopped:
            on_note(f"run {spec.run} takes no more documents: it is {stopped.status}")
        state = registry.state(spec.run)
        if not state.input_closed:
            raise RunIncompleteError(
                f"stopped after sending {state.counters.input} documents; the same command resumes"
            )
        if not options.wait:
            return state, exit_status(state) if state.status.terminal else 0
        return _wait(registry, client, keys, spec.run, options, stopping, on_note)


def _wait(
    registry: Registry,
    client: redis.Redis,
    keys: Keys,
    run: str,
    options: ProduceOptions,
    stopping: Callable[[], bool],
    on_note: Callable[[str], None],
) -> tuple[RunState, int]:
    """Wait for the run's end, saying every now and then how far it is, or that nobody works on it."""
    look_at = time.monotonic() + _FIRST_WORD_S
    while True:
        state = registry.state(run)
        if state.status.terminal:
            return state, exit_status(state)
        if stopping():
            raise RunIncompleteError(f"run {run} is {state.status}; workers go on with it, now or once there are any")
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + _NEXT_WORD_S
            now = time.time()
            alive = any(now - beat.at < max(10.0, options.lease_s) for beat in heartbeats(client, keys))
            counters = state.counters
            on_note(
                f"{state.status}: {counters.settled:,}/{counters.input:,} documents"
                if alive
                else f"waiting: no worker is alive on queue {keys.queue}"
            )
        time.sleep(0.2)


def _check_goes_on(state: RunState, on_note: Callable[[str], None]) -> None:
    """Say what repeating the command of a known run means; raises RunConflictError where it can mean nothing."""
    run, sink = state.spec.run, state.spec.sink
    if state.status is RunStatus.COMPLETED:
        on_note(f"run {run} was sent and completed before; --run gives another one a name of its own")
        if sink.kind == "parquet" and not dataset_at(sink.path).store.exists(SUCCESS_NAME):
            on_note(f"its dataset {sink.path} is not on this machine, or was removed")
    elif state.status.terminal or state.status is RunStatus.CANCELLING:
        reason = f" ({state.error})" if state.error else ""
        raise RunConflictError(f"run {run} is {state.status}{reason}; start a new one under another name with --run")
    elif not state.input_closed:
        on_note(f"resuming run {run}")


def _check_dataset(wanted: RunSpec) -> None:
    """Refuse a directory or prefix of another run before anything is sent, where this machine sees the directory."""
    if wanted.sink.kind == "parquet":
        owner = dataset_at(wanted.sink.path).run_spec()
        if owner is not None and owner.run != wanted.run:
            raise OutputError(f"{wanted.sink.path} holds run {owner.run}; give another directory")


def _read_options(
    corpus: Corpus, encoding: EncodingOptions, options: ProduceOptions, facts: dict[str, str]
) -> ReadOptions:
    read_options = options.read_options(corpus)
    if encoding.on_long is not OnLong.CHUNK:
        return read_options
    if not options.model:
        raise UsageError("--on-long chunk needs --model: the checkpoint whose tokenizer says where a text is too long")
    checkpoint = load_checkpoint(options.model, revision=options.revision)
    # Where no worker has described its model yet, a chunk that does not fit it becomes an error row.
    sizes = {"max_length": checkpoint.max_length, "vocab_size": checkpoint.vocab_size}
    if facts and any(int(facts.get(name, size)) != size for name, size in sizes.items()):
        raise UsageError(f"--model {options.model} is not what queue {options.queue} serves: {facts.get('model_id')}")
    check_encoding(checkpoint, encoding)
    return cut_long_texts(read_options, encoding, checkpoint)


def _request(
    identity: str, read_options: ReadOptions, options: ProduceOptions, encoding: EncodingOptions, dimension: int
) -> RunSpec:
    if encoding.dimensions is not None and dimension and encoding.dimensions > dimension:
        raise UsageError(f"--dimensions {encoding.dimensions} is above the model's {dimension}")
    # Where no worker has described its model yet, workers refuse what does not fit it.
    check_vector_type(encoding, dimension, dataset=options.output is not None)
    sink: ParquetSink | StreamSink = StreamSink(ttl_s=options.ttl_s)
    if options.output is not None:
        path = str(dataset_at(options.output)) if is_url(options.output) else os.path.abspath(options.output)
        if Path(path).is_file():
            raise OutputError(f"{path} is a file; give a directory")
        sink = ParquetSink(path=path, file_bytes=options.file_bytes)
    with usage_errors():
        spec = RunSpec(
            run="unnamed",
            queue=options.queue,
            encoding=encoding,
            sink=sink,
            lane=options.lane,
            durability=options.durability,
            metadata=tuple(read_options.columns),
            metadata_types=metadata_type_names(read_options),
            keep_text=options.keep_text,
            created_at=time.time(),
            corpus=identity,
        )
    if options.run is not None:
        return spec.model_copy(update={"run": check_run_id(options.run)})
    # The same command names the same run, so that repeating it resumes instead of sending everything again.
    content = spec.model_dump_json(exclude={"run", "created_at", "durability"})
    return spec.model_copy(update={"run": "run-" + hashlib.sha256(content.encode()).hexdigest()[:16]})
