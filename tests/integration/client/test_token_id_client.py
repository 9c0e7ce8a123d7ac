"""Token ids through the clients: lists of ids in, the vectors of exactly those ids out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from embedq_producer.client import DocumentsFailedError
from embedq_schemas.errors import DocumentErrorCode
from faces import FACES
from services import MAX_LENGTH, Service


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest, service: Service) -> Iterator[Any]:
    with FACES[request.param](service.settings) as client:
        yield client


def test_the_reference_tokenizers_ids_give_the_texts_vectors(face: Any, service: Service) -> None:
    texts = ["one", "two words", ""]
    lists = [service.token_ids(text) for text in texts]
    np.testing.assert_array_equal(face.embed(lists), service.vectors(texts))
    np.testing.assert_array_equal(face.embed([np.array(ids) for ids in lists]), service.vectors(texts))


def test_ids_are_not_completed_but_truncated(face: Any, service: Service) -> None:
    lists = [[5], [7] * (MAX_LENGTH + 5)]
    found = face.embed_detailed(lists)
    np.testing.assert_array_equal(found.vectors, service.of_ids([[5], [7] * MAX_LENGTH]))
    assert (found.n_tokens.tolist(), found.truncated.tolist()) == ([1, MAX_LENGTH + 5], [False, True])


def test_a_document_with_an_impossible_id_fails_alone(face: Any, service: Service) -> None:
    with pytest.raises(DocumentsFailedError, match="invalid_input_ids: token id 4000000000 is outside") as raised:
        face.embed([[5], [4_000_000_000], [6], []])
    assert {(each.index, each.code) for each in raised.value.failures} == {
        (1, DocumentErrorCode.INVALID_INPUT_IDS),
        (3, DocumentErrorCode.INVALID_INPUT_IDS),
    }
    np.testing.assert_array_equal(raised.value.embeddings.vectors[[0, 2]], service.of_ids([[5], [6]]))


def test_texts_and_ids_may_follow_each_other_in_one_run(face: Any, service: Service) -> None:
    mixed = [{"text": "a"}, {"input_ids": [5]}, {"input_ids": [6, 7]}, {"text": "b"}]
    found = face.submit(mixed, ids=["w", "x", "y", "z"]).ordered()
    expected = [*service.vectors(["a"]), *service.of_ids([[5], [6, 7]]), *service.vectors(["b"])]
    np.testing.assert_array_equal(found.vectors, expected)
    np.testing.assert_array_equal(face.embed(mixed), expected)
