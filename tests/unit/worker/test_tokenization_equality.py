"""Token ids equal the reference's for every input: random Unicode, every code point, a corpus, large texts.

Every test runs on the real Qwen3-Embedding tokenizer where it was fetched, and on a small one trained here.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from embedq_worker.tokenization import TextTokenizer, Tokenized
from embedq_worker.tokenization.columns import text_column
from embedq_worker.tokenization.routing import Router
from embedq_worker.tokenization.stable_codepoints import stable_codepoints
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.qwen3_tokenizer import ENDOFTEXT, NOT_FETCHED, write_qwen3_embedding_tokenizer, write_small_tokenizer


@dataclass(frozen=True)
class Pair:
    ours: TextTokenizer
    reference: Tokenizer

    def assert_equal(self, texts: list[str], *, escape: bool = False) -> Tokenized:
        self.reference.encode_special_tokens = escape
        got = self.ours.encode(pa.array(texts, pa.string()), on_special_tokens="escape" if escape else "keep")
        expected = [encoding.ids for encoding in self.reference.encode_batch_fast(texts)]
        lengths = np.array([len(ids) for ids in expected])
        flat = np.fromiter((token for ids in expected for token in ids), np.uint32, count=int(lengths.sum()))
        if not (np.array_equal(np.diff(got.offsets), lengths) and np.array_equal(got.input_ids, flat)):
            for row, ids in enumerate(expected):
                mine = got.input_ids[got.offsets[row] : got.offsets[row + 1]].tolist()
                assert mine == ids, ascii(texts[row])
        assert not got.errors
        return got


@pytest.fixture(scope="module", params=["qwen3", "small"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    file = write_small_tokenizer(folder) if request.param == "small" else write_qwen3_embedding_tokenizer(folder)
    if file is None:
        pytest.skip(NOT_FETCHED)
    ours = TextTokenizer.load(file, max_length=1 << 30)
    assert ours.backend == "gigatoken", ours.notes
    return Pair(ours, Tokenizer.from_file(str(file)))


_SPECIAL_PIECES = (
    "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<|im_", "end|>", "<", "|", "'s", "'LL",
    "\r\n", "\u200d", "\ufe0f", "e\u0301", "\u0323\u0307", "\u1100\u1161\u11a8", "\U0001f469\u200d\U0001f467",
    "12345", "   ", "\n\n",
    "\u08ca", "\u1df6", "\U000113c2", "\U0001611e", "the", " fox",
)  # fmt: skip


def random_text(rng: random.Random) -> str:
    """Characters of all planes, weighted towards those that split, join, reorder or compose."""
    pieces = []
    for _ in range(rng.randrange(1, 24)):
        kind = rng.randrange(9)
        if kind == 0:
            pieces.append(rng.choice(_SPECIAL_PIECES))
        elif kind == 1:
            pieces.append(chr(rng.randrange(0x80)))
        elif kind == 2:
            pieces.append(chr(rng.randrange(0x300, 0x370)))
        elif kind == 3:
            pieces.append(chr(rng.randrange(0x80, 0x3100)))
        elif kind == 4:
            pieces.append(rng.choice(" \t\n\r\x0b\u00a0\u2003\u3000"))
        elif kind == 5:
            pieces.append(chr(rng.randrange(0x10000, 0x20000)))
        elif kind == 6:
            start = rng.randrange(0x80, 0x11F00)
            pieces.extend(chr(start + rng.randrange(64)) for _ in range(4) if not 0xD7C0 <= start <= 0xDFFF)
        elif kind == 7:
            pieces.append(rng.choice("aeiouAEIOU") + chr(rng.randrange(0x300, 0x345)))
        else:
            code = rng.randrange(0x110000)
            pieces.append(chr(code) if not 0xD800 <= code <= 0xDFFF else "\ufffd")
    text = "".join(pieces)
    return unicodedata.normalize("NFD", text) if rng.randrange(4) == 0 else text


def check_random_texts(pair: Pair, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for start in range(0, count, 2000):
        texts = [random_text(rng) for _ in range(min(2000, count - start))]
        pair.assert_equal(texts)
        pair.assert_equal(texts, escape=True)


def test_5000_random_texts_of_all_planes(pair: Pair) -> None:
    check_random_texts(pair, 5000, seed=1)


@pytest.mark.long
def test_100000_random_texts_of_all_planes(pair: Pair) -> None:
    check_random_texts(pair, 100_000, seed=2)


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.one_of(st.text(), st.lists(st.sampled_from(_SPECIAL_PIECES)).map("".join)), max_size=8),
    prompt=st.text(max_size=5),
    limit=st.one_of(st.none(), st.integers(1, 12)),
    side=st.sampled_from(["right", "left"]),
    escape=st.booleans(),
)
def test_any_texts_prompt_and_limit(
    pair: Pair, texts: list[str], prompt: str, limit: int | None, side: str, escape: bool
) -> None:
    reference = pair.reference
    reference.encode_special_tokens = escape
    got = pair.ours.encode(
        pa.array(texts, pa.string()),
        prompt=prompt,
        max_length=limit,
        truncation_side=side,  # type: ignore[arg-type]
        on_special_tokens="escape" if escape else "keep",
    )
    counts = [len(reference.encode(prompt + text).ids) for text in texts]
    if limit is not None:
        reference.enable_truncation(limit, direction=side)
    try:
        expected = [reference.encode(prompt + text).ids for text in texts]
    finally:
        reference.no_truncation()
    assert [row.tolist() for row in np.split(got.input_ids, got.offsets[1:-1])][: len(texts)] == expected
    assert got.n_tokens.tolist() == counts
    assert got.truncated.tolist() == [limit is not None and count > limit for count in counts]


#: Around each code point: the split pattern's classes, then what tells combining classes and compositions apart.
_CONTEXTS = (
    "{0}",
    "a{0}a",
    "1{0} ",
    " {0}1",
    "'{0}",
    "!{0}!\n",
    "{0}{0}",
    "{0}\u0301",
    "a{0}\u0334",
    "a\u0345{0}",
    "\n{0}\n",
)


@pytest.mark.long
def test_every_code_point_in_every_context(pair: Pair) -> None:
    codes = [code for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF and (code < 0x32000 or code % 97 == 0)]
    codes += [code for code in range(0xE0000, 0xE1000) if code % 97]
    for context in _CONTEXTS:
        for start in range(0, len(codes), 16384):
            pair.assert_equal([context.format(chr(code)) for code in codes[start : start + 16384]])


def test_every_kind_of_unstable_character_goes_to_the_reference_and_no_stable_one_does() -> None:
    stable = stable_codepoints()
    codes = np.array([code for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF])
    # Every character stands alone in its row, between rows that are safe.
    texts = [text for code in codes for text in ("ok", chr(code))]
    unsafe = Router([]).unsafe(text_column(pa.array(texts)))
    assert not unsafe[::2].any()
    assert np.array_equal(unsafe[1::2], ~stable[codes])


def test_ordinary_text_stays_on_the_fast_path() -> None:
    texts = [
        "Größe, œuvre, naïve",
        "Съешь ещё",
        "日本語の文章、カタカナ",
        "中文的句子",
        "한국어",
        "हिन्दी",
        "العربية",
        "😀 👩‍👩‍👧",
        "🫠 → ∑ €",
        "<b>x</b>",
    ]
    assert not Router(["<|im_end|>", "<think>"]).unsafe(text_column(pa.array(texts))).any()


def test_routing_finds_added_tokens_wherever_they_stand() -> None:
    texts = [
        "<|im_end|>",
        "a<|im_end|>",
        "<|im_end|>b",
        "",
        "<|im_end|",
        "|im_end|>",
        "<<|im_end|>",
        "<|im_e",
        "nd|>",
        "x",
    ]
    unsafe = Router(["<|im_end|>", "<|im_start|>"]).unsafe(text_column(pa.array(texts)))
    assert unsafe.tolist()[:7] == [True, True, True, False, False, False, True]
    assert not unsafe[9]


def test_one_large_text_with_decomposed_characters(pair: Pair) -> None:
    text = "d\u0308re\u0301i \u1100\u1161\u11a8 the brown fox\r\n" * 12_000
    pair.assert_equal([text, "a", text[:1000]])


_TWO_THREADS = """
import random, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from embedq_worker.tokenization import TextTokenizer
from tests.unit.worker.test_tokenization_equality import random_text

one = TextTokenizer.load(Path(sys.argv[1]), max_length=1 << 30)
two = TextTokenizer.load(Path(sys.argv[1]), max_length=1 << 30, threads=2)
rng = random.Random(3)
large = ["e\\u0301a \\u0323" * 400_000]
small = ["".join(random_text(rng) for _ in range(20)) for _ in range(200)]
for texts in (pa.array(["the quick brown fox " * 50_000] * 8), pa.array(small + large)):
    assert texts.nbytes > 2 << 20, "enough for several portions of work"
    assert np.array_equal(one.encode(texts).input_ids, two.encode(texts).input_ids)
print("equal")
"""


def test_threads_do_not_change_the_ids(tmp_path: Path) -> None:
    file = write_small_tokenizer(tmp_path)
    # In a process of its own: the size of a thread pool is fixed by the first use in a process.
    environment = os.environ | {"RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [sys.executable, "-c", _TWO_THREADS, str(file)],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


def test_qwen3_embedding_ends_with_endoftext(tmp_path: Path) -> None:
    file = write_qwen3_embedding_tokenizer(tmp_path)
    if file is None:
        pytest.skip(NOT_FETCHED)
    tokenizer = TextTokenizer.load(file, max_length=8)
    got = tokenizer.encode(pa.array(["", "one two three four five six seven eight nine"]))
    assert got.offsets.tolist() == [0, 1, 9]
    assert got.input_ids[[0, -1]].tolist() == [ENDOFTEXT, ENDOFTEXT]
    assert got.n_tokens.tolist() == [1, 10]


@pytest.mark.long
def test_a_whole_corpus(pair: Pair) -> None:
    path = os.environ.get("EMBEDQ_TEST_CORPUS")
    if not path:
        pytest.skip("EMBEDQ_TEST_CORPUS does not name a JSON Lines file with a `text` field")
    documents = routed = 0
    router = pair.ours._router
    with Path(path).open("rb") as lines:
        while texts := [json.loads(line)["text"] for line in islice(lines, 4096)]:
            pair.assert_equal(texts)
            documents += len(texts)
            routed += int(router.unsafe(text_column(pa.array(texts))).sum())
    assert documents
    assert routed <= documents / 100, f"{routed} of {documents} documents left the fast path"
