"""The tokenizers that tests run on: the real Qwen3 one where it was fetched, and a small one of the same kind."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ENDOFTEXT = 151643
IM_END = 151645

#: How Qwen2 and Qwen3 split a text before merging (their tokenizer.json).
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CACHED = Path(__file__).resolve().parent.parent / ".cache" / "qwen3" / "tokenizer.json"

NOT_FETCHED = "the real Qwen3 tokenizer is not there; tests/fetch_qwen3_tokenizer.sh fetches it"


def qwen3_tokenizer_file() -> Path | None:
    """The cached tokenizer.json of Qwen3 as published, or None if it was not fetched."""
    return _CACHED if _CACHED.is_file() else None


def write_qwen3_embedding_tokenizer(folder: Path) -> Path | None:
    """Write `tokenizer.json` as Qwen3-Embedding has it: Qwen3's, plus a post-processor that appends `<|endoftext|>`."""
    source = qwen3_tokenizer_file()
    if source is None:
        return None
    config = json.loads(source.read_bytes())
    config["post_processor"] = append_token("<|endoftext|>", ENDOFTEXT)
    target = folder / "tokenizer.json"
    target.write_text(json.dumps(config), encoding="utf-8")
    return target


def append_token(content: str, token_id: int) -> dict[str, object]:
    """A tokenizer.json post-processor that appends one token, built as Qwen3-Embedding's is."""
    token = {"SpecialToken": {"id": content, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, token],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, token, {"Sequence": {"id": "B", "type_id": 1}}, token],
        "special_tokens": {content: {"id": content, "ids": [token_id], "tokens": [content]}},
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "processors": [byte_level, template]}


def write_small_tokenizer(folder: Path, *, vocab_size: int = 700) -> Path:
    """Train and write a byte-level BPE of Qwen's kind: its split, NFC, its special tokens, `<|endoftext|>` appended."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TRAINING_TEXTS, trainer)
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ("<think>", "</think>")])
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]),
        ]
    )
    target = folder / "tokenizer.json"
    tokenizer.save(str(target))
    return target


_TRAINING_TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the other foxes think nothing of it.",
    "Instruct: Given a question, retrieve passages that answer the query\nQuery:what is a queue?",
    "Der Würfel fällt, Größe und Maß; façade naïve résumé. Съешь ещё этих мягких французских булок.",
    "def f(x):\n    return {'a': 1, 'b': [2, 3]}\r\n\r\nint main() { return 0; }  // 1234567890",
    "日本語の文章と中文的句子。 नमस्ते दुनिया, 안녕하세요 세계, مرحبا بالعالم 😀 👩‍👧",
] * 4
