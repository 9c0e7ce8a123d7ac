"""`embedq run --dry-run`: what a run would do, from one pass over the corpus and the dataset. Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import Corpus
from embedq_producer.id_set import IdSet, hash_ids
from embedq_producer.reader import read_corpus
from embedq_schemas.encoding import OnLong
from embedq_schemas.run import RunSpec
from embedq_schemas.text_hash import hash_texts, text_keys
from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine.settings import EngineSettings
from numpy.typing import NDArray

from embedq.dataset.reader import DatasetReader
from embedq.dataset.row_keys import row_keys

_LEAST_TOKENS = 100_000
"""Of fewer tokens a dataset's own speed says more of starting than of computing."""
_TEXT_TOKENS = 512
_MORE_BYTES = 64
"""Of a row beside its vector: its id, digest and counts, roughly."""


@dataclass(frozen=True)
class Estimate:
    """Counts in documents; `unchanged` have the same id, text and metadata as in the dataset."""

    unchanged: int
    changed: int
    new: int
    deleted: int
    #: Bad ones, which become error rows, and repeated ids, which are skipped.
    unusable: int
    #: Texts that no vector is at hand for, each counted once.
    computed: int
    #: What the model is given for them.
    tokens: int
    #: Bytes of the vectors' files afterwards, roughly.
    size_bytes: int
    tokens_per_second: float
    #: Where the speed is from.
    measured: str

    def lines(self) -> list[str]:
        """For a person."""
        documents = self.unchanged + self.changed + self.new
        seconds = round(self.tokens / self.tokens_per_second)
        took = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        return [
            f"documents: {documents:,}: {self.unchanged:,} unchanged, {self.changed:,} changed, {self.new:,} new; "
            f"{self.deleted:,} deleted; {self.unusable:,} bad or repeated ids",
            f"to compute: {self.computed:,} texts, {self.tokens:,} tokens",
            f"time: about {took} at {self.tokens_per_second:,.0f} tokens/s, {self.measured}",
            f"dataset: about {self.size_bytes / 1e6:,.1f} MB afterwards",
        ]


def estimate(
    corpus: Corpus,
    options: ReadOptions,
    wanted: RunSpec,
    checkpoint: Checkpoint,
    older: DatasetReader | None,
    measure: Callable[[], float],
    *,
    keeps_vectors: bool,
) -> Estimate:
    """Count what a run would do.

    Args:
        older: the dataset that it would bring up to date; None where there is none.
        measure: tokens/s of the model here, where the dataset does not say.
        keeps_vectors: texts that the dataset holds are not computed.

    Raises:
        InputError: the corpus cannot be read.
        OutputError: a file of the dataset cannot be read.
    """
    from embedq_worker.tokenization import TextTokenizer

    index = _Index(older, wanted)
    known = IdSet()
    if older is not None and older.files and keeps_vectors:
        for batch in older.batches(["text_sha256"], batch_rows=1 << 20):
            known.add(text_keys(batch.column("text_sha256")))
    tokenizer = TextTokenizer.load(checkpoint.tokenizer_file, max_length=checkpoint.max_length, threads=1)
    unchanged = changed = new = unusable = computed = tokens = 0
    for block in read_corpus(corpus, options=options):
        unusable += block.duplicates + len(block.rejects)
        documents = block.documents
        digests = hash_texts(documents.column("text"))
        same, other = index.compare(documents, digests)
        unchanged, changed, new = unchanged + same, changed + other, new + documents.num_rows - same - other
        fresh = known.add(text_keys(digests))
        texts = documents.column("text").filter(pa.array(fresh))
        if len(texts):
            computed += len(texts)
            tokens += int(tokenizer.encode_as(texts, wanted.encoding).offsets[-1])
    documents_bytes = _row_bytes(older, wanted, checkpoint) * (unchanged + changed + new)
    speed, measured = _speed(older, measure)
    return Estimate(
        unchanged,
        changed,
        new,
        index.unseen,
        unusable,
        computed,
        tokens,
        round(documents_bytes),
        speed,
        measured,
    )


class _Index:
    """What the dataset holds, by id: 17 bytes a row."""

    def __init__(self, older: DatasetReader | None, wanted: RunSpec) -> None:
        self._columns = (*wanted.metadata, "text") if wanted.keep_text else wanted.metadata
        self._chunked = older is not None and older.chunked and wanted.encoding.on_long is OnLong.CHUNK
        ids, contents = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        if older is not None and older.files:
            kept = [name for name in self._columns if name in older.schema.names]
            # A column that the dataset lacks, or has in another type, changes every document.
            fields = wanted.metadata_fields | {"text": pa.string()}
            alike = all(name in kept and older.schema.field(name).type == fields[name] for name in self._columns)
            alike &= len(older.schema) == 6 + len(self._columns)
            for batch in older.batches([*older.key, "text_sha256", *kept], batch_rows=1 << 16):
                ids.append(row_keys(batch, chunked=self._chunked))
                contents.append(
                    _contents(batch, batch.column("text_sha256"), self._columns) if alike else ~np.zeros_like(ids[-1])
                )
        joined = np.concatenate(ids)
        order = np.argsort(joined, kind="stable")
        self._ids, self._contents = joined[order], np.concatenate(contents)[order]
        self._seen = np.zeros(len(order), dtype=np.bool_)

    def compare(self, documents: pa.RecordBatch, digests: pa.FixedSizeBinaryArray) -> tuple[int, int]:
        """(documents that are as they were, documents whose id was there with another content).

        `digests` are the SHA-256 of their texts.
        """
        if not len(self._ids) or not documents.num_rows:
            return 0, 0
        ids = row_keys(documents, chunked=self._chunked)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        there = self._ids[at] == ids
        self._seen[at[there]] = True
        contents = _contents(documents, digests, self._columns)
        same = there & (self._contents[at] == contents)
        return int(same.sum()), int((there & ~same).sum())

    @property
    def unseen(self) -> int:
        return int(len(self._seen) - self._seen.sum())


def _contents(rows: pa.RecordBatch, digests: pa.FixedSizeBinaryArray, columns: tuple[str, ...]) -> NDArray[np.uint64]:
    """64-bit hashes [n] of texts and kept columns."""
    hashes = text_keys(digests)
    for number, name in enumerate(columns):
        column = rows.column(name)
        texts = _texts(column)
        own = hash_ids(texts.fill_null("")) ^ column.is_null().to_numpy(zero_copy_only=False).astype(np.uint64)
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + own * np.uint64(2 * number + 3)
    return hashes


def _texts(column: pa.Array) -> pa.StringArray:
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        return pa.array([None if value is None else repr(value) for value in column.to_pylist()], pa.string())


def _row_bytes(older: DatasetReader | None, wanted: RunSpec, checkpoint: Checkpoint) -> float:
    encoding = wanted.encoding
    if older is not None and older.rows and older.spec.encoding.dimensions == encoding.dimensions:
        return older.size_bytes / older.rows
    return encoding.vector_type.row_bytes(encoding.dimensions or checkpoint.dimension) + _MORE_BYTES


def _speed(older: DatasetReader | None, measure: Callable[[], float]) -> tuple[float, str]:
    if older is not None and older.spec.model_fingerprint is not None:
        seconds = older.summary.get("finished_at", 0) - older.spec.created_at
        if older.summary.get("tokens", 0) >= _LEAST_TOKENS and seconds > 0:
            return older.summary["tokens"] / seconds, "as this dataset was made, pauses included"
    return measure(), f"measured now with texts of {_TEXT_TOKENS} tokens"


def measured_speed(checkpoint: Checkpoint, settings: EngineSettings) -> float:
    """tokens/s of the model on this machine, from one full batch after a first one."""
    from embedq_worker.engine import load_engine
    from embedq_worker.engine.tuning import uniform_batch

    engine = load_engine(checkpoint, settings)
    try:
        length = min(_TEXT_TOKENS, engine.max_length)
        tokens = max(length, engine.max_batch_tokens // length * length)
        batch = uniform_batch(tokens, length, vocab_size=checkpoint.vocab_size)
        engine.encode(batch)
        start = time.perf_counter()
        engine.encode(batch)
        return tokens / (time.perf_counter() - start)
    finally:
        engine.close()
