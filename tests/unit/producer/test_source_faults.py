"""Whatever is wrong with a source: an error row for each document that it costs, and the rest is read."""

from __future__ import annotations

import errno
import gzip
import io
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from embedq_producer.blocks import CorpusBlock, ReadOptions
from embedq_producer.corpus import corpus_of_stream, open_corpus
from embedq_producer.formats import Format
from embedq_producer.reader import metadata_types, read_corpus
from embedq_schemas.errors import InputError, UsageError
from source_kinds import KINDS, PACK, arrow, jsonl, parquet, saved_dataset

GOOD = [{"id": f"g{i}", "text": f"text {i}", "lang": "en", "year": i, "meta": None} for i in range(40)]


def read(path: object, **options: Any) -> tuple[dict[str, str], list[tuple[int, int, str]]]:
    """Texts by id, and (ordinal, line, code) of what is none; every ordinal must be one of them, once."""
    given = ReadOptions(**options)
    corpus = open_corpus([str(path)])
    blocks = list(read_corpus(corpus, options=given))
    check_counts(blocks)
    for index, block in enumerate(blocks):
        assert list(read_corpus(corpus, options=given, start=block.end)) == blocks[index + 1 :]
    documents = {row["id"]: row["text"] for block in blocks for row in block.documents.to_pylist()}
    return documents, [(r.ordinal, r.line, r.code.value) for block in blocks for r in block.rejects]


def check_counts(blocks: list[CorpusBlock]) -> None:
    ordinals = [o for block in blocks for o in block.documents["ordinal"].to_pylist()]
    rejected = [reject.ordinal for block in blocks for reject in block.rejects]
    duplicates = sum(block.duplicates for block in blocks)
    last = blocks[-1].end.ordinal if blocks else 0
    assert len({*ordinals, *rejected}) + duplicates == last == len(ordinals) + len(rejected) + duplicates


@pytest.mark.parametrize(
    ("content", "ids", "rejects"),
    [
        (b"[]", [], []),
        (b" \n[ \n ] \n", [], []),
        (b'[{"id":"a","text":"]"},{"id":"b","text":"\\"}[,"}]', ["a", "b"], []),
        (b'[{"id":"a","text":"x","y":[[1,{"z":[]}],2]}, 5, "s", null, [{"id":"b","text":"x"}]]', ["a"],
         [(1, 2, "invalid_json"), (2, 3, "invalid_json"), (3, 4, "invalid_json"), (4, 5, "invalid_json")]),
        (b'[{"id":"a","text":},{"id":"b","text":"x"},]', ["b"], [(0, 1, "invalid_json"), (2, 3, "invalid_json")]),
        (b'[,{"id":"b","text":"x"}]', ["b"], [(0, 1, "invalid_json")]),
        (b'[{"id":"a","text":"x"},{"id":"b","te', ["a"], [(1, 2, "unreadable_file")]),
        (b'[{"id":"a","text":"x"}', [], [(0, 1, "unreadable_file")]),
        (b'[{"id":"a","text":"x"}] more', ["a"], [(1, 2, "unreadable_file")]),
        (b'[{"id":"a","text":"\xff"},{"id":"b","text":"\\ud800"},{"id":"c","text":"x"}]', ["c"],
         [(0, 1, "invalid_utf8"), (1, 2, "invalid_utf8")]),
        (b'[{"id":"a","text":"' + b"x" * 500_000 + b'\\"[{"},{"id":"b","text":"y"}]', ["b"], [(0, 1, "line_too_long")]),
        (b'[{"id":"a","text":[' + b"[1]," * 200_000 + b'1]},{"id":"b","text":"y"}]', ["b"], [(0, 1, "line_too_long")]),
    ],
    ids=["empty", "blank", "brackets in strings", "not objects", "bad members", "missing member", "cut in a member",
         "cut before the end", "trailing", "not utf-8", "long string", "long list"],
)  # fmt: skip
def test_a_bad_element_of_a_json_array_takes_no_other_with_it(
    content: bytes, ids: list[str], rejects: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    found, bad = read(path, max_line_bytes=100_000)
    assert (list(found), bad) == (ids, rejects)


@pytest.mark.parametrize(
    ("content", "ids", "rejects"),
    [
        (b"", [], []),
        (b"id,text\n", [], []),
        (b"\n\r\nid,text\na,x\nb\n", ["a"], [(1, 5, "invalid_row")]),
        (b"id,text\r\na,x\r\n\r\nb,y", ["a", "b"], []),
        (b'\xef\xbb\xbfid,text\n"a","x\ny"\n\n"b","say ""hi"""\n', ["a", "b"], []),
        (b"id,text\na\nb,x\nc,y,z\n", ["b"], [(0, 2, "invalid_row"), (2, 4, "invalid_row")]),
        (b'id,text\na,"open\nb,x\n"c",y\nd,z\n', ["b", "c", "d"], [(0, 2, "invalid_row")]),
        (b'id,text\na,x\nb,"never closed\nc,y\n', ["a", "c"], [(1, 3, "invalid_row")]),
        (b'id,text\na,"x"y\nb,x\n', ["b"], [(0, 2, "invalid_row")]),
        (b"id,text\na,\xff\nb,x\n", ["b"], [(0, 2, "invalid_utf8")]),
        (b"id,text,other\na,x,\xff\nb,x,1\n", ["a", "b"], []),
        (b"id,text\na," + b"x" * 200_000 + b"\nb,x\n", ["b"], [(0, 2, "line_too_long")]),
        (b'id,text\na,"' + b"x\n" * 100_000 + b'"\nb,x\n', None, [(0, 2, "line_too_long")]),
        (b"id,text,id\na,x,b\n", [], [(0, 1, "unreadable_file")]),
        (b"id,text," + b"x" * 200_000 + b"\na,x,b\n", [], [(0, 1, "unreadable_file")]),
        (b"id,\xff\na,x\n", [], [(0, 1, "unreadable_file")]),
    ],
    ids=["empty", "header alone", "blank first", "crlf and blank", "quotes", "fields", "stray quote",
         "unclosed at the end", "text after a quote", "not utf-8", "not utf-8 elsewhere", "long line",
         "unclosed for long", "column twice", "long header", "header not utf-8"],
)  # fmt: skip
def test_a_bad_row_of_a_csv_file_takes_no_other_with_it(
    content: bytes, ids: list[str] | None, rejects: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(content)
    found, bad = read(path, max_line_bytes=100_000, block_documents=1 << 20)
    if ids is None:
        assert "b" in found
        assert bad[:1] == rejects
    else:
        assert (list(found), bad) == (ids, rejects)


def test_quoted_rows_keep_their_line_numbers_and_an_empty_id_is_none(tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    path.write_bytes(b'text\tid\n"two\nlines"\ta\n\tempty\nno id\t\nbad\n')
    found, bad = read(path)
    assert found.pop("a") == "two\nlines"
    assert found.pop("empty") == ""
    assert list(found.values()) == ["no id"]
    assert bad == [(3, 6, "invalid_row")]


@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_compressed_file_that_breaks_off_gives_what_can_be_read_and_one_error(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    whole = KINDS[kind](tmp_path, GOOD * 1).read_bytes()
    # Random texts, so that most of the file survives the cut.
    noise = os.urandom(200_000).hex().encode()
    lines = [b'{"id": "%d", "text": "%s"}' % (i, noise[i * 1000 : (i + 1) * 1000]) for i in range(400)]
    bodies = {"jsonl": b"\n".join(lines), "json": b"[" + b",".join(lines) + b"]"}
    bodies["csv"] = b"id,text\n" + b"\n".join(b"%d,%s" % (i, noise[i * 1000 : (i + 1) * 1000]) for i in range(400))
    folder = tmp_path / "many"
    folder.mkdir()
    packed = PACK[suffix](bodies[kind])
    (folder / f"a.{kind}{suffix}").write_bytes(packed[: len(packed) * 4 // 5])
    (folder / f"b.{kind}").write_bytes(whole)
    found, bad = read(folder)
    assert set(found) >= {document["id"] for document in GOOD}
    assert [code for _, _, code in bad] == ["unreadable_file"]
    if suffix != ".bz2":  # its blocks are larger than this file
        assert len(found) > len(GOOD) + 100


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow stream", "feather"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_table_that_breaks_off_is_one_error_and_the_other_files_are_read(
    kind: str, share: float, tmp_path: Path
) -> None:
    folder = tmp_path / "many"
    data = KINDS[kind](tmp_path, [document | {"id": f"x{i}"} for i, document in enumerate(GOOD)]).read_bytes()
    folder.mkdir()
    suffix = "parquet" if kind == "parquet" else "arrow"
    (folder / f"a.{suffix}").write_bytes(data[: int(len(data) * share)])
    (folder / "b.jsonl").write_bytes(jsonl(GOOD))
    found, bad = read(folder)
    assert set(found) >= {document["id"] for document in GOOD}
    assert [code for _, _, code in bad] == ["unreadable_file"]


@pytest.mark.parametrize("kind", ["parquet", "parquet in one group", "arrow", "arrow stream", "feather"])
def test_a_flipped_bit_anywhere_in_a_table_is_never_more_than_error_rows(kind: str, tmp_path: Path) -> None:
    data = bytearray(KINDS[kind](tmp_path, GOOD).read_bytes())
    path = tmp_path / ("d.parquet" if "parquet" in kind else "d.arrow")
    for at in range(0, len(data), max(1, len(data) // 150)):
        data[at] ^= 0x55
        path.write_bytes(data)
        data[at] ^= 0x55
        check_counts(list(read_corpus(open_corpus([path]), options=ReadOptions(metadata=("lang",)))))


def write(path: Path, columns: dict[str, pa.Array]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_rows_without_a_text_or_of_another_type_are_error_rows_as_in_json(tmp_path: Path) -> None:
    texts = pa.array(["a", None, "c"])
    ids = {
        "string": pa.array(["x", "", None]),
        "integer": pa.array([1, 2, None], pa.uint16()),
        "float": pa.array([1.5, None, 2.0]),
    }
    path = tmp_path / "c.parquet"
    found, bad = read(write(path, {"id": ids["string"], "text": texts}))
    assert (list(found.values()), bad) == (["a", "c"], [(1, 2, "invalid_id")])
    found, bad = read(write(path, {"id": ids["integer"], "text": texts}))
    assert (next(iter(found)), bad) == ("1", [(1, 2, "missing_text")])
    _, bad = read(write(path, {"id": ids["float"], "text": texts}))
    assert bad == [(0, 1, "invalid_id"), (1, 2, "missing_text"), (2, 3, "invalid_id")]
    _, bad = read(write(path, {"id": ids["string"], "text": pa.array([1, None, 3])}))
    assert [code for _, _, code in bad] == ["invalid_text", "invalid_id", "invalid_text"]


def test_strings_that_are_not_utf8_are_error_rows(tmp_path: Path) -> None:
    broken = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    ids = pa.array(["a", "b", "c"])
    for name in ("c.parquet", "c.arrow"):
        path = tmp_path / name
        batch = pa.table({"id": ids, "text": broken, "note": broken})
        if name == "c.parquet":
            pq.write_table(batch, path)
        else:
            with pa.ipc.new_file(path, batch.schema) as writer:
                writer.write_table(batch)
        for fields in ({}, {"metadata": ("note",)}, {"text_field": "id", "id_field": "text"}):
            found, bad = read(path, **fields)
            assert len(found) == 2
            assert bad == [(1, 2, "invalid_utf8")]


def test_a_text_above_the_bound_is_an_error_row_in_a_table(tmp_path: Path) -> None:
    path = write(tmp_path / "c.parquet", {"id": pa.array(["a", "b", "c"]), "text": pa.array(["x", "y" * 500, "z"])})
    assert read(path, max_line_bytes=100) == ({"a": "x", "c": "z"}, [(1, 2, "line_too_long")])


def test_a_column_that_one_file_lacks_costs_that_file_alone(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    write(folder / "a.parquet", {"id": pa.array(["a"]), "text": pa.array(["x"]), "year": pa.array([1])})
    write(folder / "b.parquet", {"id": pa.array(["b", "c"]), "body": pa.array(["x", "y"])})
    write(folder / "c.parquet", {"body": pa.array(["x", "y"])})
    write(folder / "d.parquet", {"id": pa.array(["d"]), "text": pa.array([b"x"], pa.binary())})
    write(
        folder / "e.parquet", {"id": pa.array(["e", "f"]), "text": pa.array(["x", "y"]), "year": pa.array([2.0, 2.5])}
    )
    (folder / "f.csv").write_text("id,title\ng,x\n")
    options = ReadOptions(metadata=("year",), metadata_types=(pa.int64(),))
    blocks = list(read_corpus(open_corpus([folder]), options=options))
    check_counts(blocks)
    assert [(row["id"], row["year"]) for block in blocks for row in block.documents.to_pylist()] == [("a", 1), ("e", 2)]
    assert [(r.file, r.line, r.id, r.code.value) for block in blocks for r in block.rejects] == [
        ("b.parquet", 1, "b", "missing_text"),
        ("b.parquet", 2, "c", "missing_text"),
        ("c.parquet", 1, None, "missing_text"),
        ("c.parquet", 2, None, "missing_text"),
        ("d.parquet", 1, "d", "invalid_text"),
        ("e.parquet", 2, "f", "invalid_metadata"),
        ("f.csv", 1 + 1, "g", "missing_text"),
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv"])
def test_a_column_that_the_first_file_lacks_is_a_misspelt_name(kind: str, tmp_path: Path) -> None:
    corpus = open_corpus([KINDS[kind](tmp_path, GOOD)])
    for options in (
        ReadOptions(text_field="body"),
        ReadOptions(id_field="key"),
        ReadOptions(metadata=("topic",)),
        ReadOptions(template="{title}"),
        ReadOptions(metadata=("meta.name",)),
    ):
        with pytest.raises(InputError, match=r"has no column '.*'; it has: id, text, lang, year"):
            metadata_types(corpus, options)


def test_json_values_keep_their_types_and_one_that_does_not_fit_is_an_error_row(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(
        b'{"id":"a","text":"x","n":1,"f":1.5,"b":true,"s":"s","l":["p","q"],"o":{"k":1},"m":1}\n'
        b'{"id":"b","text":"x","n":null,"f":2,"b":null,"l":[],"o":null,"m":"one"}\n'
    )
    corpus = open_corpus([path])
    names = ("n", "f", "b", "s", "l", "o", "m", "none")
    types = metadata_types(corpus, ReadOptions(metadata=names))
    assert list(map(str, types)) == [
        "int64",
        "double",
        "bool",
        "string",
        "list<item: string>",
        "string",
        "string",
        "string",
    ]
    options = ReadOptions(metadata=names, metadata_types=types)
    unfit = [("n", "1.0"), ("n", '"1"'), ("f", "true"), ("b", "0"), ("l", '"p"'), ("l", "[1]"), ("n", str(1 << 63))]
    with path.open("ab") as file:
        for number, (name, value) in enumerate(unfit):
            file.write(f'{{"id":"u{number}","text":"x","{name}":{value}}}\n'.encode())
        file.write(b'{"id":"last","text":"x","s":5}\n')
    blocks = list(read_corpus(open_corpus([path]), options=options))
    check_counts(blocks)
    (block,) = blocks
    assert [list(row.values())[3:] for row in block.documents.to_pylist()] == [
        [1, 1.5, True, "s", ["p", "q"], '{"k":1}', "1", None],
        [None, 2.0, None, None, [], None, "one", None],
        [None, None, None, "5", None, None, None, None],
    ]
    assert [reject.code.value for reject in block.rejects] == ["invalid_metadata"] * 7
    assert block.rejects[0].id == "u0"
    assert "'n' is of type int64 in this run, found" in block.rejects[0].message


def test_a_sparse_field_has_the_type_of_its_first_values(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    lines = [b'{"id":"%d","text":"x"}\n' % i for i in range(5000)]
    lines[3000] = b'{"id":"3000","text":"x","n":1}\n'
    path.write_bytes(b"".join(lines))
    assert metadata_types(open_corpus([path]), ReadOptions(metadata=("n", "m"))) == (pa.int64(), pa.string())


def test_columns_keep_the_types_a_dataset_can_have_and_others_become_text(tmp_path: Path) -> None:
    from datetime import UTC, date, datetime
    from decimal import Decimal

    moment = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)
    columns = {
        "id": pa.array(["a"]),
        "text": pa.array(["x"]),
        "t": pa.array([moment], pa.timestamp("us", tz="UTC")),
        "d": pa.array([date(2024, 2, 29)]),
        "n": pa.array([Decimal("1.50")]),
        "i": pa.array([7], pa.int8()),
        "l": pa.array([[[1], [2, 3]]], pa.large_list(pa.list_(pa.int32()))),
        "c": pa.array(["red"]).dictionary_encode(),
        "s": pa.array([{"a": 1, "b": [None]}]),
    }
    corpus = open_corpus([write(tmp_path / "c.parquet", columns)])
    names = tuple(list(columns)[2:])
    types = metadata_types(corpus, ReadOptions(metadata=names))
    assert list(map(str, types)) == [
        "timestamp[us, tz=UTC]", "date32[day]", "decimal128(3, 2)", "int8", "list<item: list<item: int32>>",
        "string", "string",
    ]  # fmt: skip
    (block,) = read_corpus(corpus, options=ReadOptions(metadata=names, metadata_types=types))
    (row,) = block.documents.to_pylist()
    assert list(row.values())[3:] == [
        moment, date(2024, 2, 29), Decimal("1.50"), 7, [[1], [2, 3]], "red", '{"a": 1, "b": [null]}',
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "csv"])
def test_a_file_that_grows_or_changes_while_it_is_read_is_found_out(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path, GOOD)
    blocks = read_corpus(open_corpus([path]), options=ReadOptions(block_documents=5))
    next(blocks)
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(InputError, match=r"changed during the run: it had \d+ bytes, and has \d+ now"):
        list(blocks)
    corpus = open_corpus([path])
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="another modification time"):
        list(read_corpus(corpus, options=ReadOptions()))
    path.unlink()
    with pytest.raises(InputError, match="does not exist"):
        list(read_corpus(corpus, options=ReadOptions()))


def test_a_directory_misses_nothing_that_links_lead_to_and_no_link_that_is_broken(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "a.jsonl").write_bytes(jsonl(GOOD[:3]))
    (folder / "linked").symlink_to(elsewhere)
    (folder / "linked.jsonl").symlink_to(elsewhere / "a.jsonl")
    (elsewhere / "back").symlink_to(folder)
    saved_dataset(folder / "set", GOOD)
    labels = [file.label for file in open_corpus([folder]).files]
    shards = [f"set/data-{i:05}-of-00003.arrow" for i in range(3)]
    assert labels == ["linked/a.jsonl", "linked.jsonl", *shards]
    assert [file.label for file in open_corpus([tmp_path / "i*"]).files] == labels
    (folder / "z.jsonl").symlink_to(tmp_path / "missing")
    with pytest.raises(InputError, match=r"z\.jsonl does not exist"):
        open_corpus([folder])


def test_another_list_of_files_is_another_corpus(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(GOOD[:3] if name == "a" else GOOD[3:]))
    whole = open_corpus([tmp_path]).identity
    assert whole == open_corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]).identity
    others = {
        open_corpus([tmp_path / "b.jsonl", tmp_path / "a.jsonl"]).identity,
        open_corpus([tmp_path / "a.jsonl"]).identity,
    }
    (tmp_path / "c.jsonl").touch()
    others.add(open_corpus([tmp_path]).identity)
    assert len({whole, *others}) == 4


def test_what_cannot_be_one_corpus_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "notes").write_text("nothing")
    saved = saved_dataset(tmp_path / "saved", GOOD)
    (saved / "state.json").write_text(
        '{"_data_files": [{"filename": "x.arrow"}], "_indices_files": [{"filename": "i"}]}'
    )
    broken = saved_dataset(tmp_path / "broken", GOOD)
    (broken / "state.json").write_text("{")
    for source, part in (
        (tmp_path / "empty", "holds no file of a known format"),
        (tmp_path / "odd", "holds no file of a known format"),
        (tmp_path / "*.nothing", "matches no file"),
        (saved, "flatten_indices"),
        (broken, "state.json cannot be read"),
    ):
        with pytest.raises(InputError, match=part) as caught:
            open_corpus([source])
        assert "\n" not in str(caught.value)
    for name, content in (("c.parquet.gz", gzip.compress(parquet(GOOD))), ("c.arrow.gz", gzip.compress(arrow(GOOD)))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="compressed file; give it as a file"):
            metadata_types(open_corpus([tmp_path / name]), ReadOptions())
    (tmp_path / "c.txt").write_text("line")
    with pytest.raises(InputError, match="plain text"):
        metadata_types(open_corpus([tmp_path / "c.txt"]), ReadOptions(metadata=("a",)))
    assert open_corpus([tmp_path / "odd"], Format.TEXT).files


@pytest.mark.parametrize(
    "source",
    ["", "no field", "{", "}", "{}", "{a!r}", "{a:>3}", "{a[0]}", "{a", "{ }"],
    ids=lambda source: repr(source),
)
def test_a_template_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="--template"):
        ReadOptions(template=source)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "csv.zst", "arrow stream", "arrow stream.gz"])
@pytest.mark.parametrize(
    "failure",
    [OSError(errno.EIO, "Input/output error"), TimeoutError(errno.ETIMEDOUT, "timed out")],
    ids=["disk", "network"],
)
def test_a_read_that_fails_stops_the_run_and_costs_no_document(kind: str, failure: OSError, tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path, GOOD)
    data = path.read_bytes()

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() >= len(data) // 2:
                raise failure
            return super().read(min(size or 0, 100))

    corpus = corpus_of_stream(Failing(data), path.name)
    with pytest.raises(InputError, match=r"cannot be read: (input/output error|timed out)\.$"):
        list(read_corpus(corpus, options=ReadOptions()))


def test_an_unreadable_table_alone_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    path.write_bytes(b"PAR1" + bytes(50))
    with pytest.raises(InputError, match="cannot be read"):
        metadata_types(open_corpus([path]), ReadOptions())
    assert io.BytesIO(path.read_bytes()).read(4) == b"PAR1"
