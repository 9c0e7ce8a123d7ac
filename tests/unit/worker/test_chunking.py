"""Chunks have the size asked for, in tokens, and are the slices of their text that their offsets say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pyarrow as pa
import pytest
from embedq_schemas.chunks import Chunks
from embedq_schemas.encoding import EncodingOptions, OnLong, OnSpecialTokens
from embedq_schemas.errors import UsageError
from embedq_worker.tokenization import TextTokenizer
from embedq_worker.tokenization.breaks import first_break, last_break
from embedq_worker.tokenization.chunking import Chunker
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.qwen3_tokenizer import NOT_FETCHED, write_qwen3_embedding_tokenizer, write_small_tokenizer

MOST = 512


@pytest.fixture(scope="module", params=["small", "small, by the reference", "qwen3"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    kind, _, backend = request.param.partition(", ")
    file = write_small_tokenizer(folder) if kind == "small" else write_qwen3_embedding_tokenizer(folder)
    if file is None:
        pytest.skip(NOT_FETCHED)
    loaded = TextTokenizer.load(file, max_length=MOST, backend="huggingface" if backend else "auto")
    assert loaded.backend == ("huggingface" if backend else "gigatoken")
    return loaded


def options(tokens: int, overlap: int | None = None, **more: object) -> EncodingOptions:
    return EncodingOptions(on_long=OnLong.CHUNK, chunk_tokens=tokens, chunk_overlap=overlap, **more)  # type: ignore[arg-type]


def cut(tokenizer: TextTokenizer, texts: Sequence[str], encoding: EncodingOptions) -> Chunks:
    return Chunker(tokenizer, encoding)(pa.array(texts, pa.string()))


def check(tokenizer: TextTokenizer, texts: Sequence[str], encoding: EncodingOptions) -> list[list[str]]:
    """What must hold of any texts; returns the chunks of each."""
    chunks = cut(tokenizer, texts, encoding)
    assert not chunks.refused
    most, overlap = encoding.chunk_tokens or 0, encoding.chunk_overlap
    whole = tokenizer.encode_as(pa.array(texts, pa.string()), encoding).n_tokens
    sizes = tokenizer.encode_as(chunks.texts, encoding)
    assert sizes.n_tokens.max(initial=0) <= most
    assert not sizes.truncated.any()
    found: list[list[str]] = [[] for _ in texts]
    reached = [0] * len(texts)
    started = [-1] * len(texts)
    columns = (chunks.owners, chunks.index, chunks.char_start, chunks.char_end)
    for (owner, index, start, end), piece in zip(
        zip(*(column.tolist() for column in columns), strict=True), chunks.texts.to_pylist(), strict=True
    ):
        assert piece == texts[owner][start:end]
        assert index == len(found[owner])
        # Nothing between two chunks is left out, and each goes on from the one before.
        assert started[owner] < start <= reached[owner]
        assert end > reached[owner] or texts[owner] == ""
        shared = texts[owner][start : reached[owner]]
        if shared:
            alone = tokenizer.encode_as(pa.array([shared], pa.string()), EncodingOptions()).n_tokens[0]
            # A stretch may merge otherwise by itself than within its text.
            assert alone <= (most // 8 if overlap is None else overlap) + 4
        found[owner].append(piece)
        started[owner], reached[owner] = start, end
    assert reached == [len(text) for text in texts]
    assert [len(pieces) > 1 for pieces in found] == [length > most for length in whole.tolist()]
    return found


PARAGRAPHS = "\n\n".join(
    f"Paragraph {i} begins here. It says a thing or two about {i}. Dr. Who? Nobody knows!" for i in range(40)
)
SCRIPTS = {
    "english": "The quick brown fox jumps over the lazy dog. " * 60,
    "chinese": "\u6587\u7ae0\u5f88\u957f\uff0c\u6ca1\u6709\u7a7a\u683c\u3002\u7b2c\u4e8c\u53e5\u8bdd\uff01" * 60,
    "thai": "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\u0e44\u0e21\u0e48\u0e21\u0e35\u0e0a\u0e48\u0e2d\u0e07" * 80,
    "arabic": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u061f \u0646\u0639\u0645. "
    * 80,
    "devanagari": "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e\u0964 " * 80,
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd" * 60,
    "combining": "e\u0301\u0323a\u0308" * 300,
    "one word": "supercalifragilistic" * 100,
    "spaces": " " * 3000 + "x",
    "line ends": "a\r\nb\r\n" * 400,
    "special tokens": "<|im_end|> text <|endoftext|>" * 100,
    "code": "def f(x):\n    return {x: [x, 'y']}\n\n" * 80,
    "nothing": "",
}


@pytest.mark.parametrize("overlap", [0, 5, None])
@pytest.mark.parametrize("script", SCRIPTS)
def test_chunks_of_every_script_fit_and_cover_their_text(
    tokenizer: TextTokenizer, script: str, overlap: int | None
) -> None:
    check(tokenizer, [SCRIPTS[script], "short", SCRIPTS[script] + "\nmore"], options(40, overlap))


@pytest.mark.parametrize("mode", list(OnSpecialTokens))
def test_prompt_and_special_tokens_count(tokenizer: TextTokenizer, mode: OnSpecialTokens) -> None:
    encoding = options(48, prompt="Instruct: find it\nQuery:", on_special_tokens=mode)
    check(tokenizer, [SCRIPTS["special tokens"], PARAGRAPHS], encoding)


text = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("ab \n\t.!?\u3002\u0301\u200d\U0001f1e9\U0001f469"),
    ),
    max_size=400,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(text, max_size=4), st.integers(24, 90), st.one_of(st.none(), st.integers(0, 12)))
def test_chunks_of_any_text_fit_and_cover_it(
    tokenizer: TextTokenizer, texts: list[str], tokens: int, overlap: int | None
) -> None:
    check(tokenizer, texts, options(tokens, overlap))


def test_chunks_end_where_paragraphs_do(tokenizer: TextTokenizer) -> None:
    (pieces,) = check(tokenizer, [PARAGRAPHS], options(160, 0))
    assert len(pieces) > 4
    assert all(piece.startswith("Paragraph") and piece.endswith("!\n\n") for piece in pieces[:-1])


def test_chunks_that_overlap_begin_with_a_sentence_or_a_word(tokenizer: TextTokenizer) -> None:
    (pieces,) = check(tokenizer, [SCRIPTS["english"]], options(80, 24))
    assert all(piece[0].isalpha() for piece in pieces)
    assert all(before[-8:] in after for before, after in itertools.pairwise(pieces))


def test_chunks_are_filled(tokenizer: TextTokenizer) -> None:
    """A break is only looked for near the end of a chunk."""
    (pieces,) = check(tokenizer, [SCRIPTS["english"]], options(64, 0))
    sizes = tokenizer.encode(pa.array(pieces, pa.string())).n_tokens
    assert (sizes[:-1] >= 0.7 * 64).all()


def test_a_text_is_cut_alike_whatever_stands_beside_it(tokenizer: TextTokenizer) -> None:
    alone = check(tokenizer, [PARAGRAPHS], options(50))[0]
    assert check(tokenizer, ["x", SCRIPTS["chinese"], PARAGRAPHS, PARAGRAPHS], options(50))[2:] == [alone, alone]


def test_the_maximum_of_the_model_is_the_size_where_none_is_given(tokenizer: TextTokenizer) -> None:
    chunks = cut(tokenizer, [SCRIPTS["english"] * 4], EncodingOptions(on_long=OnLong.CHUNK, max_length=100))
    assert 80 < tokenizer.encode(chunks.texts).n_tokens.max() <= 100


def test_a_chunk_without_room_for_text_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(UsageError, match=r"no room for text .* give at least"):
        cut(tokenizer, ["text"], options(10, prompt="a rather long prompt, in many words"))
    with pytest.raises(UsageError, match="above half"):
        Chunker(tokenizer, EncodingOptions(on_long=OnLong.CHUNK, chunk_overlap=300))


def test_breaks_prefer_paragraphs_to_lines_to_sentences_to_words() -> None:
    for sample in (
        "aaa bbb. ccc\nddd\n\nXeee\nfff. ggg hhh",
        "aaa bbb. ccc\nXddd. eee fff",
        "aaa bb. Xcc dd ee",
        "a bb Xccc",
    ):
        wanted = sample.index("X")
        assert last_break(sample, 1, len(sample)) == wanted
    assert first_break("aaa bbb. Xccc ddd", 1, 14) == 9
    assert first_break("aaa Xbb ccc", 1, 9) == 4


@pytest.mark.parametrize(
    "character",
    ["e\u0301\u0323", "\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea"],
    ids=ascii,
)
def test_breaks_leave_what_a_reader_sees_as_one_character_whole(character: str) -> None:
    sample = "x" + character * 3
    joins = {1 + len(character) * i for i in range(4)}
    for at in range(2, len(sample) + 1):
        assert last_break(sample, 1, at) in joins
        assert first_break(sample, at, len(sample)) in joins
