"""Jobs become packed token batches: every document once, with its run, or a dead letter with its reason."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import redis
from embedq_broker.commit import CommitOutcome
from embedq_broker.consume import Consumer, Entry, Stage
from embedq_broker.keys import Keys
from embedq_broker.registry import EnqueueOutcome, Registry
from embedq_broker.settings import BrokerSettings
from embedq_schemas.dead_letter import Stage as FailedStage
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import DocumentErrorCode
from embedq_schemas.job import Codec, encode_job
from embedq_schemas.names import Lane
from embedq_schemas.run import ParquetSink, RunSpec, RunStatus, StreamSink
from embedq_schemas.token_batch import TokenBatch
from embedq_worker.runs import RunCache
from embedq_worker.tokenization import TextTokenizer
from embedq_worker.tokenizer_stage import TokenizerStage
from qwen3_tokenizer import write_small_tokenizer

MAX_LENGTH = 16
VOCAB_SIZE = 700
BUDGET = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    file = write_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return TextTokenizer.load(file, max_length=MAX_LENGTH, backend="huggingface")


class Line:
    """A tokenizer stage between two streams of a real server."""

    def __init__(self, client: redis.Redis, tokenizer: TextTokenizer, *, share_prefixes: bool = False) -> None:
        self.client = client
        self.keys = Keys("q")
        self.registry = Registry(client, self.keys)
        self.tokenizer = tokenizer
        self.consumer = self._consumer("tokenizer", Stage.TOKENIZE)
        self.embedder = self._consumer("embedder", Stage.EMBED)
        runs = RunCache(self.registry, url="redis://test", give_up=lambda: True)
        settings = BrokerSettings(max_deliveries=3)
        self.stage = TokenizerStage(
            *(self.consumer, tokenizer, runs, settings),
            max_length=MAX_LENGTH,
            vocab_size=VOCAB_SIZE,
            share_prefixes=share_prefixes,
        )
        self.positions: Counter[str] = Counter()

    def _consumer(self, name: str, stage: Stage) -> Consumer:
        consumer = Consumer(self.client, self.keys, stage, name, lease_ms=60_000)
        consumer.ensure_groups()
        return consumer

    def run(self, name: str, *, sink: StreamSink | ParquetSink | None = None, **more: Any) -> RunSpec:
        spec = RunSpec(run=name, queue="q", sink=sink or StreamSink(), created_at=1.0, **more)
        return self.registry.create(spec)

    def send(self, spec: RunSpec, texts: list[str], payload: bytes | None = None, **columns: list[Any]) -> None:
        at = self.positions[spec.run]
        ordinals = list(range(at * 100, at * 100 + len(texts)))
        table = {"id": [f"{spec.run}-{o}" for o in ordinals], "ordinal": ordinals, "text": texts, **columns}
        sent = self.registry.enqueue(
            spec,
            expected=str(at) if at else "",
            position=str(at + 1),
            max_backlog_bytes=1 << 30,
            documents=len(texts),
            payload=encode_job(pa.RecordBatch.from_pydict(table)) if payload is None else payload,
        )
        assert sent.outcome is EnqueueOutcome.OK
        self.positions[spec.run] += 1

    def take(self) -> list[Entry]:
        return self.consumer.read(self.client, [Lane.BULK], count=100, block_ms=None)

    def settle(self, entries: list[Entry] | None = None, budget: int = BUDGET) -> tuple[int, int]:
        entries = self.take() if entries is None else entries
        return self.stage.settle(lambda commit: commit.send(self.client), entries, Lane.BULK, budget)

    def batches(self) -> list[tuple[Entry, TokenBatch]]:
        entries = self.embedder.read(self.client, [Lane.BULK], count=1000, block_ms=None)
        decoded = [(e, TokenBatch.decode(e.payload, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)) for e in entries]
        assert all(batch.num_documents == entry.documents for entry, batch in decoded)
        return decoded

    def documents(self) -> dict[str, dict[str, Any]]:
        """run/id -> row, of all token batches; no document occurs twice."""
        found: dict[str, dict[str, Any]] = {}
        for entry, batch in self.batches():
            rows = iter(batch.table.to_pylist())
            for share in entry.shares:
                for _ in range(share.documents):
                    row = next(rows)
                    assert row["id"].startswith(f"{share.run}-")
                    assert row["id"] not in found
                    found[row["id"]] = row
        return found

    def letters(self, run: str) -> list[tuple[str | None, DocumentErrorCode, FailedStage]]:
        return [(letter.id, letter.code, letter.stage) for _, letter in self.registry.dead_letters(run)]


@pytest.fixture
def line(redis_client: redis.Redis, tokenizer: TextTokenizer) -> Line:
    return Line(redis_client, tokenizer)


TEXTS = ["a", "the quick brown fox", "", "ü" * 5, "one two three four five six", "x y z"] * 4


def test_every_document_is_packed_once_with_the_tokenizers_ids_and_its_own_columns(line: Line) -> None:
    spec = line.run("r", metadata=("lang", "missing"), keep_text=True)
    for start in range(0, len(TEXTS), 8):
        line.send(spec, TEXTS[start : start + 8], lang=[f"l{i}" for i in range(8)], unwanted=["x"] * 8)
    documents, tokens = line.settle()
    found = line.documents()
    assert documents == len(found) == len(TEXTS)
    assert tokens == sum(len(row["input_ids"]) for row in found.values())
    expected = line.tokenizer.encode(pa.array(TEXTS))
    for number, text in enumerate(TEXTS):
        row = found[f"r-{number // 8 * 100 + number % 8}"]
        ids = expected.input_ids[expected.offsets[number] : expected.offsets[number + 1]].tolist()
        assert row["input_ids"] == ids
        assert (row["text"], row["lang"], row["missing"]) == (text, f"l{number % 8}", None)
        assert "unwanted" not in row
        assert row["text_sha256"] == hashlib.sha256(text.encode()).digest()
        assert (row["n_tokens"], row["truncated"]) == (
            int(expected.n_tokens[number]),
            bool(expected.truncated[number]),
        )
    assert line.client.xlen(line.keys.jobs(Lane.BULK)) == 0
    assert int(line.client.hget(line.keys.run("r"), "ready")) == len(TEXTS)


def test_metadata_have_the_runs_types_whatever_a_job_brings_and_runs_of_other_types_stay_apart(line: Line) -> None:
    names = ("year", "tags")
    typed = line.run("t", metadata=names, metadata_types=("int64", "list<item: string>"))
    plain = line.run("p", metadata=names)
    line.send(typed, ["a", "b"], year=[1, None], tags=[["x"], []])
    line.send(typed, ["c", "d"], year=["7", None])
    line.send(plain, ["e"], year=["eight"])
    line.settle()
    found = {name: (row["year"], row["tags"]) for name, row in line.documents().items()}
    assert found == {
        "t-0": (1, ["x"]),
        "t-1": (None, []),
        "t-100": (7, None),
        "t-101": (None, None),
        "p-0": ("eight", None),
    }
    line.send(typed, ["f"], year=["nine"])
    line.settle()
    assert line.letters("t") == [(None, DocumentErrorCode.INVALID_JOB, FailedStage.TOKENIZE)]
    (letter,) = (letter for _, letter in line.registry.dead_letters("t"))
    assert "metadata column year is not int64" in letter.message


def test_no_batch_is_above_the_budget_unless_it_is_one_document(line: Line) -> None:
    line.send(line.run("r"), TEXTS)
    line.settle(budget=10)
    batches = [batch for _, batch in line.batches()]
    assert sum(batch.num_documents for batch in batches) == len(TEXTS)
    assert all(batch.num_tokens <= 10 or batch.num_documents == 1 for batch in batches)
    assert any(batch.num_documents > 1 for batch in batches)


def test_texts_that_begin_alike_come_together_where_their_beginning_is_computed_once(
    redis_client: redis.Redis, tokenizer: TextTokenizer
) -> None:
    line = Line(redis_client, tokenizer, share_prefixes=True)
    spec = line.run("r")
    heads = ["the quick brown fox jumps", "one two three four five", "x y z x y z x y z"]
    for _ in range(3):
        line.send(spec, [f"{head} {end}" for end in "abcd" for head in heads])
    documents, _ = line.settle(budget=2 * MAX_LENGTH)
    batches = [batch.table.column("text_sha256").to_pylist() for _, batch in line.batches()]
    assert documents == sum(map(len, batches)) == 36
    names = {hashlib.sha256(f"{head} {end}".encode()).digest(): head for head in heads for end in "abcd"}
    runs_of_heads = [head for batch in batches for head, _ in itertools.groupby(names[sha] for sha in batch)]
    assert len(batches) > 1
    # Every head once, but for a batch that ends amid its texts.
    assert len(runs_of_heads) <= len(heads) + len(batches) - 1


def test_texts_with_little_in_common_come_longest_first_all_the_same(
    redis_client: redis.Redis, tokenizer: TextTokenizer
) -> None:
    line = Line(redis_client, tokenizer, share_prefixes=True)
    line.send(line.run("r"), ["b" * 3, "the quick brown fox", "one two three four", "x y"])
    line.settle(budget=100)
    ((_, batch),) = line.batches()
    lengths = np.diff(batch.cu_seqlens).tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_runs_of_equal_options_share_batches_and_others_do_not(line: Line, tmp_path: Path) -> None:
    line.send(line.run("a"), ["x"] * 3)
    line.send(line.run("b"), ["y"] * 2)
    line.send(line.run("c", encoding=EncodingOptions(dimensions=4)), ["x"])
    line.send(line.run("d", sink=ParquetSink(path=str(tmp_path / "d"))), ["x"])
    line.send(line.run("e", sink=ParquetSink(path=str(tmp_path / "e"))), ["x"])
    line.send(line.run("f", keep_text=True), ["x"])
    line.settle(budget=1000)
    batches = line.batches()
    groups = sorted([(share.run, share.documents) for share in entry.shares] for entry, _ in batches)
    assert groups == [[("a", 3), ("b", 2)], [("c", 1)], [("d", 1)], [("e", 1)], [("f", 1)]]


def test_shares_name_the_documents_of_each_run_however_they_are_packed(line: Line) -> None:
    for name in ("b", "a", "c"):
        line.send(line.run(name), TEXTS)
    line.settle(budget=BUDGET)
    assert len(line.documents()) == 3 * len(TEXTS)


def test_a_prompt_goes_before_every_text_and_long_texts_are_cut_or_refused(line: Line) -> None:
    long = "word " * 40
    line.send(line.run("p", encoding=EncodingOptions(prompt="query: ")), ["fox"])
    line.send(line.run("cut", encoding=EncodingOptions(max_length=5)), [long, "a"])
    line.send(line.run("no", encoding=EncodingOptions(on_long=OnLong.ERROR)), ["a", long, "b"])
    line.settle()
    found = line.documents()
    prompted = line.tokenizer.encode(pa.array(["fox"]), prompt="query: ").input_ids.tolist()
    assert found["p-0"]["input_ids"] == prompted
    assert found["p-0"]["text_sha256"] == hashlib.sha256(b"fox").digest()
    assert (len(found["cut-0"]["input_ids"]), found["cut-0"]["truncated"]) == (5, True)
    assert found["cut-0"]["n_tokens"] > MAX_LENGTH
    assert {id for id in found if id.startswith("no-")} == {"no-0", "no-2"}
    assert line.letters("no") == [("no-1", DocumentErrorCode.TOO_LONG, FailedStage.TOKENIZE)]
    assert line.registry.state("no").counters.failed == 1


@pytest.mark.parametrize("payload", [b"", b"garbage", "short"], ids=str)
def test_a_job_that_does_not_decode_counts_each_document_as_failed_and_stops_nothing(
    line: Line, payload: bytes | str
) -> None:
    spec, other = line.run("bad"), line.run("good")
    table = pa.RecordBatch.from_pydict({"id": ["a"], "ordinal": [0], "text": ["t"]})
    data = bytes(encode_job(table)) if isinstance(payload, str) else payload
    line.client.xadd(line.keys.jobs(Lane.BULK), {"v": 1, "codec": Codec.ARROW, "run": "bad", "n": 3, "payload": data})
    line.registry.enqueue(spec, expected="", position="1", max_backlog_bytes=1, settled=3)
    line.send(other, ["t"])
    line.settle()
    assert line.letters("bad") == [(None, DocumentErrorCode.INVALID_JOB, FailedStage.TOKENIZE)] * 3
    assert set(line.documents()) == {"good-0"}
    assert line.registry.state("bad").counters.failed == 3
    assert line.client.xlen(line.keys.jobs(Lane.BULK)) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"v": 2, "codec": "arrow", "run": "r", "n": 2, "payload": b""},
        {"v": 1, "codec": "pickle", "run": "r", "n": 2, "payload": b""},
        {"v": 1, "codec": "arrow", "run": "r", "n": 2},
    ],
    ids=["version", "codec", "payload"],
)
def test_an_entry_of_another_kind_is_a_dead_letter_of_its_run(line: Line, fields: dict[Any, Any]) -> None:
    line.run("r")
    line.client.xadd(line.keys.jobs(Lane.BULK), fields)
    line.settle()
    assert line.letters("r") == [(None, DocumentErrorCode.INVALID_JOB, FailedStage.TOKENIZE)] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"run": "nobody", "n": 1, "v": 1, "codec": "arrow", "payload": b""},
        {"run": "no/body", "n": 1, "v": 1, "codec": "arrow", "payload": b""},
        {"run": "r", "n": 10**18, "v": 1, "codec": "arrow", "payload": b""},
        {"run": "r", "n": -1, "v": 1, "codec": "arrow", "payload": b""},
        {"what": "ever"},
    ],
    ids=["unknown run", "impossible run", "too many", "negative", "foreign"],
)
def test_an_entry_of_no_usable_run_is_dropped(line: Line, fields: dict[Any, Any]) -> None:
    line.run("r")
    line.client.xadd(line.keys.jobs(Lane.BULK), fields)
    assert line.settle() == (0, 0)
    assert line.client.xlen(line.keys.jobs(Lane.BULK)) == 0
    assert line.registry.state("r").dead_letters == 0


def test_documents_of_a_cancelled_run_are_skipped(line: Line) -> None:
    spec = line.run("r")
    line.send(spec, ["a", "b"])
    line.registry.cancel("r")
    assert line.settle() == (0, 0)
    assert line.registry.state("r").counters.skipped == 2
    assert line.registry.status("r") is RunStatus.CANCELLED
    assert line.batches() == []


def test_jobs_that_another_consumer_took_over_are_left_out_and_the_others_committed(line: Line) -> None:
    spec = line.run("r")
    line.send(spec, ["a"])
    line.send(spec, ["b"])
    entries = line.take()
    line.client.xclaim(entries[0].stream, Stage.TOKENIZE, "thief", 0, [entries[0].id])
    assert line.settle(entries)[0] == 1
    assert set(line.documents()) == {"r-100"}
    assert line.client.xlen(line.keys.jobs(Lane.BULK)) == 1
    line.client.xclaim(entries[1].stream, Stage.TOKENIZE, "thief", 0, [entries[1].id])
    assert line.settle([entries[1]]) == (0, 0)


def test_a_job_that_ends_its_worker_again_and_again_is_split_until_the_guilty_document_stands_alone(
    line: Line,
) -> None:
    spec = line.run("r")
    line.send(spec, ["a", "b", "c"])

    def deliver_again(entries: list[Entry]) -> list[Entry]:
        """As if the process had ended on each of them, time after time."""
        for _ in range(3):
            for entry in entries:
                line.consumer.begin_try(entry)
            line.consumer.forget(entries)
            entries = line.consumer.adopt(Lane.BULK, count=100)
        return entries

    entries = deliver_again(line.take())
    assert [entry.deliveries for entry in entries] == [4]
    assert line.settle(entries) == (0, 0)
    singles = line.take()
    assert [(entry.documents, entry.deliveries) for entry in singles] == [(1, 1)] * 3
    assert line.registry.backlog_bytes() == sum(len(entry.payload) for entry in singles)
    guilty = deliver_again(singles)
    assert line.settle(guilty[:1]) == (0, 0)
    assert line.letters("r") == [("r-0", DocumentErrorCode.MAX_DELIVERIES, FailedStage.TOKENIZE)]
    assert int(line.client.hget(line.keys.run("r"), "ready")) == 1


def test_a_window_sent_twice_adds_its_batches_once(line: Line) -> None:
    line.send(line.run("r"), ["a"])
    commit, documents, _ = line.stage.window(line.take(), Lane.BULK, BUDGET)
    assert documents == 1
    assert commit.send(line.client).outcome is CommitOutcome.OK
    assert commit.send(line.client).outcome is CommitOutcome.DUP
    assert len(line.batches()) == 1
