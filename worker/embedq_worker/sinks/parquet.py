"""Staging: vectors into a Parquet file that is durable and verified, but not visible yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from embedq_schemas.manifest import PublishedFile
from embedq_schemas.quantize import VectorType
from embedq_schemas.vector_batch import VectorBatch
from numpy.typing import NDArray

from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.verify import verify

ROW_GROUP_BYTES = 64 << 20
"""Uncompressed bytes of vectors per row group: large enough to scan fast, small enough to hold."""
_LEAST_ROW_BYTES = 256


def stage(
    dataset: Dataset,
    token: str,
    run: str,
    batches: Sequence[VectorBatch],
    metadata: Mapping[str, str],
    tokens: int,
    *,
    moved: Callable[[], None] = lambda: None,
) -> PublishedFile:
    """Write `batches` to a file that its store holds durably and nobody sees; read its footer back.

    Args:
        dataset: a prepared dataset.
        token: idempotency token of the commit that will name the file.
        run: the run all rows belong to.
        batches: at least one row in all, with equal schemas; vectors of one type.
        metadata: stored in the file: model, fingerprint, pooling, ...
        tokens: token count of the rows, after truncation.
        moved: called again and again while the file is sent to an object store.

    Raises:
        StorageError: the disk refused, or the file does not read back as written.
        OutputError: the object store refuses for good.
    """
    table = pa.Table.from_batches([batch.table for batch in batches])
    table = table.replace_schema_metadata(dict(metadata))
    weight = row_weight(batches[0].vector_type, batches[0].dimension)

    def write(path: Path) -> None:
        with pq.ParquetWriter(path, table.schema, **_writer_options(table.schema)) as writer:
            writer.write_table(table, row_group_size=max(1, ROW_GROUP_BYTES // weight))

    staged = dataset.store.stage(token, write, lambda path: verify(path, table.num_rows), moved)
    return PublishedFile(
        token=token,
        run=run,
        rows=table.num_rows,
        size_bytes=staged.size_bytes,
        tokens=tokens,
        ordinals=ranges(table.column("ordinal").to_numpy()),
        upload=staged.upload,
    )


def row_weight(kind: VectorType, dimension: int) -> int:
    """Bytes a row counts for in the size of row groups and compacted files.

    Those of its vector; for compact ones no less than what its id, digest and metadata may take: millions of bare bits
    are held easily, millions of rows perhaps not.
    """
    own = kind.row_bytes(dimension)
    return own if kind.floating else max(_LEAST_ROW_BYTES, own)


def ranges(ordinals: NDArray[np.int64]) -> tuple[int, ...]:
    """Inclusive ranges covering `ordinals` exactly, flattened: first, last, first, last, ..."""
    values = np.unique(ordinals)
    breaks = np.flatnonzero(np.diff(values) != 1)
    first = values[np.concatenate(([0], breaks + 1))]
    last = values[np.concatenate((breaks, [len(values) - 1]))]
    return tuple(np.stack((first, last), axis=1).ravel().tolist())


def _writer_options(schema: pa.Schema) -> dict[str, object]:
    # Float vectors neither repeat nor compress: a dictionary makes them several times slower to read back, a codec
    # costs time and saves nothing. Ids and metadata gain from both.
    plain = {"vector", "text_sha256"}
    others = [name for name in schema.names if name not in plain]
    return {
        "compression": {_leaf(field): "NONE" if field.name in plain else "ZSTD" for field in schema},
        "use_dictionary": [_leaf(schema.field(name)) for name in others],
        "write_page_checksum": True,
        "write_statistics": ["id", "ordinal", "n_tokens"],
    }


def _leaf(field: pa.Field) -> str:
    """What Parquet calls the only leaf of a column."""
    path, kind = field.name, field.type
    while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        path, kind = f"{path}.list.element", kind.value_type
    return str(path)
