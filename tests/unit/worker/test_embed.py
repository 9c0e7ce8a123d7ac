"""Embedding a batch: who gets which row, what a bad row becomes, and whose fault a failure is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest
from embedq_broker.consume import Entry, Share
from embedq_schemas.dead_letter import Stage
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import DocumentErrorCode, EngineError
from embedq_schemas.names import Lane
from embedq_schemas.quantize import VectorType
from embedq_schemas.token_batch import TokenBatch, make_token_batch
from embedq_worker.embed import Embedded, Embedding, dead_letter
from embedq_worker.engine.base import Engine, PackedBatch
from numpy.typing import NDArray

DIMENSION = 4
POISON = 13
"""The token that the engines below fall over."""


class SumEngine:
    """Vectors made of a document's tokens alone, so that a row in the wrong place shows."""

    dimension = DIMENSION
    max_length = 64
    max_batch_tokens = 1024
    device = "cpu"
    description: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.steps = 0
        self.batches: list[int] = []

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        self.steps += 1
        self.batches.append(len(batch))
        rows = [self.row(text) for text in np.split(batch.input_ids, batch.cu_seqlens[1:-1])]
        vectors = np.array(rows, np.float32)[:, : dimensions or DIMENSION]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors

    def row(self, ids: NDArray[np.uint32]) -> list[float]:
        return [1.0 + float(ids.sum()), 2.0, float(len(ids)), 1.0]

    def close(self) -> None:
        pass


class RaisesOnPoison(SumEngine):
    """A forward pass that fails as a whole where one document is bad."""

    def row(self, ids: NDArray[np.uint32]) -> list[float]:
        if POISON in ids:
            raise EngineError("cannot take 13")
        return super().row(ids)


class NanOnPoison(SumEngine):
    """An overflow inside one document's row."""

    def row(self, ids: NDArray[np.uint32]) -> list[float]:
        return [float("nan")] * DIMENSION if POISON in ids else super().row(ids)


class ZeroOnPoison(SumEngine):
    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        vectors = super().encode(batch, dimensions=dimensions, normalize=normalize)
        for row, text in enumerate(np.split(batch.input_ids, batch.cu_seqlens[1:-1])):
            if POISON in text:
                vectors[row] = 0
        return vectors


class NanInCompany(SumEngine):
    """A document that fails beside others and succeeds alone."""

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        vectors = super().encode(batch, dimensions=dimensions, normalize=normalize)
        if len(batch) > 1:
            vectors[1, 0] = np.inf
        vectors.flags.writeable = False
        return vectors


class Broken(SumEngine):
    """A device that fails whatever it is given."""

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        raise EngineError("the device is gone")


class AllNan(SumEngine):
    def row(self, ids: NDArray[np.uint32]) -> list[float]:
        return [float("nan")] * DIMENSION


class Unnormalised(SumEngine):
    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        return super().encode(batch, dimensions=dimensions, normalize=False)


class RefusesDimensions(SumEngine):
    """An engine asked for more dimensions than its model has."""

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        if dimensions is not None:
            raise EngineError(f"{dimensions} dimensions are too many")
        return super().encode(batch, normalize=normalize)


class WrongShape(SumEngine):
    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        return super().encode(batch, dimensions=dimensions, normalize=normalize)[:-1]


class WrongWidth(SumEngine):
    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        return super().encode(batch, dimensions=None, normalize=normalize)


def tokens(*texts: list[int]) -> TokenBatch:
    packed = PackedBatch.of(list(texts))
    n = len(texts)
    documents = pa.RecordBatch.from_pydict(
        {"id": [f"d{i}" for i in range(n)], "ordinal": [10 * i for i in range(n)], "k": [str(i) for i in range(n)]}
    )
    return make_token_batch(
        documents,
        input_ids=packed.input_ids,
        offsets=packed.cu_seqlens,
        n_tokens=packed.lengths,
        truncated=np.zeros(n, np.bool_),
        text_sha256=pa.array([bytes(32)] * n, pa.binary(32)),
        metadata=("k",),
    )


def run(
    engine: Engine,
    batch: TokenBatch,
    shares: tuple[Share, ...] | None = None,
    *,
    dimensions: int | None = None,
    normalize: bool = True,
    vector_type: VectorType = VectorType.FLOAT32,
) -> Embedded:
    shares = shares or (Share("r", batch.num_documents),)
    entry = Entry("s", Lane.BULK, "1-1", 1, "arrow", shares, b"", None)
    encoding = EncodingOptions(dimensions=dimensions, vector_type=vector_type)
    return Embedding(engine, entry, batch, encoding, normalize).outcome()


def found(embedded: Embedded) -> dict[str, dict[str, list[float]]]:
    """run -> document id -> vector"""
    result: dict[str, dict[str, list[float]]] = {}
    for part in embedded.parts:
        if part.vectors is not None:
            ids = part.vectors.table.column("id").to_pylist()
            result.setdefault(part.run, {}).update(zip(ids, part.vectors.vectors.tolist(), strict=True))
    return result


def alone(*texts: list[int], dimensions: int | None = None) -> list[list[float]]:
    return [SumEngine().encode(PackedBatch.of([text]), dimensions=dimensions)[0].tolist() for text in texts]


TEXTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def test_the_engines_here_are_engines() -> None:
    assert isinstance(SumEngine(), Engine)


@pytest.mark.parametrize("dimensions", [None, 2])
def test_every_document_gets_its_own_row_and_columns(dimensions: int | None) -> None:
    embedded = run(SumEngine(), tokens(*TEXTS), dimensions=dimensions)
    (part,) = embedded.parts
    assert part.vectors is not None
    assert part.vectors.vectors.tolist() == alone(*TEXTS, dimensions=dimensions)
    assert part.vectors.table.column("ordinal").to_pylist() == [0, 10, 20, 30]
    assert part.vectors.table.column("k").to_pylist() == ["0", "1", "2", "3"]
    assert (part.run, part.tokens, part.dead, part.skipped) == ("r", 10, (), 0)


def test_each_run_of_a_mixed_batch_gets_its_own_documents() -> None:
    shares = (Share("a", 1), Share("b", 2), Share("c", 1))
    embedded = run(SumEngine(), tokens(*TEXTS), shares)
    vectors = alone(*TEXTS)
    assert found(embedded) == {
        "a": {"d0": vectors[0]},
        "b": {"d1": vectors[1], "d2": vectors[2]},
        "c": {"d3": vectors[3]},
    }
    assert [part.tokens for part in embedded.parts] == [3, 3, 4]


@pytest.mark.parametrize(
    ("engine", "code"),
    [
        (RaisesOnPoison, DocumentErrorCode.ENGINE_FAILED),
        (NanOnPoison, DocumentErrorCode.NOT_FINITE),
        (ZeroOnPoison, DocumentErrorCode.NOT_FINITE),
    ],
)
@pytest.mark.parametrize("shares", [(Share("a", 4),), (Share("a", 2), Share("b", 2)), (Share("a", 1), Share("b", 3))])
def test_a_guilty_document_becomes_a_dead_letter_and_takes_no_other_with_it(
    engine: type[SumEngine], code: DocumentErrorCode, shares: tuple[Share, ...]
) -> None:
    texts = [TEXTS[0], [5, POISON], TEXTS[2], TEXTS[3]]
    embedded = run(engine(), tokens(*texts), shares)
    vectors = alone(*texts)
    rows = {f"d{i}": vectors[i] for i in (0, 2, 3)}
    assert {id: row for rows in found(embedded).values() for id, row in rows.items()} == rows
    dead = [(part.run, letter) for part in embedded.parts for letter in part.dead]
    ((run_id, letter),) = dead
    assert run_id == shares[0 if shares[0].documents > 1 else 1].run
    assert (letter.id, letter.ordinal, letter.stage, letter.code) == ("d1", 10, Stage.EMBED, code)
    assert sum(part.tokens for part in embedded.parts) == 9


@pytest.mark.parametrize("engine", [RaisesOnPoison, NanOnPoison])
def test_a_run_whose_documents_all_fail_has_no_vectors(engine: type[SumEngine]) -> None:
    embedded = run(engine(), tokens([POISON, 1], [2], [POISON, 3]), (Share("a", 1), Share("b", 1), Share("c", 1)))
    assert [part.vectors is None for part in embedded.parts] == [True, False, True]
    assert [len(part.dead) for part in embedded.parts] == [1, 0, 1]
    assert [part.tokens for part in embedded.parts] == [0, 1, 0]


def test_a_document_that_succeeds_alone_is_not_guilty() -> None:
    engine = NanInCompany()
    embedded = run(engine, tokens(*TEXTS))
    assert list(found(embedded)["r"].values()) == alone(*TEXTS)
    assert engine.batches == [4, 1]
    assert embedded.parts[0].dead == ()


@pytest.mark.parametrize("engine", [Broken, AllNan, Unnormalised, WrongShape])
def test_a_device_that_fails_on_anything_is_an_error_and_kills_no_document(engine: type[SumEngine]) -> None:
    with pytest.raises(EngineError):
        run(engine(), tokens(*TEXTS), dimensions=2)


@pytest.mark.parametrize("engine", [RefusesDimensions, WrongWidth])
def test_dimensions_that_the_model_cannot_give_are_the_runs_fault(engine: type[SumEngine]) -> None:
    (part,) = run(engine(), tokens(*TEXTS), dimensions=2).parts
    assert part.vectors is None
    assert [letter.code for letter in part.dead] == [DocumentErrorCode.ENGINE_FAILED] * 4


def test_only_vectors_that_should_be_of_norm_one_are_held_to_it() -> None:
    embedded = run(SumEngine(), tokens(*TEXTS), normalize=False)
    assert found(embedded)["r"]["d0"] == [7.0, 2.0, 3.0, 1.0]


@pytest.mark.parametrize("vector_type", [VectorType.FLOAT16, VectorType.FLOAT32])
def test_a_vector_beyond_float16_is_a_dead_letter_where_float16_is_asked_for(vector_type: VectorType) -> None:
    texts = [[1], [70_000], [65_503]]
    (part,) = run(SumEngine(), tokens(*texts), normalize=False, vector_type=vector_type).parts
    assert part.vectors is not None
    if vector_type is VectorType.FLOAT32:
        assert (part.vectors.num_documents, part.dead) == (3, ())
        return
    (letter,) = part.dead
    assert (letter.id, letter.code) == ("d1", DocumentErrorCode.NOT_FINITE)
    assert letter.message.endswith("or is beyond float16")
    assert part.vectors.quantized(vector_type).vectors[:, 0].tolist() == [2.0, 65_504.0]


def test_a_dead_letter_names_the_chunk_where_texts_are_cut() -> None:
    batch = tokens([1], [2], [3])
    assert dead_letter(batch, 1, DocumentErrorCode.NOT_FINITE, "NaN").chunk is None
    for kind, chunk in ((pa.int32(), 5), (pa.string(), None)):
        column = pa.array([4, 5, 6]).cast(kind)
        cut = TokenBatch(batch.table.append_column("chunk_index", column))
        assert dead_letter(cut, 1, DocumentErrorCode.NOT_FINITE, "NaN").chunk == chunk
