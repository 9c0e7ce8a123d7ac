"""Jobs of token ids go through the tokenizer stage unchanged, and a bad document fails alone."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from embedq_schemas.dead_letter import Stage as FailedStage
from embedq_schemas.encoding import EncodingOptions, OnLong, TruncationSide
from embedq_schemas.errors import DocumentErrorCode
from embedq_schemas.job import INPUT_IDS_TYPE, encode_job
from embedq_schemas.names import Lane
from embedq_worker.tokenization import TextTokenizer
from qwen3_tokenizer import write_small_tokenizer
from test_tokenizer_stage import MAX_LENGTH, VOCAB_SIZE, Line


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    file = write_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return TextTokenizer.load(file, max_length=MAX_LENGTH, backend="huggingface")


@pytest.fixture
def line(redis_client: redis.Redis, tokenizer: TextTokenizer) -> Line:
    return Line(redis_client, tokenizer)


def send_ids(line: Line, spec: Any, lists: list[list[int]], **columns: list[str]) -> None:
    ordinals = list(range(len(lists)))
    ids = [f"{spec.run}-{ordinal}" for ordinal in ordinals]
    table = {"id": ids, "ordinal": ordinals, "input_ids": pa.array(lists, INPUT_IDS_TYPE), **columns}
    line.send(spec, [""] * len(lists), payload=bytes(encode_job(pa.RecordBatch.from_pydict(table))))


def test_ids_are_the_input_without_prompt_or_special_tokens(line: Line) -> None:
    spec = line.run("r", encoding=EncodingOptions(prompt="query: "), metadata=("lang",), keep_text=True)
    lists = [[5, 6, 7], [VOCAB_SIZE - 1], list(range(MAX_LENGTH + 3))]
    send_ids(line, spec, lists, lang=["de", "en", "fr"])
    assert line.settle() == (3, 3 + 1 + MAX_LENGTH)
    rows = line.documents()
    assert [rows[f"r-{n}"]["input_ids"] for n in range(3)] == [*lists[:2], lists[2][:MAX_LENGTH]]
    assert [rows[f"r-{n}"]["n_tokens"] for n in range(3)] == [3, 1, MAX_LENGTH + 3]
    assert [rows[f"r-{n}"]["truncated"] for n in range(3)] == [False, False, True]
    assert [(rows[f"r-{n}"]["lang"], rows[f"r-{n}"]["text"]) for n in range(3)] == [
        ("de", None),
        ("en", None),
        ("fr", None),
    ]
    for number, ids in enumerate(lists):
        assert rows[f"r-{number}"]["text_sha256"] == hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).digest()


def test_a_document_outside_the_vocabulary_or_without_ids_fails_alone(line: Line) -> None:
    spec = line.run("r", encoding=EncodingOptions(on_long=OnLong.ERROR, truncation_side=TruncationSide.LEFT))
    send_ids(line, spec, [[1], [VOCAB_SIZE], [], [2**32 - 1, 1], [3], [4] * (MAX_LENGTH + 1)])
    line.settle()
    assert set(line.documents()) == {"r-0", "r-4"}
    bad = DocumentErrorCode.INVALID_INPUT_IDS
    assert sorted(line.letters("r")) == [
        ("r-1", bad, FailedStage.TOKENIZE),
        ("r-2", bad, FailedStage.TOKENIZE),
        ("r-3", bad, FailedStage.TOKENIZE),
        ("r-5", DocumentErrorCode.TOO_LONG, FailedStage.TOKENIZE),
    ]


def test_texts_and_ids_of_one_run_and_of_others_all_arrive(line: Line) -> None:
    texts, ids = line.run("t"), line.run("i")
    line.send(texts, ["a", "b"])
    send_ids(line, ids, [[1], [2]])
    line.settle()
    rows = line.documents()
    assert set(rows) == {"t-0", "t-1", "i-0", "i-1"}
    assert rows["i-1"]["input_ids"] == [2]


def test_a_job_of_ids_that_ends_its_process_is_split(line: Line, tmp_path: Path) -> None:
    spec = line.run("r")
    send_ids(line, spec, [[1], [2]])
    (entry,) = line.take()
    commit, _, _ = line.stage.window([entry], Lane.BULK, 100, fatal=True)
    commit.send(line.client)
    singles = line.take()
    assert [each.documents for each in singles] == [1, 1]
    line.settle(singles)
    assert {name: row["input_ids"] for name, row in line.documents().items()} == {"r-0": [1], "r-1": [2]}
