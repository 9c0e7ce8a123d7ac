"""Qdrant: a collection filled by upserts under ids made from the documents' ids, so that a repeated export resumes."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embedq_broker.connect import mask_url
from embedq_schemas.errors import OutputError, StorageError

from embedq.dataset.extras import extra
from embedq.dataset.reader import DatasetReader

POINT_NAMESPACE = uuid.UUID("6f0f2c0a-6b0e-5d0c-9a37-0b9a5a1d3f10")
"""A document's point id is the UUID version 5 of its id in this namespace; a chunk's that of `id#chunk_index`."""
_ROWS = 256


def export_qdrant(
    reader: DatasetReader, place: str | Path, collection: str, *, api_key: str | None, replace: bool
) -> str:
    """Upsert every row into `collection` of the server at the URL `place`, or of the local mode's directory `place`.

    A point holds the vector as float32 and, as payload, all other columns and `embedq_run`, the name of the run.

    Args:
        replace: when all rows are in, remove the collection's points that belong to no or to another run.

    Raises:
        UsageError: qdrant-client is not installed.
        OutputError: the collection holds vectors of another size.
        StorageError: the server cannot be reached, or refuses.
    """
    with extra("qdrant"):
        from qdrant_client import QdrantClient, models
        from qdrant_client.http.exceptions import ApiException
    shown = str(place) if isinstance(place, Path) else mask_url(place)
    words = f"collection {collection} at {shown}"
    try:
        client = (
            QdrantClient(path=str(place))
            if isinstance(place, Path)
            else QdrantClient(url=place, api_key=api_key, check_compatibility=False)
        )
        try:
            _prepare(client, reader, collection)
            for points in _points(reader):
                client.upsert(collection, points, wait=True)
            if replace:
                mine = models.FieldCondition(key="embedq_run", match=models.MatchValue(value=reader.spec.run))
                client.delete(collection, models.FilterSelector(filter=models.Filter(must_not=[mine])), wait=True)
        finally:
            client.close()
    except (ApiException, OSError, RuntimeError, sqlite3.Error) as error:
        raise StorageError(f"cannot write {words}: {' '.join(str(error).split())[:300]}") from None
    except ValueError as error:
        raise OutputError(f"cannot write {words}: {error}") from None
    return words


def _prepare(client: Any, reader: DatasetReader, collection: str) -> None:
    from qdrant_client import models

    if client.collection_exists(collection):
        found = client.get_collection(collection).config.params.vectors
        if getattr(found, "size", None) != reader.dimensions:
            raise OutputError(
                f"the collection {collection} does not hold vectors of {reader.dimensions} dimensions; "
                "give another one with --table"
            )
        return
    # For unit vectors the dot product is the cosine, and keeps them as they are.
    distance = models.Distance.DOT if reader.facts.normalized else models.Distance.COSINE
    client.create_collection(collection, vectors_config=models.VectorParams(size=reader.dimensions, distance=distance))


def _points(reader: DatasetReader) -> Iterator[Any]:
    from qdrant_client import models

    for batch in reader.batches(order="input", batch_rows=_ROWS):
        rows = batch.drop_columns(["vector"]).to_pylist()
        yield models.Batch(
            ids=[str(uuid.uuid5(POINT_NAMESPACE, "#".join(str(row[name]) for name in reader.key))) for row in rows],
            vectors=reader.as_float32(batch).tolist(),
            payloads=[{**_plain(row), "embedq_run": reader.spec.run} for row in rows],
        )


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}
