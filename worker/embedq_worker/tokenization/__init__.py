"""Tokenization: Arrow texts in, packed token ids out, equal to Hugging Face `tokenizers` for every input.

`TextTokenizer` is the door. Behind it: `reference` (exact, slow), `fast` (gigatoken), `routing` (which texts the fast
path must not see), `selfcheck` (whether there is a fast path at all), `assemble` (truncation and special tokens).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import ModelError, UsageError
from numpy.typing import NDArray

from embedq_worker.tokenization.assemble import add_specials, truncate
from embedq_worker.tokenization.columns import TokenColumn, interleave, prepend, text_column
from embedq_worker.tokenization.fast import FastTokenizer
from embedq_worker.tokenization.reference import OnSpecialTokens, ReferenceTokenizer, is_tokenizer_failure
from embedq_worker.tokenization.routing import Router
from embedq_worker.tokenization.selfcheck import find_disagreement

__all__ = ["TextTokenizer", "Tokenized"]

Backend = Literal["auto", "gigatoken", "huggingface"]

#: How far the fast path's word cache may let the process grow before it is dropped, in bytes.
DEFAULT_CACHE_BYTES = 512 << 20


@dataclass(frozen=True)
class Tokenized:
    """The packed tokens of n texts: row `i` is `input_ids[offsets[i]:offsets[i + 1]]`."""

    #: uint32 [total]: token ids, special tokens included, after truncation.
    input_ids: NDArray[np.uint32]
    #: int32 [n + 1]: cumulative row lengths, from 0 (the `cu_seqlens` of a packed forward pass).
    offsets: NDArray[np.int32]
    #: int32 [n]: how many tokens the whole text has, special tokens included, before truncation.
    n_tokens: NDArray[np.int32]
    #: bool [n]: whether the row lost tokens to `max_length`.
    truncated: NDArray[np.bool_]
    #: Row -> why it could not be tokenized. Such a row has length zero, `n_tokens` 0 and is not truncated.
    errors: Mapping[int, str]


class TextTokenizer:
    """A checkpoint's tokenizer, loaded once per process. For one thread at a time; its own threads are `threads`."""

    def __init__(
        self,
        reference: ReferenceTokenizer,
        fast: FastTokenizer | None,
        router: Router,
        *,
        max_length: int,
        notes: tuple[str, ...],
    ) -> None:
        self._reference = reference
        self._fast = fast
        self._router = router
        #: Tokens per row at most, special tokens included.
        self.max_length = max_length
        #: Why a fallback was taken, in words for people; empty where the fast path is in use.
        self.notes = notes

    @classmethod
    def load(
        cls,
        tokenizer_file: Path,
        *,
        max_length: int,
        backend: Backend = "auto",
        threads: int = 1,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> TextTokenizer:
        """Load a tokenizer.json and check the fast path against the reference (about two seconds for 150,000 tokens).

        `auto` takes gigatoken if it serves this tokenizer exactly, else the reference with the reason in `notes`;
        `gigatoken` makes that reason an error. `threads` above 1 lets both libraries use their thread pools, whose size
        is the environment variable RAYON_NUM_THREADS, set here to `threads` unless it is set already.

        Raises ModelError if the file is missing or not a tokenizer, or if `gigatoken` is asked for and cannot serve.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
        if threads > 1:
            os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        reference = ReferenceTokenizer(tokenizer_file)
        if max_length <= reference.specials.count:
            raise ModelError(
                f"a maximum length of {max_length} leaves no room for text: "
                f"the tokenizer adds {reference.specials.count} special tokens"
            )
        router = Router(token.content for token in reference.added_tokens)
        fast: FastTokenizer | None = None
        notes: tuple[str, ...] = ()
        if backend != "huggingface":
            loaded = _load_fast(reference, router, threads=threads, cache_bytes=cache_bytes)
            if isinstance(loaded, FastTokenizer):
                fast = loaded
            elif backend == "gigatoken":
                raise ModelError(f"gigatoken cannot serve {tokenizer_file}: {loaded}")
            else:
                notes = (f"tokenizing with Hugging Face tokenizers, not gigatoken: {loaded}",)
        return cls(reference, fast, router, max_length=max_length, notes=notes)

    @property
    def backend(self) -> str:
        """ "gigatoken" (with the reference for the texts it must not see) or "huggingface"."""
        return "huggingface" if self._fast is None else "gigatoken"

    def encode(
        self,
        texts: pa.StringArray,
        *,
        prompt: str = "",
        max_length: int | None = None,
        truncation_side: Literal["right", "left"] = "right",
        on_special_tokens: OnSpecialTokens = "keep",
    ) -> Tokenized:
        """Tokenize a column of texts (string or large_string, sliced or not, without nulls).

        `prompt` is put before every text as characters, before tokenizing. `max_length` counts special tokens; above
        the tokenizer's own maximum it means that maximum. Truncation takes text tokens, never special ones: from the
        end, or from the beginning where `truncation_side` is "left" (which may take the prompt). `on_special_tokens`:
        "keep" reads a special token's name inside a text (or prompt) as that token, as the reference does; "escape"
        reads it as ordinary text, except added tokens that the tokenizer does not call special.

        A text on which the tokenizer fails is reported in `errors`, never raised. Raises UsageError if `max_length`
        is too small for the special tokens.
        """
        specials = self._reference.specials
        limit = self.max_length if max_length is None else min(max_length, self.max_length)
        if limit < specials.count:
            raise UsageError(f"max_length is {limit}, but the tokenizer adds {specials.count} special tokens to a text")
        tokens, errors = self._tokenize(prepend(prompt, texts), on_special_tokens)
        n_tokens = (np.diff(tokens.offsets) + specials.count).astype(np.int32)
        tokens, truncated = truncate(tokens, limit - specials.count, truncation_side)
        failed: NDArray[np.bool_] | None = None
        if errors:
            failed = np.zeros(len(tokens), dtype=np.bool_)
            failed[list(errors)] = True
            n_tokens[failed] = 0
        packed = add_specials(tokens, specials, failed)
        return Tokenized(packed.ids, packed.offsets.astype(np.int32), n_tokens, truncated, errors)

    def encode_as(self, texts: pa.StringArray, encoding: EncodingOptions, *, prompt: str | None = None) -> Tokenized:
        """`encode` with the options of a run; `prompt` takes the place of the run's."""
        return self.encode(
            texts,
            prompt=encoding.prompt if prompt is None else prompt,
            max_length=encoding.max_length,
            truncation_side=encoding.truncation_side.value,
            on_special_tokens=encoding.on_special_tokens.value,
        )

    @property
    def counts_bytes(self) -> bool:
        """Whether every token stands for at least one byte of the normalised text."""
        return self._fast is not None

    def token_ends(self, text: str) -> NDArray[np.int64]:
        """Code points of `text` before the end of each of its tokens, special tokens aside: int64 [tokens], ascending.

        A token that ends inside of a code point counts it whole.
        """
        if self._fast is not None:
            column = text_column(pa.array([text], pa.string()))
            if not self._router.unsafe(column).any():
                ends = np.cumsum(self._byte_lengths[self._fast.encode(column).ids])
                if len(ends) and ends[-1] == len(column.data):
                    starts = (column.data & 0xC0) != 0x80
                    return np.cumsum(starts, dtype=np.int32)[ends - 1].astype(np.int64)
        return self._reference.token_ends(text)

    @cached_property
    def _byte_lengths(self) -> NDArray[np.int64]:
        return self._reference.byte_lengths()

    def _tokenize(self, texts: pa.Array, on_special_tokens: OnSpecialTokens) -> tuple[TokenColumn, dict[int, str]]:
        if self._fast is None:
            return self._by_reference(texts, on_special_tokens)
        column = text_column(texts)
        unsafe = self._router.unsafe(column)
        try:
            if not unsafe.any():
                return self._fast.encode(column), {}
            fast = self._fast.encode(text_column(texts.filter(pa.array(~unsafe))))
        except BaseException as error:
            if not is_tokenizer_failure(error):
                raise
            # The reference decides which texts can be tokenized at all, and a tokenizer that failed midway is replaced.
            self._fast.reload()
            return self._by_reference(texts, on_special_tokens)
        slow, errors = self._by_reference(texts.filter(pa.array(unsafe)), on_special_tokens)
        rows = np.flatnonzero(unsafe)
        return interleave(fast, slow, unsafe), {int(rows[row]): message for row, message in errors.items()}

    def _by_reference(self, texts: pa.Array, on_special_tokens: OnSpecialTokens) -> tuple[TokenColumn, dict[int, str]]:
        encoded = self._reference.encode(texts.to_pylist(), on_special_tokens)
        return encoded.tokens, encoded.errors


def _load_fast(reference: ReferenceTokenizer, router: Router, *, threads: int, cache_bytes: int) -> FastTokenizer | str:
    """The fast path for this tokenizer, or the reason why there is none."""
    reason = reference.why_not_byte_level_bpe()
    if reason is not None:
        return reason
    try:
        fast = FastTokenizer(reference.serialized, threads=threads, cache_bytes=cache_bytes)
        if not fast.is_byte_level_bpe:
            return "it loads this tokenizer as something other than byte-level BPE"
        disagreement = find_disagreement(fast, reference, router)
    except ImportError:
        return "it is not installed"
    except BaseException as error:
        if not is_tokenizer_failure(error):
            raise
        return f"it fails on this tokenizer ({' '.join(str(error).split()) or type(error).__name__})"
    if disagreement is not None:
        return f"it gives other token ids than the reference for {disagreement}"
    return fast
