"""A dead letter: one document that has no vector, with stage, code and message; an output row of the run's errors."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from embedq_schemas.errors import CodecError, DocumentErrorCode

MAX_MESSAGE_CHARS = 500


class Stage(StrEnum):
    """Where the document failed."""

    PRODUCE = "produce"
    TOKENIZE = "tokenize"
    EMBED = "embed"


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One row of `embedq errors RUN` and of `_errors/part-*.jsonl`."""

    ordinal: int
    stage: Stage
    code: DocumentErrorCode
    message: str
    id: str | None = None
    #: 1-based line of the input; its row or element where it has no lines.
    line: int | None = None
    #: File of the input, where it has several.
    file: str | None = None
    #: Which chunk of the document, from 0, where its text was cut.
    chunk: int | None = None

    def encode(self) -> bytes:
        """One JSON object without a newline."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> DeadLetter:
        """Inverse of `encode`; raises CodecError."""
        try:
            return _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CodecError(f"dead_letter: {str(error)[:200]}") from None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(DeadLetter)


def clip(message: object) -> str:
    """An error's text, one line, bounded, safe to encode."""
    text = " ".join(str(message).split()) or type(message).__name__
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
