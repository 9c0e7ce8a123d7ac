"""What one line of a corpus may look like, and what becomes of it."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable

import pyarrow as pa
import pytest
from embedq_producer.jsonl import CorpusBlock, ReadOptions, Reject, document_schema, read_jsonl
from embedq_schemas.errors import DocumentErrorCode, UsageError

OPTIONS = ReadOptions()
GOOD = b'{"id": "good", "text": "kept"}'


def blocks_of(data: bytes, options: ReadOptions = OPTIONS) -> list[CorpusBlock]:
    return list(read_jsonl(io.BytesIO(data), options=options))


def documents_of(data: bytes, options: ReadOptions = OPTIONS) -> list[dict[str, object]]:
    return [row for block in blocks_of(data, options) for row in block.documents.to_pylist()]


def rejects_of(data: bytes, options: ReadOptions = OPTIONS) -> list[Reject]:
    return [reject for block in blocks_of(data, options) for reject in block.rejects]


def only_document(line: bytes, options: ReadOptions = OPTIONS) -> dict[str, object]:
    assert rejects_of(line + b"\n" + GOOD, options) == []
    row, _ = documents_of(line + b"\n" + GOOD, options)
    return row


def only_reject(line: bytes, options: ReadOptions = OPTIONS) -> Reject:
    """The reject of a bad second line; its neighbours must be kept."""
    (block,) = blocks_of(b'{"id": "first", "text": "kept"}\n' + line + b"\n" + GOOD, options)
    assert [(row["id"], row["ordinal"]) for row in block.documents.to_pylist()] == [("first", 0), ("good", 2)]
    (reject,) = block.rejects
    assert (reject.ordinal, reject.line) == (1, 2)
    return reject


def content_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def test_documents_carry_the_promised_schema() -> None:
    options = ReadOptions(metadata=("lang", "year"))
    (block,) = blocks_of(GOOD, options)
    assert block.documents.schema == document_schema(options)
    assert block.documents.schema.names == ["id", "ordinal", "text", "lang", "year"]
    assert block.documents.schema.types == [pa.string(), pa.int64(), pa.string(), pa.string(), pa.string()]
    block.documents.validate(full=True)


def test_id_and_text_come_from_the_fields_named_in_the_options() -> None:
    options = ReadOptions(id_field="réf", text_field="body text")
    (row,) = documents_of('{"text": 1, "id": [], "réf": "r", "body text": "b"}'.encode(), options)
    assert row == {"id": "r", "ordinal": 0, "text": "b"}


@pytest.mark.parametrize("data", [b"", b"\n", b" \t\r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_empty_corpus_has_no_blocks(data: bytes) -> None:
    assert blocks_of(data) == []


def test_a_byte_order_mark_is_accepted_at_the_start_only() -> None:
    (block,) = blocks_of(b"\xef\xbb\xbf" + GOOD + b"\n\xef\xbb\xbf" + GOOD)
    assert block.documents.to_pylist() == [{"id": "good", "ordinal": 0, "text": "kept"}]
    assert [(reject.line, reject.code) for reject in block.rejects] == [(2, DocumentErrorCode.INVALID_JSON)]


def test_crlf_and_blank_lines_take_line_numbers_but_no_ordinals() -> None:
    data = b'\r\n{"id": 1, "text": "a\\r\\n"}\r\n  \t\r\n\n\x0b\x0c\n{"id": 2}\r\n{"id": 3, "text": "c"}\r\n\r\n'
    (block,) = blocks_of(data)
    assert block.documents.to_pylist() == [
        {"id": "1", "ordinal": 0, "text": "a\r\n"},
        {"id": "3", "ordinal": 2, "text": "c"},
    ]
    assert [(reject.ordinal, reject.line, reject.id) for reject in block.rejects] == [(1, 6, "2")]
    assert (block.end.offset, block.end.line, block.end.ordinal) == (len(data), 8, 3)


def test_the_last_line_needs_no_newline() -> None:
    with_newline, without = blocks_of(GOOD + b"\n"), blocks_of(GOOD)
    assert with_newline[0].documents == without[0].documents
    assert (with_newline[0].end.offset, without[0].end.offset) == (len(GOOD) + 1, len(GOOD))


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": "x", "text": "\xff"}',
        b'{"id": "x", "text": "\xed\xa0\x80"}',  # a surrogate in UTF-8's clothes
        b'{"id": "x", "text": "\xc0\xaf"}',  # an overlong form
        b'{"id": "\xe2\x82", "text": "cut short"}',
        b'{"id": "x", "text": "fine", "ignored": "\xff"}',
        b'{"id": "x", "text": "fine", "\xff": 1}',
        b'{"id": "x", "text": "fine", "kept": ["\xff"]}',
        b"\xff\xfe{\x00}\x00",
    ],
)
def test_a_line_that_is_not_utf8_is_rejected_wherever_the_bytes_are(line: bytes) -> None:
    reject = only_reject(line, ReadOptions(metadata=("kept",)))
    assert reject.code == DocumentErrorCode.INVALID_UTF8
    assert "is not UTF-8: byte 0x" in reject.message


@pytest.mark.parametrize(
    "escape", ["\\ud800", "\\udc00", "\\ud800\\ud800", "\\udc00\\ud800", "\\uD83Dx", "\\ud83d\\u0041"]
)
@pytest.mark.parametrize("place", ['"text": "%s"', '"text": "t", "id": "%s"', '"text": "t", "kept": {"a": "%s"}'])
def test_a_lone_surrogate_is_rejected_and_never_replaced(escape: str, place: str) -> None:
    reject = only_reject(("{" + place % escape + "}").encode(), ReadOptions(metadata=("kept",)))
    assert reject.code == DocumentErrorCode.INVALID_UTF8
    assert "surrogate" in reject.message


def test_a_lone_surrogate_does_not_hide_that_the_line_is_no_json() -> None:
    assert only_reject(b'{"text": "\\ud800"').code == DocumentErrorCode.INVALID_JSON
    assert only_reject(b'{"text": "\\ud800", "n": NaN}').code == DocumentErrorCode.INVALID_JSON


def test_paired_surrogates_and_every_other_escape_are_decoded() -> None:
    line = rb'{"id": "\u00e9", "text": "\ud83d\ude00 \uDBFF\uDFFF \\ud800 \/\b\f\n\r\t\""}'
    assert only_document(line) == {
        "id": "é",
        "ordinal": 0,
        "text": '\N{GRINNING FACE} \U0010ffff \\ud800 /\b\f\n\r\t"',
    }


def test_an_escaped_nul_is_text_and_a_raw_one_is_no_json() -> None:
    assert only_document(b'{"id": "a\\u0000", "text": "x\\u0000y"}') == {"id": "a\0", "ordinal": 0, "text": "x\0y"}
    for line in (b'{"id": "a", "text": "x\0y"}', b'{"id": "a", "text": "x", "i": "\0"}', b'{"text": "x"}\0', b"\0"):
        assert only_reject(line).code == DocumentErrorCode.INVALID_JSON


@pytest.mark.parametrize(
    "line",
    [
        *(b"[1]", b"1", b'"x"', b"null", b"true", b"{", b"}", b"{]", b"x", b"'", b'{"text": "a"', b'{"text": "a"}x'),
        *(b'{"text": "a"}{"text": "b"}', b'{"text": "a"},', b'{"text": "a",}', b'{"text": "a" "b": 1}', b"{1: 2}"),
        *(b'{"text": "a\tb"}', b'{"text": "\\q"}', b'{"text": "\\u12"}', b'{"text": "a", "n": NaN}'),
        *(
            b'{"text": "a", "n": 01}',
            b'{"text": "a", "n": 1.}',
            b'{"text": "a", "n": +1}',
            b'{"text": "a", "n": Infinity}',
        ),
    ],
)
def test_what_is_not_one_json_object_is_rejected(line: bytes) -> None:
    assert only_reject(line).code == DocumentErrorCode.INVALID_JSON


def test_two_objects_on_one_line_and_one_object_on_two_lines_do_not_make_up_for_each_other() -> None:
    rejects = rejects_of(b'{"text": "a"} {"text": "b"}\n{"text":\n"c"}\n')
    assert [(reject.line, reject.code) for reject in rejects] == [
        (n, DocumentErrorCode.INVALID_JSON) for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_nesting_bomb_is_one_reject(opening: bytes) -> None:
    for line in (opening * 100_000, b'{"text": "a", "x": ' + opening * 100_000):
        assert only_reject(line).code == DocumentErrorCode.INVALID_JSON


def test_a_hundred_thousand_fields_are_read_past() -> None:
    fields = ", ".join(f'"key{index}": {index}' for index in range(100_000))
    line = f'{{{fields}, "id": "many", "text": "kept", "key7": "last"}}'.encode()
    row = only_document(line, ReadOptions(metadata=("key7", "key99999", "key100000")))
    assert row == {
        "id": "many",
        "ordinal": 0,
        "text": "kept",
        "key7": "last",
        "key99999": "99999",
        "key100000": None,
    }


@pytest.mark.parametrize("line", [b"{}", b'{"id": "x", "text": null}', b'{"id": "x", "Text": "a"}'])
def test_a_missing_text_is_rejected(line: bytes) -> None:
    assert only_reject(line).code == DocumentErrorCode.MISSING_TEXT


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1", "a number"),
        ("[1]", "a list"),
        ("{}", "an object"),
        ("true", "a boolean"),
        ("false", "a boolean"),
        ("-1e3", ""),
    ],
)
def test_a_text_that_is_no_string_is_rejected_with_its_id(value: str, kind: str) -> None:
    reject = only_reject(f'{{"id": 7, "text": {value}}}'.encode())
    assert (reject.code, reject.id) == (DocumentErrorCode.INVALID_TEXT, "7")
    assert kind in reject.message


def test_an_empty_text_is_a_document() -> None:
    assert only_document(b'{"id": "e", "text": ""}')["text"] == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"a b"', "a b"),
        ("0", "0"),
        ("-0", "0"),
        ("-17", "-17"),
        ("9007199254740993", "9007199254740993"),
        ("18446744073709551617", "18446744073709551617"),
        ("-123456789012345678901234567890", "-123456789012345678901234567890"),
        ("9" * 10_000, "9" * 10_000),
    ],
)
def test_strings_and_integers_of_any_size_are_exact_ids(value: str, expected: str) -> None:
    assert only_document(f'{{"id": {value}, "text": "t"}}'.encode())["id"] == expected


@pytest.mark.parametrize("value", ['""', "1.0", "-0.0", "1e3", "1E400", "true", "false", "[1]", '{"a": 1}'])
def test_other_ids_are_rejected(value: str) -> None:
    reject = only_reject(f'{{"id": {value}, "text": "t"}}'.encode())
    assert (reject.code, reject.id) == (DocumentErrorCode.INVALID_ID, None)


@pytest.mark.parametrize("source", ['{"text": "né"}', '{"id": null, "text": "né"}', '{"text": "n\\u00e9", "id": null}'])
def test_a_document_without_an_id_gets_one_from_its_text(source: str) -> None:
    assert only_document(source.encode())["id"] == content_id("né")


@pytest.mark.parametrize(
    "source", ['{"text": "a", "id": "1", "text": "b", "id": "2"}', '{"text": 1, "id": [], "text": "b", "id": "2"}']
)
def test_of_a_field_given_twice_the_last_counts(source: str) -> None:
    assert only_document(source.encode()) == {"id": "2", "ordinal": 0, "text": "b"}
    assert only_reject(b'{"text": "a", "id": "1", "text": null}').code == DocumentErrorCode.MISSING_TEXT


def test_a_field_name_may_be_written_with_escapes() -> None:
    assert only_document(b'{"i\\u0064": "x", "\\u0074ext": "y"}') == {"id": "x", "ordinal": 0, "text": "y"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"caf\\u00e9"', "café"),
        ('"été"', "été"),
        ('""', ""),
        ("null", None),
        ("1.50", "1.50"),
        ("1e999", "1e999"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("true", "true"),
        ('[1,  "\\u00e9", null]', '[1,  "\\u00e9", null]'),
        ('{"a": {"b": "é"} }', '{"a": {"b": "é"} }'),
    ],
)
@pytest.mark.parametrize("document_id", ['"fast"', "9" * 5000], ids=["fast", "slow"])
def test_metadata_are_strings_or_their_json_source(source: str, expected: str | None, document_id: str) -> None:
    line = f'{{"id": {document_id}, "m" : {source} , "text": "t"}}'.encode()
    assert only_document(line, ReadOptions(metadata=("m", "absent"))) == {
        "id": document_id.strip('"'),
        "ordinal": 0,
        "text": "t",
        "m": expected,
        "absent": None,
    }


def test_a_line_above_the_bound_is_rejected_and_one_at_the_bound_is_kept() -> None:
    line = b'{"id": "x", "text": "' + b"a" * 500 + b'"}'
    assert only_document(line, ReadOptions(max_line_bytes=len(line)))["text"] == "a" * 500
    reject = only_reject(line, ReadOptions(max_line_bytes=len(line) - 1))
    assert reject.code == DocumentErrorCode.LINE_TOO_LONG
    assert f"{len(line)} bytes" in reject.message
    assert only_reject(b" " * 1000, ReadOptions(max_line_bytes=999)).code == DocumentErrorCode.LINE_TOO_LONG


@pytest.mark.parametrize("end", [b"", b"\n", b"\n" + GOOD])
def test_a_line_above_the_bound_and_longer_than_many_reads_is_skipped(end: bytes) -> None:
    data = b'{"id": "a", "text": "b"}\n' + b"x" * 1_000_000 + end
    options = ReadOptions(max_line_bytes=300_000)
    (reject,) = rejects_of(data, options)
    assert (reject.ordinal, reject.line, reject.code) == (1, 2, DocumentErrorCode.LINE_TOO_LONG)
    assert "1000000 bytes" in reject.message
    assert len(documents_of(data, options)) == (2 if GOOD in end else 1)
    assert blocks_of(data, options)[-1].end.offset == len(data)


def test_a_line_of_fifty_megabytes_is_a_document_of_its_own_block() -> None:
    text = "fünfzig " * (50_000_000 // 9)
    data = GOOD + b"\n" + json.dumps({"id": "long", "text": text}, ensure_ascii=False).encode() + b'\n{"text": "after"}'
    assert len(data) > 49_000_000
    blocks = blocks_of(data)
    assert [block.documents["id"].to_pylist() for block in blocks] == [["good"], ["long"], [content_id("after")]]
    assert blocks[1].documents["text"][0].as_py() == text


def test_no_block_exceeds_its_bounds_unless_by_one_line() -> None:
    lines = [json.dumps({"id": index, "text": "x" * (index % 300)}).encode() for index in range(500)]
    blocks = blocks_of(b"\n".join(lines), ReadOptions(block_bytes=1000, block_documents=7))
    assert sum(block.documents.num_rows for block in blocks) == 500
    assert max(block.documents.num_rows for block in blocks) == 7
    assert all(sum(map(len, block.documents["text"].to_pylist())) <= 1000 for block in blocks)
    assert len(blocks_of(b"\n".join(lines), ReadOptions(block_bytes=1))) == 500


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReadOptions(block_bytes=0),
        lambda: ReadOptions(block_documents=0),
        lambda: ReadOptions(max_line_bytes=1 << 31),
        lambda: ReadOptions(id_field="text"),
        lambda: ReadOptions(metadata=("a", "a")),
        lambda: ReadOptions(id_field="key", metadata=("key",)),
        lambda: ReadOptions(metadata=("ordinal",)),
        lambda: ReadOptions(text_field='a"b'),
        lambda: ReadOptions(metadata=("a\nb",)),
    ],
)
def test_options_that_cannot_work_are_refused(make: Callable[[], ReadOptions]) -> None:
    with pytest.raises(UsageError):
        make()
