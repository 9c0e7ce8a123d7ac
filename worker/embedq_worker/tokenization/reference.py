"""The reference: Hugging Face `tokenizers`. What it says a text's ids are, they are; it is exact and slow."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from embedq_schemas.errors import ModelError
from numpy.typing import NDArray

from embedq_worker.tokenization.assemble import Specials
from embedq_worker.tokenization.columns import TokenColumn, offsets_of

#: An encoding object of `tokenizers` takes about a hundred bytes per token, so texts are handed over in small portions.
_PORTION_CHARACTERS = 1 << 20
_PORTION_TEXTS = 1024

OnSpecialTokens = Literal["keep", "escape"]


@dataclass(frozen=True)
class ReferenceTokens:
    """Bare token ids of texts, and why a text has none (row -> message)."""

    tokens: TokenColumn
    errors: dict[int, str] = field(default_factory=dict)


def is_tokenizer_failure(error: BaseException) -> bool:
    """Whether a text caused this: an ordinary exception, or a Rust panic, which pyo3 derives from BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class ReferenceTokenizer:
    """A loaded tokenizer.json with truncation and padding switched off. For one thread at a time."""

    def __init__(self, tokenizer_file: Path) -> None:
        if not tokenizer_file.is_file():
            raise ModelError(f"the tokenizer file {tokenizer_file} does not exist")
        try:
            #: The file's content, as the fast path is to load it.
            self.serialized = tokenizer_file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.serialized)
        except BaseException as error:
            if not is_tokenizer_failure(error):
                raise
            raise ModelError(f"{tokenizer_file} is not a readable tokenizer.json: {_one_line(error)}") from error
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.serialized = self._tokenizer.to_str().encode()
        self.specials = self._find_specials(tokenizer_file)

    @property
    def added_tokens(self) -> tuple[tokenizers.AddedToken, ...]:
        return tuple(self._tokenizer.get_added_tokens_decoder().values())

    def encode(self, texts: list[str], on_special_tokens: OnSpecialTokens = "keep") -> ReferenceTokens:
        """Token ids of every text, without the post-processor's special tokens.

        "keep" reads the name of a special token inside a text as that token, as `tokenizers` does by default; "escape"
        reads it as ordinary text (`encode_special_tokens`). Added tokens that are not special are tokens either way.
        A text on which the tokenizer raises or panics gets an entry in `errors` and no ids; the others are unaffected.
        """
        self._tokenizer.encode_special_tokens = on_special_tokens == "escape"
        rows: list[list[int]] = []
        errors: dict[int, str] = {}
        for portion in _portions(texts):
            try:
                encodings = self._tokenizer.encode_batch_fast(portion, add_special_tokens=False)
                rows.extend(encoding.ids for encoding in encodings)
            except BaseException as error:
                if not is_tokenizer_failure(error):
                    raise
                for text in portion:
                    try:
                        rows.append(self._tokenizer.encode(text, add_special_tokens=False).ids)
                    except BaseException as own:
                        if not is_tokenizer_failure(own):
                            raise
                        errors[len(rows)] = _one_line(own)
                        rows.append([])
        offsets = offsets_of(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
        ids = np.empty(offsets[-1], dtype=np.uint32)
        for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
            ids[start:end] = row
        return ReferenceTokens(TokenColumn(offsets, ids), errors)

    def token_ends(self, text: str) -> NDArray[np.int64]:
        """Code points of `text` before the end of each token, special tokens aside: int64 [tokens], ascending.

        A text above a million code points is read in parts, where a token at the seam may differ. Empty where the
        tokenizer fails.
        """
        ends: list[int] = []
        try:
            for first in range(0, len(text), _PORTION_CHARACTERS):
                part = self._tokenizer.encode(text[first : first + _PORTION_CHARACTERS], add_special_tokens=False)
                ends += [first + end for _, end in part.offsets]
        except BaseException as error:
            if not is_tokenizer_failure(error):
                raise
            return np.empty(0, dtype=np.int64)
        return np.maximum.accumulate(np.array(ends, dtype=np.int64)) if ends else np.empty(0, dtype=np.int64)

    def byte_lengths(self) -> NDArray[np.int64]:
        """For byte-level BPE: bytes that each token id stands for, int64 [largest id + 1]."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        lengths = np.zeros(max([*vocabulary.values(), *added], default=-1) + 1, dtype=np.int64)
        # Byte-level vocabularies spell every byte as one character.
        for token, number in vocabulary.items():
            lengths[number] = len(token)
        for number, special in added.items():
            lengths[number] = len(special.content.encode())
        return lengths

    def why_not_byte_level_bpe(self) -> str | None:
        """What in this tokenizer the fast path's routing was not made for; None for byte-level BPE with NFC or nothing.

        The stable code points hold for these alone: lowercasing or NFKC ask Unicode further questions, and an added
        token that is matched after normalisation cannot be found in the bytes before it.
        """
        config = json.loads(self.serialized)
        model = config["model"]
        kind = model.get("type", "model without a type")
        if kind != "BPE" or model.get("byte_fallback"):
            return f"it serves byte-level BPE here, and this tokenizer is {kind}"
        if model.get("dropout"):
            return "this tokenizer drops merges at random"
        if "ByteLevel" not in _kinds(config.get("pre_tokenizer"), "pretokenizers"):
            return "it serves byte-level BPE here, and this BPE has no byte-level pre-tokenizer"
        normalizers = _kinds(config.get("normalizer"), "normalizers")
        if not normalizers <= {"NFC"}:
            return f"this tokenizer normalises with {', '.join(sorted(normalizers - {'NFC'}))}"
        if normalizers and any(token["normalized"] for token in config.get("added_tokens") or ()):
            return "this tokenizer matches added tokens after normalising"
        return None

    def _find_specials(self, tokenizer_file: Path) -> Specials:
        """Derive the special tokens by encoding with and without them; where a text repeats one, another text tells."""
        self._tokenizer.encode_special_tokens = False
        candidates: set[Specials] | None = None
        for text in ("", "a", "the of and", "1 2", "\u4f60\u597d"):
            try:
                bare = self._tokenizer.encode(text, add_special_tokens=False).ids
                full = self._tokenizer.encode(text, add_special_tokens=True).ids
            except BaseException as error:
                # A word-level vocabulary without an unknown token raises on words it lacks; another text will do.
                if not is_tokenizer_failure(error):
                    raise
                continue
            if text and not bare:
                continue
            splits = {
                Specials(tuple(full[:at]), tuple(full[at + len(bare) :]))
                for at in range(len(full) - len(bare) + 1)
                if full[at : at + len(bare)] == bare
            }
            candidates = splits if candidates is None else candidates & splits
        if not candidates:
            raise ModelError(
                f"the post-processor of {tokenizer_file} does something other than adding tokens around a text"
            )
        return min(candidates, key=lambda specials: len(specials.prefix))


def _kinds(step: dict[str, Any] | None, members: str) -> set[str]:
    """The types of a pipeline step of tokenizer.json: its own, or those of a Sequence's members."""
    if step is None:
        return set()
    if step["type"] == "Sequence":
        return set().union(*(_kinds(member, members) for member in step[members]))
    return {step["type"]}


def _portions(texts: list[str]) -> list[list[str]]:
    portions: list[list[str]] = []
    characters = 0
    for text in texts:
        if not portions or characters + len(text) > _PORTION_CHARACTERS or len(portions[-1]) == _PORTION_TEXTS:
            portions.append([])
            characters = 0
        portions[-1].append(text)
        characters += len(text)
    return portions


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
