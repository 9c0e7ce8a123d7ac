"""Feeding a run: blocks of a corpus become jobs, at the pace the queue allows, from wherever the run stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from embedq_broker.registry import Enqueued, EnqueueOutcome, Registry
from embedq_broker.settings import BrokerSettings
from embedq_schemas.dead_letter import DeadLetter, Stage, clip
from embedq_schemas.errors import DocumentErrorCode, RunConflictError, RunNotFoundError
from embedq_schemas.job import encode_job
from embedq_schemas.run import RunSpec, RunStatus

from embedq_producer.blocks import CorpusBlock, ReadOptions
from embedq_producer.corpus import Corpus, open_corpus
from embedq_producer.ordinals import NOTHING_DONE, OrdinalSet
from embedq_producer.position import START, Position
from embedq_producer.reader import read_corpus

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.002
_MOST_WAIT_S = 0.25
_LONG_WAIT_S = 2.0


class _RolledBackError(Exception):
    """The server's record of the position lies before the one it had acknowledged."""


class Stopped(Exception):
    """The run takes no more input: it was cancelled, or ended otherwise."""

    def __init__(self, status: str) -> None:
        super().__init__(f"the run is {status}")
        self.status = status


def feed(
    registry: Registry,
    spec: RunSpec,
    corpus: Corpus | Path,
    options: ReadOptions,
    settings: BrokerSettings,
    *,
    skip_duplicate_ids: bool = True,
    done: OrdinalSet = NOTHING_DONE,
    stopping: Callable[[], bool] = lambda: False,
    on_full: Callable[[str], None] = lambda _: None,
) -> None:
    """Send the corpus from the run's recorded position to its end, then close the run's input.

    Memory is bounded by one block; the queue's backlog by `settings.max_backlog_bytes`. May be killed and called
    again at any moment: the position moves in the same step that adds a job.

    Args:
        corpus: what to send; a path is `open_corpus` of it.
        skip_duplicate_ids: a document whose id occurred before is counted as skipped; False makes it an error row.
        done: ordinals whose outcome the registry counts already; they are counted in and not sent.
        stopping: asked before each job; True returns early, with the input still open.
        on_full: told once, with a sentence, if the queue stays full for some seconds.

    Raises:
        InputError: the corpus cannot be read, or `options.strict` and a line is bad.
        RunConflictError: another producer feeds this run.
        Stopped: the run takes no more input.
        RunNotFoundError: the registry lost the run.
    """
    on_full = _once(on_full)
    if isinstance(corpus, Path):
        corpus = open_corpus([corpus])
    while True:
        state = registry.state(spec.run)
        if state.input_closed:
            return
        if state.status not in (RunStatus.VALIDATING, RunStatus.IN_PROGRESS):
            raise Stopped(state.status)
        try:
            _feed_from(
                registry,
                spec,
                corpus,
                options,
                settings,
                state.position or "",
                skip_duplicate_ids,
                done,
                stopping,
                on_full,
            )
        except _RolledBackError:
            # A server that lost the end of its history lost these jobs and this position together: they go out again.
            log.warning("the server of run %s lost acknowledged jobs; they are sent again", spec.run)
            continue
        return


def _feed_from(
    registry: Registry,
    spec: RunSpec,
    corpus: Corpus,
    options: ReadOptions,
    settings: BrokerSettings,
    recorded: str,
    skip_duplicate_ids: bool,
    done: OrdinalSet,
    stopping: Callable[[], bool],
    on_full: Callable[[str], None],
) -> None:
    for block in read_corpus(corpus, options=options, start=_position(recorded)):
        if stopping():
            return
        if skip_duplicate_ids:
            block = _skip_duplicates(block)
        recorded = _send(registry, spec, block, recorded, settings, done, stopping, on_full)
        if not recorded:
            return
    _check(
        spec,
        registry.enqueue(
            spec, expected=recorded, position=recorded, max_backlog_bytes=settings.max_backlog_bytes, close=True
        ),
        recorded,
    )


def _skip_duplicates(block: CorpusBlock) -> CorpusBlock:
    kept = tuple(reject for reject in block.rejects if reject.code is not DocumentErrorCode.DUPLICATE_ID)
    skipped = len(block.rejects) - len(kept)
    return replace(block, rejects=kept, duplicates=block.duplicates + skipped) if skipped else block


def _send(
    registry: Registry,
    spec: RunSpec,
    block: CorpusBlock,
    expected: str,
    settings: BrokerSettings,
    done: OrdinalSet,
    stopping: Callable[[], bool],
    on_full: Callable[[str], None],
) -> str:
    """Send one block, waiting while the queue is full. Returns the new position, '' if asked to stop."""
    position = block.end.to_json()
    dead = [
        DeadLetter(
            id=r.id,
            ordinal=r.ordinal,
            line=r.line,
            file=None if r.file is None else clip(r.file),
            stage=Stage.PRODUCE,
            code=r.code,
            message=clip(r.message),
        )
        for r in block.rejects
        if r.ordinal not in done
    ]
    batch = block.documents
    if done and batch.num_rows:
        batch = batch.filter(pa.array(~done.contains(batch.column("ordinal").to_numpy())))
    documents = batch.num_rows
    settled = block.documents.num_rows - documents + len(block.rejects) - len(dead)
    payload = encode_job(batch) if documents else b""
    wait_s = _FIRST_WAIT_S
    full_since = time.monotonic()
    while True:
        sent = registry.enqueue(
            spec,
            expected=expected,
            position=position,
            max_backlog_bytes=settings.max_backlog_bytes,
            documents=documents,
            payload=payload,
            skipped=block.duplicates,
            settled=settled,
            dead=dead,
        )
        if sent.outcome is not EnqueueOutcome.FULL:
            _check(spec, sent, expected)
            return position
        if stopping():
            return ""
        if time.monotonic() - full_since > _LONG_WAIT_S:
            on_full(f"the queue is full ({_fullness(sent.detail)}); waiting until workers have taken some of it")
        time.sleep(wait_s)
        wait_s = min(wait_s * 2, _MOST_WAIT_S)


def _position(recorded: str) -> Position:
    return Position.from_json(recorded) if recorded else START


def _fullness(detail: str) -> str:
    return f"{int(detail):,} bytes" if detail.isdigit() else detail


def _once(tell: Callable[[str], None]) -> Callable[[str], None]:
    told: list[str] = []

    def tell_once(sentence: str) -> None:
        if not told:
            told.append(sentence)
            tell(sentence)

    return tell_once


def _check(spec: RunSpec, sent: Enqueued, expected: str) -> None:
    if sent.outcome is EnqueueOutcome.FENCED:
        if _position(sent.detail) < _position(expected):
            raise _RolledBackError
        raise RunConflictError(f"another producer is feeding run {spec.run}")
    if sent.outcome is EnqueueOutcome.STOPPED:
        raise Stopped(sent.detail)
    if sent.outcome is EnqueueOutcome.GONE:
        raise RunNotFoundError(f"the registry lost run {spec.run}; was the server flushed?")
