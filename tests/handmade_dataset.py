"""Datasets of any shape, written by the sink's own code: which ordinals lie in which file is the test's choice."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from embedq_schemas.manifest import MANIFEST_NAME
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_schemas.vector_batch import VectorBatch, vector_type
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.files import append_line
from embedq_worker.sinks.parquet import stage
from numpy.typing import NDArray

LIMIT = 40
"""Tokens that longer texts were cut to."""


def vectors_of(ordinals: Sequence[int], dimensions: int = 8, seed: int = 0) -> NDArray[np.float32]:
    """Unit vectors float32 [n, dimensions]; each follows from its ordinal and the seed."""
    grid = np.asarray(ordinals, dtype=np.float64)[:, None] * 7.13 + np.arange(dimensions) * 1.7 + seed
    values: NDArray[np.float32] = np.sin(grid * grid).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return values


def text_of(ordinal: int) -> str:
    """The text of a document."""
    return f"text {ordinal} zwölf"


def rows_of(
    ordinals: Sequence[int], *, ids: Sequence[str] | None = None, dimensions: int = 8, seed: int = 0, scale: float = 1
) -> pa.RecordBatch:
    """Rows as an embedder writes them."""
    flat = pa.array((vectors_of(ordinals, dimensions, seed) * np.float32(scale)).reshape(-1))
    lengths = [ordinal % 60 + 1 for ordinal in ordinals]
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(ids or [f"d{ordinal}" for ordinal in ordinals], pa.string()),
            "ordinal": pa.array(ordinals, pa.int64()),
            "vector": pa.FixedSizeListArray.from_arrays(flat, type=vector_type(dimensions)),
            "n_tokens": pa.array(lengths, pa.int32()),
            "truncated": pa.array([length > LIMIT for length in lengths]),
            "text_sha256": pa.array([hashlib.sha256(text_of(o).encode()).digest() for o in ordinals], pa.binary(32)),
            "lang": pa.array([["en", None][ordinal % 2] for ordinal in ordinals], pa.string()),
            "text": pa.array([text_of(ordinal) for ordinal in ordinals], pa.string()),
        }
    )


def add_file(path: Path, rows: pa.RecordBatch, *, normalized: bool = True, dtype: str = "float32", **more: str) -> Path:
    """Publish one more file of the dataset at `path`, with `more` facts in its metadata; returns the file."""
    dataset = Dataset(path)
    spec = dataset.run_spec()
    assert spec is not None
    batch = VectorBatch(rows)
    facts = {"model_id": "handmade", "fingerprint": "f" * 64, "dtype": dtype, "normalized": str(normalized).lower()}
    facts |= more
    metadata = {f"embedq.{name}": value for name, value in facts.items()}
    tokens = int(np.minimum(rows.column("n_tokens").to_numpy(), LIMIT).sum())
    file = stage(dataset, uuid.uuid4().hex, spec.run, [batch], metadata, tokens)
    (path / file.staging_name).rename(path / file.name)
    append_line(path / MANIFEST_NAME, file.encode())
    return path / file.name


def new_dataset(path: Path) -> Path:
    """A dataset without files."""
    spec = RunSpec(run="handmade", queue="default", sink=ParquetSink(path=str(path)), created_at=0.0)
    Dataset(path).prepare(spec)
    return path


def complete(path: Path, rows: int, files: int) -> None:
    """Mark the dataset as complete."""
    summary = {"run": "handmade", "input": rows, "succeeded": rows, "failed": 0, "skipped": 0, "tokens": 0}
    Dataset(path).success.write_text(json.dumps(summary | {"files": files, "finished_at": 1.0}))


def make_dataset(path: Path, files: Sequence[Sequence[int]], *, dimensions: int = 8, scale: float = 1) -> Path:
    """A complete dataset whose files hold these ordinals, in this order."""
    new_dataset(path)
    for ordinals in files:
        add_file(path, rows_of(ordinals, dimensions=dimensions, scale=scale), normalized=scale == 1)
    complete(path, sum(map(len, files)), len(files))
    return path
