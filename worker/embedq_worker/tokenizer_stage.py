"""The tokenizer stage: jobs in, packed token batches out, one commit per window of whole jobs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from embedq_broker import metrics
from embedq_broker.commit import Commit, CommitOutcome, Committed
from embedq_broker.consume import Consumer, Entry, Share, is_fatal
from embedq_broker.faults import fault_point
from embedq_broker.settings import BrokerSettings
from embedq_schemas.chunks import chunk_at
from embedq_schemas.dead_letter import DeadLetter, clip
from embedq_schemas.dead_letter import Stage as FailedStage
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import CodecError, DocumentErrorCode
from embedq_schemas.ipc import METADATA_TYPE
from embedq_schemas.job import Codec, decode_job, encode_job, holds_ids
from embedq_schemas.names import Lane
from embedq_schemas.run import RunSpec
from embedq_schemas.text_hash import hash_texts
from embedq_schemas.token_batch import TokenBatch, make_token_batch
from numpy.typing import NDArray

from embedq_worker.pack import longest_first, plan_batches
from embedq_worker.prefixes import common_prefixes, prefix_order
from embedq_worker.runs import RunCache
from embedq_worker.tokenization import TextTokenizer, Tokenized
from embedq_worker.tokenization.given import hash_ids, take_ids

log = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 2048
"""Budget while no embedder has said what it wants."""
_WORTH_SHARING = 0.02
"""Share of a window's tokens that common beginnings must save: longest first, batches are fuller."""


@dataclass(frozen=True)
class _Group:
    """Documents of a window that may share token batches."""

    encoding: EncodingOptions
    columns: tuple[str, ...]
    documents: pa.RecordBatch  # id, ordinal, text or input_ids, then `columns`
    shares: tuple[Share, ...]  # in the order of the documents


class TokenizerStage:
    """Turns windows of jobs into commits. Owns no connection and no loop, so a test may call it as a function."""

    def __init__(
        self,
        consumer: Consumer,
        tokenizer: TextTokenizer,
        runs: RunCache,
        settings: BrokerSettings,
        *,
        max_length: int,
        vocab_size: int,
        share_prefixes: bool,
    ) -> None:
        """
        Args:
            share_prefixes: put texts that begin alike into one batch, whose engine computes their beginning once.
        """
        self._consumer = consumer
        self._tokenizer = tokenizer
        self._runs = runs
        self._settings = settings
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._share_prefixes = share_prefixes

    def window(
        self, entries: Sequence[Entry], lane: Lane, max_batch_tokens: int, *, fatal: bool = False
    ) -> tuple[Commit, int, int]:
        """One commit for `entries`, all of `lane`; (commit, documents, tokens). What is `fatal` is not tried again."""
        commit = Commit(self._consumer, inputs=list(entries))
        documents = tokens = 0
        with metrics.stage_duration.labels("tokenize").time():
            for group in self._gather(commit, entries, fatal):
                n, total = self._tokenize(commit, group, lane, max_batch_tokens)
                documents, tokens = documents + n, tokens + total
        return commit, documents, tokens

    def settle(
        self, send: Callable[[Commit], Committed], entries: Sequence[Entry], lane: Lane, max_batch_tokens: int
    ) -> tuple[int, int]:
        """Commit `entries`, leaving out what other consumers took over meanwhile. Returns (documents, tokens)."""
        # What was delivered before may be what ended its process: each such job is tried alone, and on record.
        fresh = [entry for entry in entries if entry.deliveries == 1]
        documents, tokens = self._settle(send, fresh, lane, max_batch_tokens)
        for entry in entries:
            if entry.deliveries > 1:
                tries = self._begin_try(entry)
                fatal = is_fatal(entry, tries, self._settings.max_deliveries)
                n, total = self._settle(send, [entry], lane, max_batch_tokens, fatal=fatal)
                self._end_try(entry)
                documents, tokens = documents + n, tokens + total
        return documents, tokens

    def _begin_try(self, entry: Entry) -> int:
        return self._runs.ask(lambda: self._consumer.begin_try(entry))

    def _end_try(self, entry: Entry) -> None:
        self._runs.ask(lambda: self._consumer.end_try(entry))

    def _settle(
        self,
        send: Callable[[Commit], Committed],
        entries: Sequence[Entry],
        lane: Lane,
        max_batch_tokens: int,
        *,
        fatal: bool = False,
    ) -> tuple[int, int]:
        remaining = list(entries)
        while remaining:
            commit, documents, tokens = self.window(remaining, lane, max_batch_tokens, fatal=fatal)
            committed = send(commit)
            if committed.outcome is not CommitOutcome.LOST:
                return documents, tokens
            lost = set(committed.lost)
            log.warning(
                "lost the lease of %d of %d jobs; the others are committed without them", len(lost), len(entries)
            )
            remaining = [entry for entry in remaining if (entry.stream, entry.id) not in lost]
        return 0, 0

    def _gather(self, commit: Commit, entries: Sequence[Entry], fatal: bool) -> list[_Group]:
        """Decode jobs and join those that may share batches; settle those that cannot be tokenized."""
        tables: dict[tuple[object, ...], list[tuple[RunSpec, pa.RecordBatch]]] = {}
        self._runs.load(entry.shares[0].run for entry in entries if entry.shares)
        for entry in entries:
            # A job belongs to one run: its producer's.
            run = entry.shares[0].run if entry.shares else None
            spec = self._runs.spec(run) if run else None
            if run is None or spec is None:
                log.warning("dropped job %s: it belongs to no known run", entry.id)
                continue
            if not self._runs.wanted(run):
                commit.count(run, "skipped", entry.documents)
                commit.count(run, "ready", entry.documents)
                continue
            documents = self._decode(commit, entry, run, spec)
            if documents is None:
                continue
            if fatal:
                _isolate(commit, entry, run, documents, entry.deliveries - 1)
                continue
            columns = (*spec.metadata, "text") if spec.keep_text else spec.metadata
            # Only results on streams may mix runs: a file belongs to one dataset.
            apart = run if spec.sink.kind == "parquet" else ""
            kind = holds_ids(documents)
            key = (spec.encoding, columns, spec.metadata_types, apart, kind)
            tables.setdefault(key, []).append((spec, documents))
        groups = []
        for members in tables.values():
            spec = members[0][0]
            columns = (*spec.metadata, "text") if spec.keep_text else spec.metadata
            parts = [_select(documents, columns, spec.metadata_fields) for _, documents in members]
            shares = tuple(Share(member.run, documents.num_rows) for member, documents in members)
            joined = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
            groups.append(_Group(spec.encoding, columns, joined, shares))
        return groups

    def _decode(self, commit: Commit, entry: Entry, run: str, spec: RunSpec) -> pa.RecordBatch | None:
        try:
            if entry.fault:
                raise entry.fault
            documents = decode_job(entry.payload, entry.codec)
            if documents.num_rows != entry.documents:
                raise CodecError(f"the job holds {documents.num_rows} documents, its entry says {entry.documents}")
            documents = _typed(documents, spec.metadata_fields)
        except CodecError as error:
            # Every document that was counted in gets its outcome, though nothing is known of it but its run.
            letter = DeadLetter(
                ordinal=-1, stage=FailedStage.TOKENIZE, code=DocumentErrorCode.INVALID_JOB, message=clip(error)
            )
            for _ in range(entry.documents):
                commit.add_dead_letter(run, letter)
            commit.count(run, "ready", entry.documents)
            return None
        return documents

    def _tokenize(self, commit: Commit, group: _Group, lane: Lane, max_batch_tokens: int) -> tuple[int, int]:
        encoding = group.encoding
        max_length = encoding.longest(self._max_length)
        fault_point("tokenize.encode", group.documents.column("id"))
        tokenized, sha256 = self._encode(group, max_length)
        runs = np.repeat([share.run for share in group.shares], [share.documents for share in group.shares])
        failed = self._refuse(
            commit, group, runs, tokenized.errors, tokenized.truncated, tokenized.n_tokens, max_length
        )
        lengths = np.diff(tokenized.offsets)
        batch = make_token_batch(
            group.documents,
            input_ids=tokenized.input_ids,
            offsets=tokenized.offsets,
            n_tokens=tokenized.n_tokens,
            truncated=tokenized.truncated,
            text_sha256=sha256,
            metadata=group.columns,
        )
        rows, common = self._order(tokenized, failed)
        bounds = plan_batches(lengths[rows], max_batch_tokens, common)
        # One gather for the window; batches are slices of it, and the wire format writes slices compactly.
        packed, members = batch.select(rows), runs[rows]
        for start, end in itertools.pairwise(bounds.tolist()):
            part = packed.slice(start, end - start)
            computed = part.num_tokens - int(common[start + 1 : end].sum())
            # A single document may exceed the budget.
            metrics.batch_fill.observe(min(1.0, computed / max_batch_tokens))
            self._add_batch(commit, part, members[start:end], lane)
        for share in group.shares:
            commit.count(share.run, "ready", share.documents)
        return len(rows), int(lengths[rows].sum())

    def _order(self, tokenized: Tokenized, failed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows to pack, in their order, and how many tokens each shares with the one before, both int64 [n]."""
        ids, offsets = tokenized.input_ids, tokenized.offsets
        if self._share_prefixes:
            order = prefix_order(ids, offsets)
            rows = order[~failed[order]]
            common = common_prefixes(ids, offsets, rows)
            if common.sum() >= _WORTH_SHARING * len(ids):
                return rows, common
        good = np.flatnonzero(~failed)
        return good[longest_first(np.diff(offsets)[good])], np.zeros(len(good), np.int64)

    def _encode(self, group: _Group, max_length: int) -> tuple[Tokenized, pa.Array]:
        encoding = group.encoding
        if holds_ids(group.documents):
            lists = group.documents.column("input_ids")
            taken = take_ids(
                lists,
                vocab_size=self._vocab_size,
                max_length=max_length,
                truncation_side=encoding.truncation_side.value,
            )
            return taken, hash_ids(lists)
        texts = group.documents.column("text")
        return self._tokenizer.encode_as(texts, encoding), hash_texts(texts)

    def _add_batch(self, commit: Commit, batch: TokenBatch, runs: NDArray[np.str_], lane: Lane) -> None:
        if (runs == runs[0]).all():
            commit.add_batch(lane, [Share(str(runs[0]), len(runs))], batch.encode())
            return
        # Shares name stretches of documents, so each run's documents stand together.
        by_run = np.argsort(runs, kind="stable")
        names, counts = np.unique(runs, return_counts=True)
        shares = [Share(str(name), int(count)) for name, count in zip(names, counts, strict=True)]
        commit.add_batch(lane, shares, batch.select(by_run).encode())

    def _refuse(
        self,
        commit: Commit,
        group: _Group,
        runs: NDArray[np.str_],
        errors: Mapping[int, str],
        truncated: NDArray[np.bool_],
        n_tokens: NDArray[np.int32],
        max_length: int,
    ) -> NDArray[np.bool_]:
        """Dead-letter the documents that have no token ids, or too many; returns bool [n], True for those."""
        failed = np.zeros(group.documents.num_rows, dtype=np.bool_)
        given = holds_ids(group.documents)
        code = DocumentErrorCode.INVALID_INPUT_IDS if given else DocumentErrorCode.TOKENIZER_FAILED
        reasons: dict[int, tuple[DocumentErrorCode, str]] = {row: (code, message) for row, message in errors.items()}
        # Where long texts were to be cut into chunks, one that was not is no less of a fault.
        if group.encoding.on_long is not OnLong.TRUNCATE:
            for row in np.flatnonzero(truncated).tolist():
                text = f"{n_tokens[row]} tokens, the maximum is {max_length}"
                reasons.setdefault(row, (DocumentErrorCode.TOO_LONG, text))
        for row, (code, message) in reasons.items():
            failed[row] = True
            letter = DeadLetter(
                id=group.documents.column("id")[row].as_py(),
                ordinal=group.documents.column("ordinal")[row].as_py(),
                chunk=chunk_at(group.documents, row),
                stage=FailedStage.TOKENIZE,
                code=code,
                message=clip(message),
            )
            commit.add_dead_letter(str(runs[row]), letter)
        return failed


def _isolate(commit: Commit, entry: Entry, run: str, documents: pa.RecordBatch, deliveries: int) -> None:
    """A job that was delivered again and again: split it into single documents; a single one is the guilty one."""
    if documents.num_rows > 1:
        log.warning("job %s of run %s is split into %d after %d deliveries", entry.id, run, entry.documents, deliveries)
        for row in range(documents.num_rows):
            commit.add_again(entry, [Share(run, 1)], Codec.ARROW, encode_job(documents.slice(row, 1)))
        return
    letter = DeadLetter(
        id=documents.column("id")[0].as_py(),
        ordinal=documents.column("ordinal")[0].as_py(),
        chunk=chunk_at(documents, 0),
        stage=FailedStage.TOKENIZE,
        code=DocumentErrorCode.MAX_DELIVERIES,
        message=f"given up after {deliveries} deliveries: the tokenizer process ended on this document each time",
    )
    commit.add_dead_letter(run, letter)
    commit.count(run, "ready", 1)


def _typed(documents: pa.RecordBatch, metadata: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    """`documents` with metadata of the run's types; raises CodecError where a job from elsewhere has other values."""
    for index, field in enumerate(documents.schema):
        wanted = metadata.get(field.name, field.type)
        if field.type != wanted:
            try:
                column = documents.column(index).cast(wanted)
            except (pa.ArrowException, ValueError) as error:
                raise CodecError(f"job: metadata column {field.name} is not {wanted}: {str(error)[:200]}") from None
            documents = documents.set_column(index, field.name, column)
    return documents


def _select(documents: pa.RecordBatch, columns: Sequence[str], metadata: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    """`documents` with exactly the wanted `columns` behind its own; nulls where a job lacks one."""
    names = list(dict.fromkeys([*documents.schema.names[:3], *columns]))
    have = set(documents.schema.names)
    arrays = [
        documents.column(name) if name in have else pa.nulls(documents.num_rows, metadata.get(name, METADATA_TYPE))
        for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, names=names)
