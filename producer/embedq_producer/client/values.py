"""What a client hands out: arrays of embeddings, failures, pages of results, facts about a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from embedq_schemas.dead_letter import DeadLetter, Stage
from embedq_schemas.errors import DocumentErrorCode, EmbedqError
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Vectors of n texts in the order of the input. `numpy.asarray(embeddings)` is `embeddings.vectors`."""

    #: float32 [n, dimension], or as `EncodingOptions.vector_type` says (float16; int8, uint8; binary and ubinary with
    #: dimension / 8 columns). The row of a document that failed is NaN, in integer types 0.
    vectors: NDArray[Any]
    #: int32 [n]: tokens of each text, special ones included, before truncation; 0 for one that failed.
    n_tokens: NDArray[np.int32]
    #: bool [n]: whether tokens were dropped because the text exceeds the maximum length.
    truncated: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.vectors)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if dtype is None or np.dtype(dtype) == self.vectors.dtype:
            return self.vectors.copy() if copy else self.vectors
        if copy is False:
            raise ValueError(f"vectors are {self.vectors.dtype}; as {np.dtype(dtype)} they need a copy")
        return self.vectors.astype(dtype)


@dataclass(frozen=True)
class Failure:
    """Why one document has no vector."""

    #: Position in the input, from 0; -1 where the job was so broken that it is not known.
    index: int
    #: The document's id, where known.
    id: str | None
    code: DocumentErrorCode
    message: str
    stage: Stage

    @classmethod
    def of(cls, letter: DeadLetter) -> Failure:
        """The failure that a dead letter tells of."""
        return cls(letter.ordinal, letter.id, letter.code, letter.message, letter.stage)


@dataclass(frozen=True, eq=False)
class RunResults(Embeddings):
    """All results of a run in the order of its input, the failed documents' rows included."""

    #: In the order of the input.
    failures: tuple[Failure, ...]


@dataclass(frozen=True, eq=False)
class ResultPage:
    """Some results of a run, in the order of their commits."""

    #: `results(after=cursor)` goes on behind this page, from any process, until the results expire.
    cursor: str
    #: Columns `id, ordinal, vector, n_tokens, truncated, text_sha256`, then metadata; None for failures alone.
    batch: VectorBatch | None
    #: Documents that have no vector.
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class ModelInfo:
    """The model a queue is bound to, as its first worker described it."""

    model_id: str
    #: Commit of the model repository; empty for a local folder.
    revision: str
    #: Equal fingerprints give equal vectors.
    fingerprint: str
    #: Components of a vector, before `EncodingOptions.dimensions`.
    dimension: int
    #: Tokens per text, special ones included.
    max_length: int
    #: Prompts of the checkpoint by name, such as `query`.
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    #: Token ids are below this; None where the queue was bound by an older worker.
    vocab_size: int | None = None


@dataclass(frozen=True)
class Backlog:
    """How full a queue is."""

    #: Payload bytes of jobs and token batches that wait or are being computed.
    queued_bytes: int
    #: Payload bytes of results and dead letters that wait to be read, or for their TTL to end.
    result_bytes: int
    #: Above this sum of both a job is not taken.
    limit_bytes: int
    #: Entries of the stage before the tokenizers, and before the embedders.
    jobs: int
    token_batches: int
    #: Embedder processes whose heartbeat is fresh.
    live_embedders: int

    @property
    def bytes(self) -> int:
        """What counts against the limit."""
        return self.queued_bytes + self.result_bytes

    @property
    def full(self) -> bool:
        """Whether a producer would have to wait now."""
        return self.bytes >= self.limit_bytes


class DocumentsFailedError(EmbedqError):
    """Some texts have no vector; those of the others are in `embeddings`."""

    code = "documents_failed"
    exit_code = 3

    def __init__(self, message: str, embeddings: Embeddings, failures: Sequence[Failure]) -> None:
        super().__init__(message)
        #: All rows in the order of the input, the failed ones included.
        self.embeddings = embeddings
        #: One per failed text.
        self.failures = tuple(failures)
