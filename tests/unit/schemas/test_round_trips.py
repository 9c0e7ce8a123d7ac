"""What is written in a wire format reads back the same, for any documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from embedq_schemas.dead_letter import MAX_MESSAGE_CHARS, DeadLetter, Stage, clip
from embedq_schemas.encoding import EncodingOptions, OnLong, OnSpecialTokens, TruncationSide
from embedq_schemas.errors import CodecError, DocumentErrorCode, UnsupportedVersionError
from embedq_schemas.job import COLUMNS, Codec, decode_job, encode_job
from embedq_schemas.manifest import MANIFEST_NAME, PublishedFile, Upload, read_manifest
from embedq_schemas.names import MAX_METADATA_COLUMNS, RESERVED_COLUMNS, Lane
from embedq_schemas.run import Durability, ParquetSink, RunCounters, RunSpec, RunState, RunStatus, StreamSink
from embedq_schemas.token_batch import TokenBatch, make_token_batch
from embedq_schemas.vector_batch import VectorBatch, make_vector_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
COLUMN_NAME = TEXT.filter(lambda name: name not in RESERVED_COLUMNS)
ORDINAL = st.integers(0, 2**63 - 1)


@st.composite
def job_tables(draw: st.DrawFn) -> pa.RecordBatch:
    rows = draw(st.integers(1, 6))
    names = draw(st.lists(COLUMN_NAME, max_size=3, unique=True))

    def column(values: st.SearchStrategy[object], kind: pa.DataType) -> pa.Array:
        return pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)

    arrays = [column(TEXT, pa.string()), column(ORDINAL, pa.int64()), column(TEXT, pa.string())]
    arrays += [column(st.none() | TEXT, pa.string()) for _ in names]
    return pa.RecordBatch.from_arrays(arrays, names=[*COLUMNS, *names])


@st.composite
def token_batches(draw: st.DrawFn) -> TokenBatch:
    documents = draw(job_tables())
    lengths = draw(st.lists(st.integers(1, 5), min_size=documents.num_rows, max_size=documents.num_rows))
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    total = sum(lengths)
    ids = np.array(draw(st.lists(st.integers(0, 99), min_size=total, max_size=total)), np.uint32)
    metadata = tuple(documents.schema.names[len(COLUMNS) :])
    return make_token_batch(
        documents,
        input_ids=ids,
        offsets=offsets,
        n_tokens=np.array(lengths, np.int32),
        truncated=np.array(lengths) == 5,
        text_sha256=pa.array([bytes(32)] * documents.num_rows, pa.binary(32)),
        metadata=metadata,
    )


@settings(max_examples=60, deadline=None)
@given(job_tables())
def test_an_arrow_job_reads_back_the_same(table: pa.RecordBatch) -> None:
    decoded = decode_job(encode_job(table), Codec.ARROW)
    assert decoded.schema.names == table.schema.names
    assert decoded.to_pydict() == table.to_pydict()


@settings(max_examples=60, deadline=None)
@given(job_tables())
def test_a_json_job_reads_as_the_arrow_job_of_the_same_documents(table: pa.RecordBatch) -> None:
    names = table.schema.names[len(COLUMNS) :]
    documents = [
        {
            "id": row["id"],
            "ordinal": row["ordinal"],
            "text": row["text"],
            "metadata": {name: row[name] for name in names},
        }
        for row in table.to_pylist()
    ]
    decoded = decode_job(json.dumps({"v": 1, "documents": documents}).encode(), Codec.JSON)
    assert decoded.to_pydict() == table.to_pydict()


def test_a_json_job_numbers_its_documents_where_they_do_not_say_and_leaves_absent_metadata_null() -> None:
    documents = [{"id": "a", "text": "x", "metadata": {"k": "1"}}, {"id": "b", "text": "y", "ordinal": 7}]
    decoded = decode_job(json.dumps({"v": 1, "documents": documents}).encode(), Codec.JSON)
    assert decoded.to_pydict() == {"id": ["a", "b"], "ordinal": [0, 7], "text": ["x", "y"], "k": ["1", None]}


@settings(max_examples=60, deadline=None)
@given(token_batches(), st.data())
def test_a_token_batch_reads_back_the_same_and_so_does_any_slice_or_selection(
    batch: TokenBatch, data: st.DataObject
) -> None:
    n = batch.num_documents
    start = data.draw(st.integers(0, n - 1))
    length = data.draw(st.integers(1, n - start))
    rows = np.array(data.draw(st.permutations(range(n))), np.int64)
    whole = batch.table.to_pydict()
    for part, expected in ((batch.slice(start, length), range(start, start + length)), (batch.select(rows), rows)):
        decoded = TokenBatch.decode(part.encode(), vocab_size=100, max_length=5)
        assert decoded.table.to_pydict() == {name: [column[i] for i in expected] for name, column in whole.items()}
        assert decoded.cu_seqlens[0] == 0
        assert decoded.num_tokens == len(decoded.input_ids) == sum(len(whole["input_ids"][i]) for i in expected)
        assert decoded.input_ids.tolist() == [token for i in expected for token in whole["input_ids"][i]]
        assert decoded.cu_seqlens.dtype == np.int32
        assert decoded.input_ids.dtype == np.uint32


def test_a_slice_is_written_without_its_neighbours_ids() -> None:
    n = 1000
    documents = pa.RecordBatch.from_pydict({"id": ["d"] * n, "ordinal": list(range(n)), "text": [""] * n})
    batch = make_token_batch(
        documents,
        input_ids=np.zeros(n * 10, np.uint32),
        offsets=np.arange(n + 1, dtype=np.int32) * 10,
        n_tokens=np.full(n, 10, np.int32),
        truncated=np.zeros(n, np.bool_),
        text_sha256=pa.array([bytes(32)] * n, pa.binary(32)),
        metadata=(),
    )
    assert len(batch.slice(500, 1).encode()) < 4096


@settings(max_examples=40, deadline=None)
@given(token_batches(), st.integers(1, 5), st.data())
def test_a_vector_batch_reads_back_the_same_and_so_does_any_slice(
    tokens: TokenBatch, dimension: int, data: st.DataObject
) -> None:
    values = np.arange(tokens.num_documents * dimension, dtype=np.float32).reshape(-1, dimension)
    batch = make_vector_batch(tokens, values)
    decoded = VectorBatch.decode(batch.encode())
    assert decoded.dimension == dimension
    assert np.array_equal(decoded.vectors, values)
    assert decoded.table.to_pydict() == batch.table.to_pydict()
    start = data.draw(st.integers(0, tokens.num_documents - 1))
    part = VectorBatch.decode(VectorBatch(batch.table.slice(start)).encode())
    assert np.array_equal(part.vectors, values[start:])
    assert part.table.to_pydict() == batch.table.slice(start).to_pydict()


def test_vectors_must_be_as_many_as_their_documents() -> None:
    documents = pa.RecordBatch.from_pydict({"id": ["a"], "ordinal": [0], "text": ["t"]})
    tokens = make_token_batch(
        documents,
        input_ids=np.array([1], np.uint32),
        offsets=np.array([0, 1], np.int32),
        n_tokens=np.array([1], np.int32),
        truncated=np.array([False]),
        text_sha256=pa.array([bytes(32)], pa.binary(32)),
        metadata=(),
    )
    with pytest.raises(CodecError, match="2 vectors for 1 documents"):
        make_vector_batch(tokens, np.zeros((2, 3), np.float32))


@given(
    ordinal=st.integers(-1, 2**63 - 1),
    stage=st.sampled_from(Stage),
    code=st.sampled_from(DocumentErrorCode),
    message=TEXT,
    id=st.none() | TEXT,
    line=st.none() | st.integers(1, 2**63 - 1),
)
def test_a_dead_letter_reads_back_the_same_and_is_one_line(**fields: object) -> None:
    letter = DeadLetter(**fields)  # type: ignore[arg-type]
    assert b"\n" not in letter.encode()
    assert DeadLetter.decode(letter.encode()) == letter


@given(st.text(max_size=2000))
def test_a_clipped_message_is_one_bounded_line_that_can_be_encoded(message: str) -> None:
    clipped = clip(message)
    assert 0 < len(clipped) <= MAX_MESSAGE_CHARS
    assert clipped.splitlines() == [clipped]
    clipped.encode()


@st.composite
def published_files(draw: st.DrawFn) -> PublishedFile:
    bounds = sorted(draw(st.lists(ORDINAL, max_size=6, unique=True).filter(lambda found: len(found) % 2 == 0)))
    return PublishedFile(
        token=draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        run=draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")),
        rows=draw(st.integers(1, 2**40)),
        size_bytes=draw(st.integers(1, 2**40)),
        tokens=draw(st.integers(0, 2**40)),
        ordinals=tuple(bounds),
    )


@given(published_files())
def test_a_published_file_reads_back_the_same_and_is_one_line(file: PublishedFile) -> None:
    assert b"\n" not in file.encode()
    assert PublishedFile.decode(file.encode()) == file


UPLOADS = st.builds(
    Upload,
    id=st.text(min_size=1, max_size=40),
    parts=st.lists(st.text(max_size=40), min_size=1, max_size=3).map(tuple),
    etag=st.just(UNSET) | st.text(max_size=40),
)


@given(published_files(), UPLOADS)
def test_a_commit_record_says_how_an_upload_is_published(file: PublishedFile, upload: Upload) -> None:
    record = structs.replace(file, upload=upload)
    assert PublishedFile.decode(record.encode()) == record
    assert structs.replace(record, upload=UNSET).encode() == file.encode()


@settings(deadline=None)
@given(st.lists(published_files(), min_size=1, max_size=4), st.data())
def test_a_manifest_folds_repeated_lines_and_ignores_torn_ones(
    tmp_path_factory: pytest.TempPathFactory, files: list[PublishedFile], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("dataset")
    torn = files[0].encode()[: data.draw(st.integers(0, len(files[0].encode()) - 1))]
    lines = [file.encode() for file in [*files, *files]]
    lines.insert(data.draw(st.integers(0, len(lines))), torn)
    (folder / MANIFEST_NAME).write_bytes(b"\n".join(lines) + data.draw(st.sampled_from([b"", b"\n"])))
    assert read_manifest(folder) == {file.token: file for file in files}


def test_a_missing_manifest_is_an_empty_one_and_a_foreign_line_is_an_error(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) == {}
    (tmp_path / MANIFEST_NAME).write_bytes(b'{"something":"else"}\n')
    with pytest.raises(CodecError):
        read_manifest(tmp_path)


SINKS = st.builds(
    ParquetSink,
    path=TEXT.filter(lambda t: "\0" not in t and ".." not in t.split("/")).map(lambda t: "/" + t)
    | st.from_regex(r"\As3://[a-z]{3,9}(/[a-z0-9=.-]{1,5}[a-z])*\Z"),
    file_bytes=st.integers(1 << 16, 1 << 30),
) | st.builds(StreamSink, ttl_s=st.integers(1, 1000))

SPECS = st.builds(
    RunSpec,
    run=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"),
    queue=st.just("q"),
    model_fingerprint=st.none() | TEXT,
    encoding=st.builds(
        EncodingOptions,
        dimensions=st.none() | st.integers(1, 65536),
        prompt=TEXT,
        normalize=st.none() | st.booleans(),
        max_length=st.none() | st.integers(2, 1000),
        truncation_side=st.sampled_from(TruncationSide),
        on_special_tokens=st.sampled_from(OnSpecialTokens),
        on_long=st.sampled_from(OnLong),
    ),
    sink=SINKS,
    lane=st.sampled_from(Lane),
    durability=st.sampled_from(Durability),
    metadata=st.lists(COLUMN_NAME, max_size=3, unique=True).map(tuple),
    keep_text=st.booleans(),
    created_at=st.floats(0, 1e12),
    corpus=st.none() | TEXT,
)


@settings(deadline=None)
@given(SPECS)
def test_a_run_specification_reads_back_the_same_and_asks_for_the_same(spec: RunSpec) -> None:
    decoded = RunSpec.decode(spec.encode())
    assert decoded == spec
    assert decoded.same_request(spec)
    assert decoded.same_request(spec.model_copy(update={"run": "other", "created_at": 0.0, "lane": Lane.BULK}))
    assert not decoded.same_request(spec.model_copy(update={"keep_text": not spec.keep_text}))


@pytest.mark.parametrize(
    "change",
    [
        {"sink": {"kind": "parquet", "path": "relative"}},
        {"sink": {"kind": "parquet", "path": "/a/../etc"}},
        {"sink": {"kind": "parquet", "path": "/a\0b"}},
        {"sink": {"kind": "carrier pigeon"}},
        {"metadata": ["vector"]},
        {"metadata": ["a", "a"]},
        {"metadata": [str(i) for i in range(MAX_METADATA_COLUMNS + 1)]},
        {"run": "a/b"},
        {"queue": "{q}"},
        {"created_at": float("nan")},
        {"encoding": {"dimensions": 0}},
        {"surprise": 1},
    ],
)
def test_a_run_specification_with_a_bad_field_names_the_field(change: dict[str, object]) -> None:
    good = {"run": "r", "queue": "q", "sink": {"kind": "stream"}, "created_at": 1.0}
    RunSpec.decode(json.dumps(good).encode())
    with pytest.raises(CodecError, match=next(iter(change))):
        RunSpec.decode(json.dumps(good | change).encode())


def test_a_newer_version_is_called_that_even_if_its_fields_are_unknown() -> None:
    run = {"version": 2, "run": "r", "queue": "q", "sink": {"kind": "stream"}, "created_at": 1.0, "novelty": 1}
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        RunSpec.decode(json.dumps(run).encode())
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        PublishedFile.decode(b'{"v":2,"token":"x","novelty":1}')
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        decode_job(b'{"v":2,"documents":[],"novelty":1}', Codec.JSON)
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        decode_job(b'{"v":2,"documents":[]}', Codec.JSON)
    with pytest.raises(UnsupportedVersionError, match="protobuf"):
        decode_job(b"", "protobuf")


@pytest.mark.parametrize(
    ("input_closed", "counters", "settled"),
    [
        (True, RunCounters(input=3, succeeded=1, failed=1, skipped=1), True),
        (False, RunCounters(input=3, succeeded=1, failed=1, skipped=1), False),
        (True, RunCounters(input=3, succeeded=2), False),
        (True, RunCounters(), True),
    ],
)
def test_a_run_is_settled_when_its_closed_input_adds_up(
    input_closed: bool, counters: RunCounters, settled: bool
) -> None:
    spec = RunSpec(run="r", queue="q", sink=StreamSink(), created_at=0.0)
    state = RunState(spec, RunStatus.IN_PROGRESS, counters, input_closed, None, 0, 0, 0, None, 0.0, 0.0)
    assert state.settled is settled
