"""How a run's texts become vectors: the options that, with the model, decide every output bit."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from embedq_schemas.quantize import VectorType, decode_ranges


class TruncationSide(StrEnum):
    """Which end of a text that exceeds the maximum is dropped."""

    RIGHT = "right"
    LEFT = "left"


class OnSpecialTokens(StrEnum):
    """What a literal `<|im_end|>` in user text becomes: the special token (as the reference does), or plain text."""

    KEEP = "keep"
    ESCAPE = "escape"


class OnLong(StrEnum):
    """What happens to a text above the maximum length: its end is dropped (its row says `truncated`), it is an error
    row, or it becomes several documents, which whoever reads the corpus makes of it.
    """

    TRUNCATE = "truncate"
    ERROR = "error"
    CHUNK = "chunk"


class EncodingOptions(BaseModel):
    """Options of one run. Two documents with equal options may share a token batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Matryoshka: vectors are cut to this many components, then normalised. None keeps the model's dimension.
    dimensions: int | None = Field(default=None, ge=1, le=65536)
    #: Text put before every document, verbatim.
    prompt: str = Field(default="", max_length=65536)
    #: L2-normalise in float32. None follows the checkpoint.
    normalize: bool | None = None
    #: Tokens per document, specials included. None follows the checkpoint.
    max_length: int | None = Field(default=None, ge=2, le=1 << 20)
    truncation_side: TruncationSide = TruncationSide.RIGHT
    on_special_tokens: OnSpecialTokens = OnSpecialTokens.KEEP
    on_long: OnLong = OnLong.TRUNCATE
    #: For `chunk`: tokens of a chunk at most, specials and prompt included; None means the maximum length.
    chunk_tokens: int | None = Field(default=None, ge=2, le=1 << 20)
    #: For `chunk`: tokens that a chunk repeats of the one before it, at most; None means an eighth of `chunk_tokens`.
    chunk_overlap: int | None = Field(default=None, ge=0, le=1 << 20)
    #: How vectors are stored and sent.
    vector_type: VectorType = VectorType.FLOAT32
    #: Ranges of int8 and uint8, as `encode_ranges` writes them. None: found from the run's first vectors.
    vector_ranges: str | None = Field(default=None, max_length=1 << 20)

    def longest(self, most: int) -> int:
        """Tokens a document may have, specials included, where the model takes `most`."""
        return min(self.max_length or most, most)

    @property
    def ranges(self) -> NDArray[np.float32] | None:
        """`vector_ranges` as float32 [2, dimensions]."""
        return None if self.vector_ranges is None else decode_ranges(self.vector_ranges)

    @model_validator(mode="after")
    def _chunks_fit(self) -> Self:
        sizes = [size for size in (self.chunk_tokens, self.chunk_overlap) if size is not None]
        if sizes and self.on_long is not OnLong.CHUNK:
            raise ValueError(
                "chunk_tokens and chunk_overlap are given, but long texts are not cut: on_long is not chunk"
            )
        if self.chunk_tokens and self.max_length and self.chunk_tokens > self.max_length:
            raise ValueError(f"chunks of {self.chunk_tokens} tokens do not fit the maximum of {self.max_length}")
        if self.chunk_tokens and 2 * (self.chunk_overlap or 0) > self.chunk_tokens:
            raise ValueError(
                f"chunk_overlap {self.chunk_overlap} is above half of the {self.chunk_tokens} tokens of a chunk"
            )
        return self

    @model_validator(mode="after")
    def _vectors_fit(self) -> Self:
        ranges = self.ranges
        if ranges is not None and not self.vector_type.ranged:
            raise ValueError(f"{self.vector_type} vectors have no ranges; int8 and uint8 have")
        fault = None if self.dimensions is None else self.vector_type.fault(self.dimensions, ranges)
        if fault is not None:
            raise ValueError(fault)
        return self
