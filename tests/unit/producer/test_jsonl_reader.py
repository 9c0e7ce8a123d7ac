"""The corpus as a whole: duplicates, restarts, block sizes, streams, faults, memory."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pytest
from embedq_producer.formats import packed_with
from embedq_producer.jsonl import START, CorpusBlock, Position, ReadOptions, read_jsonl
from embedq_schemas.errors import DocumentErrorCode, InputError
from hypothesis import given, settings
from hypothesis import strategies as st

CODE = DocumentErrorCode


class Trickle(io.RawIOBase):
    """A stream that gives at most `step` bytes at a time and may be unable to seek, as pipes do."""

    def __init__(self, data: bytes, step: int, *, seekable: bool = True) -> None:
        self._inner, self._step, self._seekable = io.BytesIO(data), step, seekable

    def read(self, size: int = -1) -> bytes:
        return self._inner.read(min(size, self._step))

    def seekable(self) -> bool:
        return self._seekable

    def seek(self, offset: int, whence: int = 0) -> int:
        if not self._seekable:
            raise OSError(errno.ESPIPE, "Illegal seek")
        return self._inner.seek(offset, whence)


def read(data: bytes, options: ReadOptions, start: Position = START, step: int = 1 << 30) -> list[CorpusBlock]:
    return list(read_jsonl(cast(BinaryIO, Trickle(data, step)), options=options, start=start))


@dataclass(frozen=True)
class Outcome:
    """What a reader should find: independent of blocks."""

    documents: list[tuple[Any, ...]]
    rejects: list[tuple[int, int, DocumentErrorCode]]
    duplicates: int


def outcome(blocks: list[CorpusBlock]) -> Outcome:
    return Outcome(
        [tuple(row.values()) for block in blocks for row in block.documents.to_pylist()],
        [(reject.ordinal, reject.line, reject.code) for block in blocks for reject in block.rejects],
        sum(block.duplicates for block in blocks),
    )


class Integer(str):
    __slots__ = ()


class Fraction(str):
    __slots__ = ()


def refuse(name: str) -> None:
    raise ValueError(name)


def reference_line(line: bytes, limit: int) -> tuple[str | None, str, str | None] | DocumentErrorCode:
    """One line by Python's json alone: (id, text, metadata "m") or the code."""
    if len(line) > limit:
        return CODE.LINE_TOO_LONG
    try:
        source = line.decode()
    except UnicodeDecodeError:
        return CODE.INVALID_UTF8
    try:
        value = json.loads(source, parse_int=Integer, parse_float=Fraction, parse_constant=refuse)
    except ValueError:
        return CODE.INVALID_JSON
    if type(value) is not dict:
        return CODE.INVALID_JSON
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return CODE.INVALID_UTF8
    match value.get("id"):
        case None:
            document_id = None
        case Integer() as digits:
            document_id = str(int(digits))
        case str() as given_id if given_id and type(given_id) is str:
            document_id = given_id
        case _:
            return CODE.INVALID_ID
    text = value.get("text")
    if text is None:
        return CODE.MISSING_TEXT
    return (document_id, text, value.get("m")) if type(text) is str else CODE.INVALID_TEXT


def reference(data: bytes, limit: int) -> Outcome:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found = Outcome([], [], 0)
    seen: set[str] = set()
    ordinal = duplicates = 0
    for number, line in enumerate(lines, 1):
        if len(line) <= limit and not line.strip():
            continue
        result = reference_line(line, limit)
        if isinstance(result, DocumentErrorCode):
            found.rejects.append((ordinal, number, result))
        else:
            document_id, text, metadata = result
            key = document_id or hashlib.sha256(text.encode()).hexdigest()[:32]
            if key not in seen:
                seen.add(key)
                found.documents.append((key, ordinal, text, metadata))
            elif document_id is None:
                duplicates += 1
            else:
                found.rejects.append((ordinal, number, CODE.DUPLICATE_ID))
        ordinal += 1
    return Outcome(found.documents, found.rejects, duplicates)


texts = st.one_of(st.text(max_size=12), st.sampled_from(["", "same", "é\0", "\N{GRINNING FACE}" * 5, "x" * 90]))
ids = st.one_of(
    st.sampled_from(["a", "b", "c", "1", "", "long" * 30, hashlib.sha256(b"same").hexdigest()[:32]]),
    st.sampled_from([None, 1, 2, -1, 2**63, 2**70, 1.0, 1e300, True, [1], {"a": 1}]),
)
fields = st.fixed_dictionaries(
    {}, optional={"id": ids, "text": st.one_of(texts, st.sampled_from([None, 3, [], True])), "m": texts, "other": ids}
)
documents = st.fixed_dictionaries(
    {"text": texts}, optional={"id": st.sampled_from(["a", "b", "c", 1, 2**70]), "m": texts}
)
encoded = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"),
    st.one_of(documents, documents, fields),
    st.booleans(),
)
broken = st.one_of(
    st.builds(lambda line, cut: line[:cut], encoded, st.integers(0, 30)),
    st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
    st.sampled_from(
        [b"[1]", b'{"text": "\\ud800"}', b'{"text": "\xff"}', b'{"text": "t"}{}', b"\xef\xbb\xbf{}", b"x" * 150]
    ),
)
blank = st.sampled_from([b"", b" ", b"\t\r", b"\r", b" " * 20, b" " * 21, b" " * 61])
corpora = st.builds(
    lambda mark, lines, ending, end: mark + ending.join(lines) + end,
    st.sampled_from([b"", b"", b"\xef\xbb\xbf"]),
    st.lists(st.one_of(encoded, encoded, encoded, broken, blank), max_size=25),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\n", b"\n\n \n"]),
).filter(lambda data: packed_with(data) is None)
options_of_any_size = st.builds(
    lambda block_bytes, count, longest: ReadOptions(
        metadata=("m",), block_bytes=block_bytes, block_documents=count, max_line_bytes=longest
    ),
    st.sampled_from([1, 40, 100, 1000, 1 << 20]),
    st.sampled_from([1, 2, 3, 7, 1024]),
    st.sampled_from([20, 60, 149, 1 << 20]),
)


@settings(max_examples=400, deadline=None)
@given(corpora, options_of_any_size, st.sampled_from([1, 2, 7, 64, 1 << 20]))
def test_any_corpus_reads_as_pythons_json_reads_it(data: bytes, options: ReadOptions, step: int) -> None:
    blocks = read(data, options, step=step)
    assert outcome(blocks) == reference(data, options.max_line_bytes)
    for block in blocks:
        block.documents.validate(full=True)
        lines = block.documents.num_rows + len(block.rejects) + block.duplicates
        assert 0 < lines == block.end.ordinal - block.start.ordinal
    assert [block.start for block in blocks] == [START, *(block.end for block in blocks)][: len(blocks)]


@settings(max_examples=150, deadline=None)
@given(corpora, options_of_any_size, st.sampled_from([1, 7, 1 << 20]))
def test_reading_on_from_any_block_gives_the_very_same_blocks(data: bytes, options: ReadOptions, step: int) -> None:
    blocks = read(data, options)
    for index, block in enumerate(blocks):
        rest = read(data, options, start=Position.from_json(block.end.to_json()), step=step)
        assert rest == blocks[index + 1 :]


def test_a_repeated_id_is_rejected_across_blocks_and_within_one() -> None:
    data = b"\n".join(b'{"id": "%s", "text": "t"}' % name for name in (b"a", b"b", b"a", b"c", b"b", b"a"))
    for count in (1, 2, 1024):
        found = outcome(read(data, ReadOptions(block_documents=count)))
        assert [row[:2] for row in found.documents] == [("a", 0), ("b", 1), ("c", 3)]
        assert found.rejects == [(2, 3, CODE.DUPLICATE_ID), (4, 5, CODE.DUPLICATE_ID), (5, 6, CODE.DUPLICATE_ID)]
    (first, *_) = read(data, ReadOptions())[0].rejects
    assert first.id == "a"


def test_a_repeated_text_without_an_id_is_skipped_and_counted() -> None:
    data = b'{"text": "t"}\n{"text": "u"}\n{"id": null, "text": "t"}\n{"text": "t"}\n'
    for count in (1, 1024):
        found = outcome(read(data, ReadOptions(block_documents=count)))
        assert ([row[1] for row in found.documents], found.rejects, found.duplicates) == ([0, 1], [], 2)


def test_an_integer_and_its_digits_are_one_id() -> None:
    assert (
        outcome(read(b'{"id": 1, "text": "t"}\n{"id": "1", "text": "t"}', ReadOptions())).rejects[0][2]
        == "duplicate_id"
    )


def test_a_line_that_was_rejected_leaves_its_id_free() -> None:
    data = b'{"id": "a"}\n{"id": "a", "text": "t"}\n{"id": "b", "text": "t"}'
    blocks = read(data, ReadOptions(block_documents=1))
    assert [row[0] for row in outcome(blocks).documents] == ["a", "b"]
    assert outcome(read(data, ReadOptions(), start=blocks[0].end)).documents == outcome(blocks[1:]).documents


def test_strict_ends_at_the_first_bad_line_and_names_it(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"id": 1, "text": "a"}\n\n{"id": 1, "text": "b"}\n{"id": 3, "text": 4}\n')
    with pytest.raises(InputError, match=r"corpus\.jsonl, line 3: an earlier .* same id \(duplicate_id\)\.$"):
        list(read_jsonl(corpus, options=ReadOptions(strict=True)))
    blocks = read_jsonl(corpus, options=ReadOptions(strict=True, block_documents=1))
    assert next(blocks).documents.num_rows == 1
    with pytest.raises(InputError, match="line 3"):
        next(blocks)
    corpus.write_bytes(b'{"text": "a"}\n{"text": "a"}\n')
    assert outcome(list(read_jsonl(corpus, options=ReadOptions(strict=True)))).duplicates == 1


def test_a_corpus_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for path, reason in [
        (tmp_path / "absent.jsonl", "does not exist"),
        (tmp_path / "empty", "holds no file"),
        (tmp_path / "file" / "below", "cannot be read: not a directory"),
        (tmp_path / ("x" * 300), "cannot be read: file name too long"),
        (tmp_path / "a\0b", "cannot be read"),
    ]:
        with pytest.raises(InputError, match=reason) as caught:
            next(read_jsonl(path, options=ReadOptions()))
        assert str(caught.value).endswith(".")
        assert "\n" not in str(caught.value)


def test_a_corpus_that_may_not_be_read_is_one_sentence(tmp_path: Path) -> None:
    corpus = tmp_path / "secret.jsonl"
    corpus.write_bytes(b"{}")
    corpus.chmod(0)
    user = os.geteuid()
    # The superuser may read everything, so for the length of the attempt it must be somebody else.
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(InputError, match="permission denied"):
            next(read_jsonl(corpus, options=ReadOptions()))
    finally:
        if user == 0:
            os.seteuid(user)


def test_a_read_that_fails_half_way_is_one_sentence() -> None:
    class Failing(Trickle):
        def read(self, size: int = -1) -> bytes:
            return super().read(size) or self._fail()

        def _fail(self) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for data in (b"", b'{"text": "a"}\n'):
        with pytest.raises(InputError, match="cannot be read: input/output error"):
            list(read_jsonl(cast(BinaryIO, Failing(data, 5)), options=ReadOptions()))


def test_a_stream_that_would_have_to_wait_is_not_taken_for_its_end() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.write(writer, b'{"id": 1, "text": "a"}\n')
    with os.fdopen(reader, "rb", buffering=0) as stream, pytest.raises(InputError, match="non-blocking stream"):
        list(read_jsonl(cast(BinaryIO, stream), options=ReadOptions()))
    os.close(writer)


def test_a_stream_that_cannot_seek_is_read_from_its_start_only() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}')
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        (block,) = read_jsonl(stream, options=ReadOptions())
        assert block.documents["id"].to_pylist() == ["1", "2"]
        with pytest.raises(InputError, match="was changed: it has 0 lines"):
            next(read_jsonl(stream, options=ReadOptions(), start=block.end))


def test_a_corpus_that_changed_before_the_position_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    middle = [block.end for block in read_jsonl(corpus, options=ReadOptions(block_documents=1))][1]

    def resume() -> list[CorpusBlock]:
        return list(read_jsonl(corpus, options=ReadOptions(), start=middle))

    assert [row[2] for row in outcome(resume()).documents] == ["c"]
    corpus.write_bytes(b'{"text": "a"}\n')
    with pytest.raises(InputError, match="was changed: it has 1 lines or rows, and the run stopped after 2"):
        resume()
    for changed in (
        b'{"text": "a"}\n\n"text": "b"}\n',
        b'{"text": "a"}\n{"text": "bb"}\n',
        b'{"text": "aaaaaaaaaaaaaaaa"}\n',
    ):
        corpus.write_bytes(changed + b'{"text": "c"}\n')
        with pytest.raises(InputError, match="was changed"):
            resume()


def test_a_position_in_the_first_bytes_is_found_again() -> None:
    data = b"1\n2\n" + b'{"text": "t"}\n'
    blocks = read(data, ReadOptions(block_documents=1))
    assert [block.end.offset for block in blocks] == [2, 4, 18]
    for index, block in enumerate(blocks):
        assert read(data, ReadOptions(block_documents=1), start=block.end) == blocks[index + 1 :]


class Generated(io.RawIOBase):
    """A stream made while it is read, so that only the reader can hold it."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def read(self, size: int = -1) -> bytes:
        chunk = self._rest or next(self._chunks, b"")
        self._rest = chunk[size:]
        return chunk[:size]


def peak_of_reading(chunks: Iterator[bytes], options: ReadOptions) -> tuple[Outcome, int]:
    """What was found, with at most the last block held, and the peak of Python's and Arrow's memory in bytes."""
    # What earlier tests left would be freed in between, and counted as if the reader had freed it.
    gc.collect()
    arrow_before = pa.total_allocated_bytes()
    arrow_peak = rows = duplicates = 0
    rejects: list[tuple[int, int, DocumentErrorCode]] = []
    tracemalloc.start()
    try:
        for block in read_jsonl(cast(BinaryIO, Generated(chunks)), options=options):
            rows += block.documents.num_rows
            rejects += outcome([block]).rejects
            arrow_peak = max(arrow_peak, pa.total_allocated_bytes() - arrow_before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Outcome([(rows,)], rejects, duplicates), peak + arrow_peak


def test_memory_does_not_grow_with_the_corpus() -> None:
    def chunks(count: int) -> Iterator[bytes]:
        return (b'{"id": %d, "text": "%s"}\n' % (index, b"word " * 200) for index in range(count))

    peaks = []
    for count in (2_000, 12_000):
        found, peak = peak_of_reading(chunks(count), ReadOptions())
        assert (found.documents, found.rejects) == ([(count,)], [])
        peaks.append(peak)
    # The id set: 8 bytes per document, twice that while parts merge.
    assert peaks[1] < peaks[0] + 16 * 10_000 + (1 << 20)
    assert peaks[1] < 12 << 20


def test_a_line_above_the_bound_is_never_held() -> None:
    lines = [b'{"text": "a"}\n', *([b"x" * (1 << 17)] * 1000), b'\n{"text": "b"}\n']
    found, peak = peak_of_reading(iter(lines), ReadOptions(max_line_bytes=1 << 20))
    assert found.documents == [(2,)]
    assert found.rejects == [(1, 2, CODE.LINE_TOO_LONG)]
    assert peak < 3 << 20
