"""Whatever bytes arrive, decoding ends in a CodecError or in valid data; the process always lives."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from embedq_schemas import ipc
from embedq_schemas.dead_letter import DeadLetter
from embedq_schemas.errors import CodecError, UnsupportedVersionError
from embedq_schemas.job import INPUT_IDS_TYPE, Codec, decode_job, encode_job
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.names import MAX_METADATA_COLUMNS
from embedq_schemas.quantize import VectorType
from embedq_schemas.run import RunSpec
from embedq_schemas.token_batch import TokenBatch, make_token_batch
from embedq_schemas.vector_batch import VectorBatch, make_vector_batch

VOCAB, LONGEST = 100, 64
STAMPED = {b"embedq.kind": b"job", b"embedq.version": b"1"}

DOCUMENTS = pa.RecordBatch.from_pydict(
    {"id": ["a", "bé", "c"], "ordinal": [0, 1, 2], "text": ["hello", "w", "x" * 50], "lang": ["de", None, "fr"]}
)
IDS = pa.RecordBatch.from_pydict(
    {
        "id": ["a", "b", "c"],
        "ordinal": [0, 1, 2],
        "input_ids": pa.array([[1, 2, 3], [], [2**32 - 1]], INPUT_IDS_TYPE),
        "lang": ["de", None, "fr"],
    }
)
TOKENS = make_token_batch(
    DOCUMENTS,
    input_ids=np.arange(10, dtype=np.uint32),
    offsets=np.array([0, 3, 4, 10], np.int32),
    n_tokens=np.array([3, 1, 6], np.int32),
    truncated=np.zeros(3, np.bool_),
    text_sha256=pa.array([bytes(32)] * 3, pa.binary(32)),
    metadata=("lang",),
)
VECTORS = make_vector_batch(TOKENS, np.ones((3, 4), np.float32))
RANGES = np.array([[0.0] * 4, [1.0] * 4], np.float32)


def read_job(payload: bytes) -> pa.RecordBatch:
    return decode_job(payload, Codec.ARROW)


def read_tokens(payload: bytes) -> pa.RecordBatch:
    return TokenBatch.decode(payload, vocab_size=VOCAB, max_length=LONGEST).table


def read_vectors(payload: bytes) -> pa.RecordBatch:
    return VectorBatch.decode(payload).table


FORMATS: dict[str, tuple[bytes, Callable[[bytes], pa.RecordBatch]]] = {
    "job": (bytes(encode_job(DOCUMENTS)), read_job),
    "job of token ids": (bytes(encode_job(IDS)), read_job),
    "token batch": (bytes(TOKENS.encode()), read_tokens),
    "vector batch": (bytes(VECTORS.encode()), read_vectors),
    "vector batch of float16": (bytes(VECTORS.quantized(VectorType.FLOAT16).encode()), read_vectors),
    "vector batch of int8": (bytes(VECTORS.quantized(VectorType.INT8, RANGES).encode()), read_vectors),
}
JSON_FORMATS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "json job": (
        b'{"v":1,"documents":[{"id":"a","text":"t","ordinal":3,"metadata":{"k":null}}]}',
        lambda payload: decode_job(payload, Codec.JSON),
    ),
    "dead letter": (b'{"ordinal":1,"stage":"embed","code":"too_long","message":"m","id":"x"}', DeadLetter.decode),
    "published file": (
        PublishedFile(token="0" * 32, run="r", rows=1, size_bytes=1, tokens=1, ordinals=(0, 0)).encode(),
        PublishedFile.decode,
    ),
    "run": (b'{"version":1,"run":"r","queue":"q","sink":{"kind":"stream"},"created_at":1.0}', RunSpec.decode),
}
EVERY = FORMATS | JSON_FORMATS


def survives(decode: Callable[[bytes], object], payload: bytes) -> bool:
    """Whether the payload decodes; anything but a CodecError escapes and fails the test."""
    try:
        table = decode(payload)
    except CodecError:
        return False
    if isinstance(table, pa.RecordBatch):
        # What was accepted must be usable to the last value.
        table.to_pydict()
    return True


def damage(payload: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 5))):
        damaged[rng.randrange(len(damaged))] ^= rng.choice((1 << rng.randrange(8), rng.randrange(1, 256)))
    return bytes(damaged)


def damage_all(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    for payload, decode in EVERY.values():
        for _ in range(rounds):
            survives(decode, damage(payload, rng))


@pytest.mark.parametrize("name", EVERY)
def test_a_payload_cut_at_any_length_is_refused_or_whole(name: str) -> None:
    payload, decode = EVERY[name]
    assert survives(decode, payload)
    whole = [length for length in range(len(payload)) if survives(decode, payload[:length])]
    # An Arrow stream may lack its end marker, which is 8 bytes long; nothing else is dispensable.
    assert whole == ([len(payload) - 8] if name in FORMATS else [])


@pytest.mark.parametrize("name", EVERY)
def test_damaged_payloads_never_raise_anything_else(name: str) -> None:
    payload, decode = EVERY[name]
    rng = random.Random(name)
    outcomes = {survives(decode, damage(payload, rng)) for _ in range(1500)}
    assert False in outcomes


def test_damaged_payloads_never_end_the_process() -> None:
    ended = subprocess.run([sys.executable, __file__, "4000"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"status {ended.returncode}: {ended.stderr[-1000:]}"


@pytest.mark.parametrize("name", FORMATS)
def test_any_word_of_the_body_may_be_any_offset(name: str) -> None:
    payload, decode = FORMATS[name]
    for position in range(0, len(payload) - 4, 4):
        for value in (-1, -(2**31), 2**31 - 1, 2**30, 1, 0):
            survives(decode, payload[:position] + struct.pack("<i", value) + payload[position + 4 :])


@pytest.mark.parametrize(
    ("name", "offsets", "hostile"),
    [
        ("job", (0, 5, 6, 56), (0, 5, 6, 57)),
        ("job", (0, 5, 6, 56), (0, 6, 5, 56)),
        ("job", (0, 5, 6, 56), (-5, 5, 6, 56)),
        ("job", (0, 5, 6, 56), (0, 5, 6, 2**31 - 1)),
        ("token batch", (0, 3, 4, 10), (0, 3, 4, 11)),
        ("token batch", (0, 3, 4, 10), (0, 4, 3, 10)),
        ("token batch", (0, 3, 4, 10), (-1, 3, 4, 10)),
        ("token batch", (0, 3, 4, 10), (0, 0, 4, 10)),
    ],
)
def test_offsets_that_leave_the_buffer_or_fall_are_refused(
    name: str, offsets: tuple[int, ...], hostile: tuple[int, ...]
) -> None:
    payload, decode = FORMATS[name]
    found = payload.rindex(struct.pack("<4i", *offsets))
    with pytest.raises(CodecError):
        decode(payload[:found] + struct.pack("<4i", *hostile) + payload[found + 16 :])


def test_an_offset_inside_a_character_is_refused() -> None:
    payload, decode = FORMATS["job"]
    found = payload.index(struct.pack("<4i", 0, 1, 4, 5))
    with pytest.raises(CodecError):
        decode(payload[:found] + struct.pack("<4i", 0, 3, 4, 5) + payload[found + 16 :])


def test_text_that_is_not_utf8_is_refused() -> None:
    payload, decode = FORMATS["job"]
    with pytest.raises(CodecError):
        decode(payload.replace(b"hello", b"hel\xffo"))


def stream(*batches: pa.RecordBatch, metadata: dict[bytes, bytes] | None = None, **options: object) -> bytes:
    """An Arrow stream written as somebody else would write it."""
    stamped = STAMPED if metadata is None else metadata
    sink = pa.BufferOutputStream()
    schema = batches[0].schema.with_metadata(stamped)
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(stamped))
    return sink.getvalue().to_pybytes()


def with_column(name: str, values: pa.Array) -> pa.RecordBatch:
    names = DOCUMENTS.schema.names
    return DOCUMENTS.set_column(names.index(name), name, values)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (stream(DOCUMENTS, metadata={}), "it is"),
        (stream(DOCUMENTS, metadata=STAMPED | {b"embedq.kind": b"token_batch"}), "token_batch"),
        (stream(DOCUMENTS, DOCUMENTS), "more than one"),
        (stream(DOCUMENTS, compression="zstd"), "compressed"),
        (stream(DOCUMENTS, compression="lz4"), "compressed"),
        (stream(DOCUMENTS.slice(0, 0)), "no documents"),
        (stream(DOCUMENTS.select(["ordinal", "id", "text"])), "columns"),
        (stream(DOCUMENTS.select(["id", "ordinal"])), "columns"),
        (stream(with_column("id", DOCUMENTS.column("id").dictionary_encode())), "dictionary"),
        (stream(with_column("lang", DOCUMENTS.column("lang").dictionary_encode())), "dictionary"),
        (stream(with_column("lang", pa.array([b"1", b"2", b"3"]))), "lang"),
        (stream(with_column("ordinal", pa.array([1, 2, 3], pa.int32()))), "ordinal"),
        (stream(with_column("ordinal", pa.array([1, -2, 3]))), "negative"),
        (stream(with_column("ordinal", pa.array([1, None, 3]))), "ordinal holds nulls"),
        (stream(with_column("text", pa.array(["a", None, "b"]))), "text holds nulls"),
        (stream(with_column("text", pa.array(["a", "b", "c"], pa.large_string()))), "text"),
        (stream(DOCUMENTS.rename_columns(["id", "ordinal", "text", "vector"])), "vector"),
        (stream(DOCUMENTS.rename_columns(["id", "ordinal", "text", "text"])), "twice"),
        (
            stream(
                pa.RecordBatch.from_arrays(
                    [*DOCUMENTS.columns[:3], *[DOCUMENTS.column("lang")] * (MAX_METADATA_COLUMNS + 1)],
                    names=["id", "ordinal", "text", *map(str, range(MAX_METADATA_COLUMNS + 1))],
                )
            ),
            "metadata columns",
        ),
        (b"", "job"),
        (b"\xff\xff\xff\xff\x00\x00\x00\x00", "job"),
        (b"ARROW1\0\0", "job"),
    ],
)
def test_a_stream_that_is_not_exactly_one_job_is_refused_with_its_reason(payload: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        read_job(payload)


@pytest.mark.parametrize("version", [b"2", b"", b"1.0", b"\xff", b"9" * 1000])
def test_another_version_is_called_that(version: bytes) -> None:
    with pytest.raises(UnsupportedVersionError, match="this build knows 1"):
        read_job(stream(DOCUMENTS, metadata=STAMPED | {b"embedq.version": version}))


def test_a_compressed_body_is_refused_before_it_unfolds() -> None:
    """A script of its own, so that its peak memory is this payload's."""
    bomb = stream(
        pa.RecordBatch.from_pydict({"id": ["a"], "ordinal": [0], "text": ["x" * (256 << 20)]}), compression="zstd"
    )
    assert len(bomb) < 64 << 10
    script = (
        "import resource, sys\n"
        "from embedq_schemas.errors import CodecError\n"
        "from embedq_schemas.job import decode_job\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    decode_job(sys.stdin.buffer.read(), 'arrow')\nexcept CodecError:\n    refused = True\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "sys.exit(0 if refused and grown < 64 << 10 else f'grew by {grown} KiB')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], input=bomb, capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr.decode()
    claims = bytearray(bomb)
    at = claims.rindex(struct.pack("<q", 256 << 20))
    claims[at : at + 8] = struct.pack("<q", 1 << 62)
    with pytest.raises(CodecError):
        read_job(bytes(claims))


@pytest.mark.parametrize(
    ("vocab_size", "max_length", "says"), [(9, LONGEST, "token id 9"), (VOCAB, 5, "1 to 6 tokens, expected 1 to 5")]
)
def test_token_ids_and_lengths_are_held_to_the_model(vocab_size: int, max_length: int, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        TokenBatch.decode(TOKENS.encode(), vocab_size=vocab_size, max_length=max_length)


def test_a_document_without_tokens_a_null_token_and_an_empty_batch_are_refused() -> None:
    lists = TOKENS.table.schema.field("input_ids").type
    index = TOKENS.table.schema.names.index("input_ids")
    for rows in ([[1], [], [2]], [[1], [None], [2]], [[1], None, [2]]):
        table = TOKENS.table.set_column(index, "input_ids", pa.array(rows, lists))
        with pytest.raises(CodecError, match=r"tokens|nulls"):
            read_tokens(bytes(ipc.encode(table, "token_batch")))
    with pytest.raises(CodecError, match="no documents"):
        read_tokens(bytes(TOKENS.slice(0, 0).encode()))


def test_a_vector_that_holds_a_null_or_is_no_fixed_size_list_is_refused() -> None:
    fixed = pa.list_(pa.field("item", pa.float32()), 2)
    columns = (
        pa.array([[1.0, None], [1.0, 1.0], [1.0, 1.0]], fixed),
        pa.array([[1.0, 1.0], None, [1.0, 1.0]], fixed),
        pa.array([[1.0]] * 3, pa.list_(pa.float32())),
        pa.array([[1.0]] * 3, pa.list_(pa.float64(), 1)),
        pa.array([[]] * 3, pa.list_(pa.float32(), 0)),
        pa.array([1.0] * 3),
    )
    index = VECTORS.table.schema.names.index("vector")
    for column in columns:
        table = VECTORS.table.set_column(index, "vector", column)
        with pytest.raises(CodecError, match="vector"):
            read_vectors(bytes(ipc.encode(table, "vector_batch")))
    with pytest.raises(CodecError):
        read_vectors(bytes(ipc.encode(VECTORS.table.drop_columns(["vector"]), "vector_batch")))


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"x":' + b"[" * 200_000,
        b"[" * 200_000,
        b'{"ordinal":1' + b"0" * 6000 + b"}",
        b'{"v":1,"version":1}',
        b'{"v":"1","version":"1"}',
    ],
)
def test_json_that_is_something_else_is_refused(name: str, payload: bytes) -> None:
    with pytest.raises(CodecError):
        JSON_FORMATS[name][1](payload)


@pytest.mark.parametrize(
    "document",
    [
        {"id": 7, "text": "t"},
        {"id": "a"},
        {"id": "a", "text": None},
        {"id": "a", "text": "t", "ordinal": 2**63},
        {"id": "a", "text": "t", "ordinal": -1},
        {"id": "a", "text": "t", "ordinal": 1.5},
        {"id": "a", "text": "\ud800"},
        {"id": "a", "text": "t", "metadata": {"k": 1}},
        {"id": "a", "text": "t", "metadata": {"vector": "x"}},
        {"id": "a", "text": "t", "metadata": {str(i): "" for i in range(MAX_METADATA_COLUMNS + 1)}},
        {"id": "a", "text": "t", "surprise": 1},
    ],
)
def test_a_bad_document_makes_its_json_job_a_codec_error(document: dict[str, object]) -> None:
    with pytest.raises(CodecError):
        decode_job(json.dumps({"v": 1, "documents": [document]}).encode(), Codec.JSON)


def test_sparse_metadata_does_not_unfold_into_a_table_that_fills_memory() -> None:
    wide = {"id": "a", "text": "", "metadata": {str(i): None for i in range(MAX_METADATA_COLUMNS)}}
    documents = [wide, *([{"id": "b", "text": ""}] * 20_000)]
    with pytest.raises(CodecError, match="too many values"):
        decode_job(json.dumps({"v": 1, "documents": documents}).encode(), Codec.JSON)


@pytest.mark.parametrize(
    "change",
    [
        {"token": "0" * 31},
        {"token": "0" * 32 + "\n"},
        {"token": "../" + "0" * 29},
        {"token": "A" * 32},
        {"rows": 0},
        {"size_bytes": -1},
        {"tokens": -1},
        {"ordinals": [1]},
        {"ordinals": [2, 1]},
        {"ordinals": [-1, 1]},
        {"ordinals": [0, 2**63]},
        {"surprise": 1},
    ],
)
def test_a_commit_record_cannot_name_another_file_or_lie_about_ranges(change: dict[str, object]) -> None:
    good = json.loads(JSON_FORMATS["published file"][0])
    with pytest.raises(CodecError):
        PublishedFile.decode(json.dumps(good | change).encode())


if __name__ == "__main__":
    damage_all(seed=int(sys.argv[1]), rounds=int(sys.argv[1]))
