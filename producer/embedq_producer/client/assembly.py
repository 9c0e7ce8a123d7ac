"""From pages of results, in the order of their commits, to arrays in the order of the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from embedq_broker.outcome import Cursor, Look
from embedq_schemas.errors import CodecError
from embedq_schemas.quantize import VectorType

from embedq_producer.client.values import Embeddings, Failure, ResultPage, RunResults


def pages(look: Look, before: Cursor) -> list[ResultPage]:
    """The pages of a look behind cursor `before`: one per result entry, then one of failures; raises CodecError."""
    found = [
        ResultPage(cursor=str(Cursor(entry_id, before.letters)), batch=batch, failures=())
        for entry_id, batch in look.batches()
    ]
    if look.letters:
        failures = tuple(Failure.of(letter) for _, letter in look.letters)
        found.append(ResultPage(cursor=str(look.cursor(before)), batch=None, failures=failures))
    return found


class Assembly:
    """Results of one run, collected until all are there."""

    def __init__(self) -> None:
        self._pages: list[ResultPage] = []
        self._failures: list[Failure] = []
        #: Documents that have their outcome here.
        self.documents = 0

    def add(self, found: Sequence[ResultPage]) -> None:
        """Take in pages; each once."""
        for page in found:
            if page.batch is not None:
                self._pages.append(page)
                self.documents += page.batch.num_documents
            self._failures += page.failures
            self.documents += len(page.failures)

    def results(self, n: int, dimension: int, kind: VectorType = VectorType.FLOAT32) -> RunResults:
        """Arrays of n rows; `dimension` is for a run without any vector, `kind` what its vectors are stored as.

        Raises:
            CodecError: the pages are not those of such a run.
        """
        batches = [page.batch for page in self._pages if page.batch is not None]
        dimension = batches[0].dimension if batches else dimension
        shape = n, kind.width(dimension)
        vectors = np.full(shape, np.nan, kind.dtype) if kind.floating else np.zeros(shape, kind.dtype)
        n_tokens, truncated = np.zeros(n, np.int32), np.zeros(n, np.bool_)
        for batch in batches:
            rows = batch.table.column("ordinal").to_numpy()
            if (batch.dimension, batch.vector_type) != (dimension, kind):
                raise CodecError(f"results of {kind} [{dimension}] hold {batch.vector_type} [{batch.dimension}]")
            if int(rows.min(initial=0)) < 0 or int(rows.max(initial=0)) >= n:
                raise CodecError(f"results of {n} texts hold a row {int(rows.max(initial=0))}")
            vectors[rows] = batch.vectors
            n_tokens[rows] = batch.table.column("n_tokens").to_numpy()
            truncated[rows] = batch.table.column("truncated").to_numpy(zero_copy_only=False)
        failures = sorted(self._failures, key=lambda failure: failure.index)
        return RunResults(vectors, n_tokens, truncated, tuple(failures))


def without_failures(results: RunResults) -> Embeddings:
    """The arrays alone."""
    return Embeddings(results.vectors, results.n_tokens, results.truncated)
