"""Feeding a run: blocks of a corpus become jobs, at the pace the queue allows, from wherever the run stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
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
from embedq_producer.repeats import HeldBack, LostCommitError, Repeats, Vectors

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
    vectors: Vectors | None = None,
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
        vectors: supplies documents whose text is known, which then are not sent. None: every document is sent.
        stopping: asked before each job; True returns early, with the input still open.
        on_full: told once, with a sentence, if the queue stays full for some seconds.

    Raises:
        InputError: the corpus cannot be read, or `options.strict` and a line is bad.
        RunConflictError: another producer feeds this run.
        Stopped: the run takes no more input.
        RunNotFoundError: the registry lost the run.
    """
    if isinstance(corpus, Path):
        corpus = open_corpus([corpus])
    feeder = _Feeder(
        registry, spec, corpus, options, settings, skip_duplicate_ids, done, vectors, stopping, _once(on_full)
    )
    while True:
        state = registry.state(spec.run)
        if state.input_closed:
            return
        if state.status not in (RunStatus.VALIDATING, RunStatus.IN_PROGRESS):
            raise Stopped(state.status)
        try:
            feeder.feed_from(state.position or "")
        except (_RolledBackError, LostCommitError):
            # A server that lost the end of its history lost these jobs and this position together: they go out again.
            log.warning("the server of run %s lost acknowledged work; it is sent again", spec.run)
            continue
        return


@dataclass(frozen=True)
class _Feeder:
    """One producer of one run."""

    registry: Registry
    spec: RunSpec
    corpus: Corpus
    options: ReadOptions
    settings: BrokerSettings
    skip_duplicate_ids: bool
    done: OrdinalSet
    vectors: Vectors | None
    stopping: Callable[[], bool]
    on_full: Callable[[str], None]

    def feed_from(self, recorded: str) -> None:
        """Send what the corpus holds behind the recorded position; close the input, unless asked to stop."""
        start = _position(recorded)
        repeats = self.vectors.begin() if self.vectors is not None else None
        if repeats is not None and recorded:
            self._pass_by(repeats, start)
        if start.file < len(self.corpus.files):
            for block in read_corpus(self.corpus, options=self.options, start=start):
                if self.stopping():
                    return
                if self.skip_duplicate_ids:
                    block = _skip_duplicates(block)
                recorded = self._send(block, recorded, repeats)
                if not recorded:
                    return
        if repeats is not None:
            held = repeats.close()
            if repeats.count and not (recorded := self._settle(held, recorded)):
                return
        self._move(recorded, recorded, close=True)

    def _pass_by(self, repeats: Repeats, start: Position) -> None:
        """Show `repeats` the documents before `start`, which were sent or held back by an earlier producer."""
        for block in read_corpus(self.corpus, options=self.options):
            before = int(np.searchsorted(block.documents.column("ordinal").to_numpy(), start.next_ordinal))
            repeats.first_time(block.documents.slice(0, before))
            if block.end.next_ordinal >= start.next_ordinal:
                return

    def _settle(self, held: HeldBack, recorded: str) -> str:
        """See to it that the documents held back get their outcome. Returns the new position, '' if asked to stop.

        Positions behind the whole corpus: `offset` counts the files of known vectors that were committed, `line` is the
        ordinal before which everything has been sent that only seemed to be known.
        """
        assert self.vectors is not None
        end = _position(recorded)
        here = replace(end, file=len(self.corpus.files), offset=0, line=0)
        if end.file == here.file:
            here = end
            held.settle(OrdinalSet([(0, here.line - 1)]))
        for _ in self.vectors.supply(held, self.stopping):
            here = replace(here, offset=here.offset + 1)
            recorded = self._move(recorded, here.to_json())
        if self.stopping():
            return ""
        left = held.ordinals_waiting()
        if not left:
            return recorded
        for block in read_corpus(self.corpus, options=self.options):
            wanted = left.contains(block.documents.column("ordinal").to_numpy())
            if wanted.any():
                here = replace(here, line=block.end.next_ordinal)
                block = replace(
                    block, documents=block.documents.filter(pa.array(wanted)), rejects=(), duplicates=0, end=here
                )
                recorded = self._send(block, recorded, None)
                if not recorded:
                    return ""
        return recorded

    def _move(self, recorded: str, to: str, *, close: bool = False) -> str:
        limit = self.settings.max_backlog_bytes
        sent = self.registry.enqueue(self.spec, expected=recorded, position=to, max_backlog_bytes=limit, close=close)
        _check(self.spec, sent, recorded)
        return to

    def _send(self, block: CorpusBlock, expected: str, repeats: Repeats | None) -> str:
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
            if r.ordinal not in self.done
        ]
        batch = block.documents
        done = self.done.contains(batch.column("ordinal").to_numpy())
        first_time = repeats.first_time(batch) if repeats is not None else ~done
        batch = batch.filter(pa.array(first_time & ~done))
        documents = batch.num_rows
        settled = int(done.sum()) + len(block.rejects) - len(dead)
        payload = encode_job(batch) if documents else b""
        wait_s = _FIRST_WAIT_S
        full_since = time.monotonic()
        while True:
            sent = self.registry.enqueue(
                self.spec,
                expected=expected,
                position=position,
                max_backlog_bytes=self.settings.max_backlog_bytes,
                documents=documents,
                payload=payload,
                skipped=block.duplicates,
                settled=settled,
                dead=dead,
            )
            if sent.outcome is not EnqueueOutcome.FULL:
                _check(self.spec, sent, expected)
                return position
            if self.stopping():
                return ""
            if time.monotonic() - full_since > _LONG_WAIT_S:
                self.on_full(
                    f"the queue is full ({_fullness(sent.detail)}); waiting until workers have taken some of it"
                )
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, _MOST_WAIT_S)


def _skip_duplicates(block: CorpusBlock) -> CorpusBlock:
    kept = tuple(reject for reject in block.rejects if reject.code is not DocumentErrorCode.DUPLICATE_ID)
    skipped = len(block.rejects) - len(kept)
    return replace(block, rejects=kept, duplicates=block.duplicates + skipped) if skipped else block


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
