"""A dataset for other programs (`embedq export`): one file per target, each in bounded memory.

What has an order follows the run's input. Nothing half written is ever found under the target's name.
"""

from __future__ import annotations

from pathlib import Path

from embedq_schemas.errors import OutputError, UsageError
from embedq_schemas.quantize import VectorType

from embedq.dataset.options import ExportOptions
from embedq.dataset.reader import DatasetReader


def export_dataset(reader: DatasetReader, options: ExportOptions) -> str:
    """Write the dataset where `options` say. Returns the place, in words.

    Raises:
        UsageError: the options do not name a place for this target, or its library is not installed.
        OutputError: the place is taken, or cannot hold the dataset.
        StorageError: the disk or the server refused.
    """
    if options.to is None:
        raise UsageError("--to is missing: name what to write: npy, faiss, lance, jsonl, pgvector or qdrant")
    # Before anything is created: there are vectors to export, of a type that the target has.
    kind = reader.vector_type
    if kind.packed and options.to in ("pgvector", "qdrant"):
        taken = ", ".join(other for other in VectorType if not other.packed)
        raise UsageError(f"{reader.dataset} holds {kind} vectors; --to {options.to} takes {taken}")
    if options.to == "pgvector":
        from embedq.dataset.export.pgvector import export_pgvector

        return export_pgvector(reader, _url(options), options.export_table, replace=options.replace)
    if options.to == "qdrant":
        from embedq.dataset.export.qdrant import export_qdrant

        if (options.export_url is None) == (options.export_output is None):
            raise UsageError("--to qdrant writes to a server, --url, or to a directory in local mode, --output")
        place = options.export_url or _output(reader, options)
        return export_qdrant(
            reader, place, options.export_table, api_key=options.export_api_key, replace=options.replace
        )
    output = _output(reader, options)
    if options.to == "npy":
        from embedq.dataset.export.npy import export_npy as write
    elif options.to == "faiss":
        from embedq.dataset.export.faiss import export_faiss as write
    elif options.to == "lance":
        from embedq.dataset.export.lance import export_lance as write
    else:
        from embedq.dataset.export.jsonl import export_jsonl as write
    write(reader, output, replace=options.replace)
    return str(output)


def _url(options: ExportOptions) -> str:
    if options.export_url is None:
        raise UsageError(f"--to {options.to} writes to a server: name it with --url")
    return options.export_url


def _output(reader: DatasetReader, options: ExportOptions) -> Path:
    if options.export_output is None:
        raise UsageError(f"--to {options.to} writes a file or directory: name it with --output")
    target = options.export_output.resolve()
    if not reader.dataset.is_directory:
        return target
    dataset = reader.path.resolve()
    if target == dataset or dataset in target.parents or target in dataset.parents:
        raise OutputError(f"{options.export_output} is not beside the dataset {reader.path}; give another place")
    return target
