"""The same documents in every kind of source that a corpus may be read from."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

Document = Mapping[str, Any]
Documents = Sequence[Document]

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("lang", pa.string()),
        ("year", pa.int64()),
        ("meta", pa.struct([("title", pa.string()), ("pages", pa.int32())])),
    ]
)
"""Of the documents the kinds below can all hold, but that CSV has strings alone and no `meta`."""

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 1, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pa.compress(data, codec="zstd", asbytes=True)),
}


def table(documents: Documents) -> pa.Table:
    """As a table of `SCHEMA`."""
    return pa.Table.from_pylist([dict(document) for document in documents], SCHEMA)


def jsonl(documents: Documents) -> bytes:
    """As JSON lines."""
    return b"".join(json.dumps(document, ensure_ascii=False).encode() + b"\n" for document in documents)


def json_array(documents: Documents) -> bytes:
    """As one JSON array, written for people."""
    return json.dumps(list(documents), ensure_ascii=False, indent=1).encode()


def delimited(documents: Documents, delimiter: str = ",") -> bytes:
    """As CSV, quoted where it must be; nested fields are left out, null is empty."""
    out = io.StringIO(newline="")
    names = ["id", "text", "lang", "year"]
    writer = csv.DictWriter(out, names, extrasaction="ignore", delimiter=delimiter)
    writer.writeheader()
    writer.writerows({name: document[name] for name in names} for document in documents)
    return out.getvalue().encode()


def parquet(documents: Documents, rows: int = 7) -> bytes:
    """As Parquet with row groups of `rows`."""
    out = io.BytesIO()
    pq.write_table(table(documents), out, row_group_size=rows)
    return out.getvalue()


def arrow(documents: Documents, rows: int = 5, *, stream: bool = False, large: bool = False) -> bytes:
    """As an Arrow IPC file, or stream, with batches of `rows`; `large`: with 64-bit offsets and dictionaries."""
    content = table(documents)
    if large:
        names = [pa.field("id", pa.large_string()), pa.field("text", pa.string_view())]
        dictionary = pa.field("lang", pa.dictionary(pa.int8(), pa.string()))
        content = content.cast(pa.schema([*names, dictionary, *list(SCHEMA)[3:]]))
    out = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(out, content.schema, options=pa.ipc.IpcWriteOptions(unify_dictionaries=large and not stream)) as writer:
        writer.write_table(content, max_chunksize=rows)
    return out.getvalue()


def feather_file(documents: Documents) -> bytes:
    """As Feather, compressed as it is by default."""
    out = io.BytesIO()
    feather.write_feather(table(documents), out, chunksize=6)
    return out.getvalue()


def saved_dataset(folder: Path, documents: Documents, shards: int = 3) -> Path:
    """As `datasets.save_to_disk` writes it; the shards' names are not in the order of their rows."""
    folder.mkdir(parents=True)
    names = [f"data-{(shard + 1) % shards:05}-of-{shards:05}.arrow" for shard in range(shards)]
    size = -(-len(documents) // shards)
    for shard, name in enumerate(names):
        (folder / name).write_bytes(arrow(documents[shard * size : (shard + 1) * size], stream=True))
    state = {"_data_files": [{"filename": name} for name in names], "_format_columns": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def several(folder: Path, documents: Documents) -> Path:
    """As a directory of files of several formats, whose paths sort in the order of the documents."""
    (folder / "c" / "deep").mkdir(parents=True)
    quarter = max(1, -(-len(documents) // 4))
    parts = [documents[begin : begin + quarter] for begin in range(0, 4 * quarter, quarter)]
    (folder / "a.jsonl").write_bytes(jsonl(parts[0]))
    (folder / "b.parquet").write_bytes(parquet(parts[1]))
    (folder / "c" / "deep" / "x.jsonl.gz").write_bytes(PACK[".gz"](jsonl(parts[2])))
    (folder / "d.arrow").write_bytes(arrow(parts[3]))
    (folder / "empty.jsonl").touch()
    (folder / "_SUCCESS").touch()
    (folder / ".hidden.jsonl").write_bytes(b"{}")
    return folder


def _file(name: str, make: Callable[[Documents], bytes]) -> Callable[[Path, Documents], Path]:
    def write(folder: Path, documents: Documents) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_bytes(make(documents))
        return path

    return write


KINDS: dict[str, Callable[[Path, Documents], Path]] = {
    **{
        f"jsonl{suffix}": _file(f"c.jsonl{suffix}", lambda documents, pack=pack: pack(jsonl(documents)))  # type: ignore[misc]
        for suffix, pack in PACK.items()
    },
    "jsonl by content": _file("corpus", jsonl),
    "json": _file("c.json", json_array),
    "json on one line": _file("c.json", lambda documents: json.dumps(list(documents)).encode()),
    "json.xz": _file("c.json.xz", lambda documents: PACK[".xz"](json_array(documents))),
    "csv": _file("c.csv", delimited),
    "csv.zst": _file("c.csv.zst", lambda documents: PACK[".zst"](delimited(documents))),
    "tsv": _file("c.tsv", lambda documents: delimited(documents, "\t")),
    "parquet": _file("c.parquet", parquet),
    "parquet in one group": _file("c.pq", lambda documents: parquet(documents, 1 << 20)),
    "arrow": _file("c.arrow", arrow),
    "arrow with large types": _file("c.arrow", lambda documents: arrow(documents, large=True)),
    "arrow stream": _file("c.arrows", lambda documents: arrow(documents, stream=True)),
    "arrow stream.gz": _file("c.arrows.gz", lambda documents: PACK[".gz"](arrow(documents, stream=True))),
    "arrow by content": _file("corpus", arrow),
    "feather": _file("c.feather", feather_file),
    "saved dataset": lambda folder, documents: saved_dataset(folder / "saved", documents),
    "directory": lambda folder, documents: several(folder / "many", documents),
}
"""By name: writes documents below a folder, and returns the source."""

STRINGS_ALONE = ("csv", "csv.zst", "tsv")
"""Kinds without types, nested fields and nulls."""
