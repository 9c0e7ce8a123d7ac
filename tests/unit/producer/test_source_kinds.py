"""Every kind of source gives the same documents, in the same order, and goes on from anywhere."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pytest
from embedq_producer.blocks import CorpusBlock, ReadOptions
from embedq_producer.corpus import Corpus, corpus_of_stream, open_corpus
from embedq_producer.formats import Format
from embedq_producer.position import START, Position
from embedq_producer.reader import metadata_types, read_corpus
from embedq_schemas.errors import InputError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_kinds import KINDS, PACK, STRINGS_ALONE, Document, arrow, jsonl, parquet, several

NAMES = ("lang", "year", "meta.title")
TYPES = (pa.string(), pa.int64(), pa.string())


def documents(count: int) -> list[dict[str, Any]]:
    """Texts with what formats escape: quotes, commas, tabs, line ends, brackets, many scripts."""
    return [
        {
            "id": f"d{i}",
            "text": f'{i}: "quoted", [bracketed] {{x}}\ttab\nnew line, naïve 文章 😀\\ ' + "word " * (i % 11),
            "lang": ("en", "de", "文")[i % 3],
            "year": 2000 + i,
            "meta": {"title": f"title {i}", "pages": i},
        }
        for i in range(count)
    ]


def options_for(kind: str, **changes: Any) -> ReadOptions:
    count = 2 if kind in STRINGS_ALONE else 3
    return ReadOptions(metadata=NAMES[:count], metadata_types=TYPES[:count], **changes)


def rows(blocks: Sequence[CorpusBlock]) -> list[dict[str, Any]]:
    assert [reject for block in blocks for reject in block.rejects] == []
    return [row for block in blocks for row in block.documents.to_pylist()]


def expected(given: Sequence[Document], kind: str) -> list[dict[str, Any]]:
    return [
        {"id": d["id"], "ordinal": i, "text": d["text"], "lang": d["lang"], "year": d["year"]}
        | ({} if kind in STRINGS_ALONE else {"meta.title": d["meta"]["title"]})
        for i, d in enumerate(given)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_documents(kind: str, tmp_path: Path) -> None:
    given = documents(53)
    corpus = open_corpus([KINDS[kind](tmp_path, given)])
    assert rows(list(read_corpus(corpus, options=options_for(kind)))) == expected(given, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in STRINGS_ALONE])
def test_every_kind_says_what_types_its_metadata_have(kind: str, tmp_path: Path) -> None:
    corpus = open_corpus([KINDS[kind](tmp_path, documents(9))])
    assert metadata_types(corpus, ReadOptions(metadata=NAMES)) == TYPES


@pytest.mark.parametrize("kind", KINDS)
def test_reading_on_from_any_block_of_any_kind_gives_the_very_same_blocks(kind: str, tmp_path: Path) -> None:
    corpus = open_corpus([KINDS[kind](tmp_path, documents(41))])
    options = options_for(kind, block_documents=6, block_bytes=700)
    blocks = list(read_corpus(corpus, options=options))
    assert len(blocks) > 6
    assert [block.start for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    for index, block in enumerate(blocks):
        start = Position.from_json(block.end.to_json())
        assert list(read_corpus(corpus, options=options, start=start)) == blocks[index + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_another_size_may_be_asked_for_half_way(kind: str, tmp_path: Path) -> None:
    given = documents(30)
    corpus = open_corpus([KINDS[kind](tmp_path, given)])
    first, second, *_ = read_corpus(corpus, options=options_for(kind, block_documents=4))
    rest = list(read_corpus(corpus, options=options_for(kind, block_documents=9), start=second.end))
    assert rows([first, second, *rest]) == expected(given, kind)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(lambda value: value.replace("\r", "\n"))
document = st.fixed_dictionaries(
    {
        "id": st.text("abc,\"'\t é文", min_size=1, max_size=6).filter(lambda value: value.strip() == value),
        "text": text,
        "lang": st.sampled_from(["en", "", 'd"e']),
        "year": st.integers(-(1 << 63), (1 << 63) - 1),
        "meta": st.fixed_dictionaries({"title": text, "pages": st.integers(0, 9)}),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(document, max_size=12, unique_by=lambda made: made["id"]), st.sampled_from(sorted(KINDS)))
def test_any_documents_come_out_of_any_kind_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, given: list[dict[str, Any]], kind: str
) -> None:
    corpus = open_corpus([KINDS[kind](tmp_path_factory.mktemp("any"), given)])
    blocks = list(read_corpus(corpus, options=options_for(kind, block_documents=5)))
    assert rows(blocks) == expected(given, kind)
    if blocks:
        assert (
            list(read_corpus(corpus, options=options_for(kind, block_documents=5), start=blocks[0].end)) == blocks[1:]
        )


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("content", ["jsonl", "arrow stream"])
def test_a_stream_is_read_once_from_its_start_whatever_it_is(content: str, suffix: str, tmp_path: Path) -> None:
    given = documents(40)
    data = PACK[suffix](jsonl(given) if content == "jsonl" else arrow(given, stream=True))
    options = options_for("jsonl", block_documents=7)

    def piped() -> Corpus:
        class Pipe(io.BytesIO):
            def seekable(self) -> bool:
                return False

        return corpus_of_stream(cast(BinaryIO, Pipe(data)), "-")

    corpus = piped()
    identity = corpus.identity
    assert metadata_types(corpus, ReadOptions(metadata=NAMES)) == TYPES
    blocks = list(read_corpus(corpus, options=options))
    assert rows(blocks) == expected(given, "jsonl")
    with pytest.raises(InputError, match="can be read only once"):
        next(read_corpus(corpus, options=options))
    again = piped()
    assert again.identity == identity
    assert list(read_corpus(again, options=options, start=blocks[2].end)) == blocks[3:]


@pytest.mark.parametrize("step", [1, 3, 50])
@pytest.mark.parametrize("kind", ["jsonl", "json", "json on one line", "csv", "arrow stream", "jsonl.gz", "csv.zst"])
def test_it_does_not_matter_in_what_pieces_a_stream_arrives(kind: str, step: int, tmp_path: Path) -> None:
    given = documents(20)

    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(step if size is None or size < 0 else min(step, size))

    path = KINDS[kind](tmp_path, given)
    corpus = corpus_of_stream(cast(BinaryIO, Trickle(path.read_bytes())), path.name)
    assert rows(list(read_corpus(corpus, options=options_for(kind)))) == expected(given, kind)


def test_several_sources_are_read_in_their_order_and_a_glob_and_a_directory_in_that_of_paths(tmp_path: Path) -> None:
    given = documents(24)
    for name, begin in (("b.jsonl", 0), ("sub/c.parquet", 8), ("sub/a.json.gz", 16)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        part = given[begin : begin + 8]
        make = {"b.jsonl": jsonl, "sub/c.parquet": parquet}.get(name)
        (tmp_path / name).write_bytes(
            make(part) if make else PACK[".gz"](b"[" + b",".join(jsonl(part).split(b"\n")[:-1]) + b"]")
        )

    def ids(*sources: object) -> list[str]:
        corpus = open_corpus([str(source) for source in sources])
        return [row["id"] for row in rows(list(read_corpus(corpus, options=ReadOptions())))]

    names = [document["id"] for document in given]
    assert ids(tmp_path / "sub/c.parquet", tmp_path / "b.jsonl") == names[8:16] + names[:8]
    assert ids(tmp_path) == names[:8] + names[16:] + names[8:16]
    assert ids(tmp_path / "**" / "*.p*", tmp_path / "*.jsonl") == names[8:16] + names[:8]


def test_small_files_and_small_record_batches_share_blocks(tmp_path: Path) -> None:
    given = documents(60)
    for i, one in enumerate(given):
        (tmp_path / f"{i:03}.jsonl").write_bytes(jsonl([one]))
    blocks = list(read_corpus(open_corpus([tmp_path]), options=options_for("jsonl", block_documents=25)))
    assert [block.documents.num_rows for block in blocks] == [25, 25, 10]
    assert rows(blocks) == expected(given, "jsonl")
    assert [block.end.file for block in blocks] == [24, 49, 59]


def test_a_directory_leaves_out_what_is_no_corpus_and_says_so(tmp_path: Path) -> None:
    folder = several(tmp_path / "many", documents(8))
    (folder / "README").write_text("about this data")
    (folder / "part-0").write_bytes(jsonl(documents(9)[8:]))
    corpus = open_corpus([folder])
    labels = [file.label for file in corpus.files]
    assert labels == ["a.jsonl", "b.parquet", "c/deep/x.jsonl.gz", "d.arrow", "empty.jsonl", "part-0"]
    assert corpus.left_out == (str(folder / "README"),)
    assert "README" in [file.label for file in open_corpus([folder], Format.TEXT).files]


@pytest.mark.parametrize("suffix", PACK)
def test_each_line_of_a_text_file_is_a_document(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"c.txt{suffix}"
    path.write_bytes(PACK[suffix](b'\xef\xbb\xbffirst\r\n\n  \n{"id": 1}\nfirst\nnaive \xe2\x82\xac'))
    (block,) = read_corpus(open_corpus([path]), options=ReadOptions())
    assert [(row["ordinal"], row["text"]) for row in block.documents.to_pylist()] == [
        (0, "first"),
        (1, '{"id": 1}'),
        (3, "naive €"),
    ]
    assert (block.duplicates, block.rejects, block.end.line) == (1, (), 6)


def test_each_file_is_a_document_whose_id_is_its_path(tmp_path: Path) -> None:
    (tmp_path / "docs" / "sub").mkdir(parents=True)
    (tmp_path / "docs" / "b.md").write_text("# B\n\nbody")
    (tmp_path / "docs" / "empty.md").touch()
    (tmp_path / "docs" / "sub" / "a.md.gz").write_bytes(PACK[".gz"](b"packed"))
    (tmp_path / "docs" / "z.md").write_bytes(b"\xff")
    corpus = open_corpus([tmp_path / "docs"], Format.FILES)
    options = ReadOptions(block_documents=2)
    first, second = read_corpus(corpus, options=options)
    assert [(row["id"], row["text"]) for block in (first, second) for row in block.documents.to_pylist()] == [
        ("b.md", "# B\n\nbody"),
        ("empty.md", ""),
        ("sub/a.md.gz", "packed"),
    ]
    assert [(reject.ordinal, reject.code, reject.file) for reject in second.rejects] == [(3, "invalid_utf8", "z.md")]
    assert list(read_corpus(corpus, options=options, start=first.end)) == [second]
    (all_too_long,) = read_corpus(corpus, options=ReadOptions(max_line_bytes=5))
    assert [reject.code for reject in all_too_long.rejects] == ["line_too_long"] * 2 + ["invalid_utf8"]


def test_a_template_makes_the_text_of_several_fields_in_every_kind(tmp_path: Path) -> None:
    given = [
        {"id": "a", "text": "t", "lang": "en", "year": 7, "meta": {"title": "T", "pages": 1}},
        {"id": "b", "text": "u", "lang": None, "year": None, "meta": None},
        {"id": "c", "text": None, "lang": None, "year": None, "meta": {"title": None, "pages": 2}},
    ]
    options = ReadOptions(template="{{{meta.title}}} {year}\n{text}")
    for kind in [kind for kind in KINDS if kind not in STRINGS_ALONE]:
        (tmp_path / kind).mkdir()
        (block,) = read_corpus(open_corpus([KINDS[kind](tmp_path / kind, given)]), options=options)
        assert block.documents["text"].to_pylist() == ["{T} 7\nt", "{} \nu"], kind
        assert [(reject.id, reject.code) for reject in block.rejects] == [("c", "missing_text")], kind


def test_a_position_of_another_corpus_is_refused(tmp_path: Path) -> None:
    for kind in KINDS:
        long, short = (
            KINDS[kind](tmp_path / "long" / kind, documents(30)),
            KINDS[kind](tmp_path / "s" / kind, documents(5)),
        )
        options = options_for(kind, block_documents=10)
        first, *_ = read_corpus(open_corpus([long]), options=options)
        assert first.start == START
        with pytest.raises(InputError, match="was changed"):
            list(read_corpus(open_corpus([short]), options=options, start=first.end))


def test_a_dataset_is_read_as_the_datasets_library_saves_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    given = documents(30)
    whole = datasets.Dataset.from_list(given)
    whole.save_to_disk(str(tmp_path / "one"), num_shards=3)
    splits = {"train": whole.select(range(20)), "test": whole.select(range(20, 30))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "splits"))
    for name in ("one", "splits"):
        corpus = open_corpus([tmp_path / name])
        assert metadata_types(corpus, ReadOptions(metadata=NAMES)) == TYPES
        assert rows(list(read_corpus(corpus, options=options_for("saved dataset")))) == expected(given, "saved dataset")


def test_strict_stops_at_the_first_bad_document_of_any_file_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(3)))
    (tmp_path / "b.csv").write_text("id,text\nx,y\nbad\n")
    with pytest.raises(InputError, match=r"The corpus b\.csv, line 3: the row has 1 fields.* \(invalid_row\)\.$"):
        list(read_corpus(open_corpus([tmp_path]), options=ReadOptions(strict=True)))


def test_what_must_be_read_at_many_places_is_no_stream() -> None:
    for data in (parquet(documents(3)), arrow(documents(3))):
        corpus = corpus_of_stream(io.BytesIO(data), "-")
        with pytest.raises(InputError, match="inside a stream or a compressed file; give it as a file"):
            metadata_types(corpus, ReadOptions())
