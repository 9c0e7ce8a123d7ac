"""A file of any size is read in the memory of a few blocks, each in a process of its own."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

READ = """
import resource, sys
from embedq_producer.blocks import ReadOptions
from embedq_producer.corpus import open_corpus
from embedq_producer.reader import metadata_types, read_corpus
import pyarrow.parquet, pyarrow.compute

corpus = open_corpus([sys.argv[1]])
metadata_types(corpus, ReadOptions(metadata=("n",)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = 0
for block in read_corpus(corpus, options=ReadOptions(metadata=("n",))):
    rows += block.documents.num_rows
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> (20 if sys.platform == "darwin" else 10))
"""
ROWS = 160_000
TEXT = "some words that are a text of a kilobyte " * 25
LIMIT_MIB = 64
"""A tenth of what the files below hold as JSON or as columns would be above this."""


def jsonl_gz(folder: Path) -> Path:
    path = folder / "c.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for i in range(ROWS):
            file.write(b'{"id":"%d","text":"%d %s","n":%d}\n' % (i, i, TEXT.encode(), i))
    return path


def parquet_in_one_group(folder: Path) -> Path:
    path = folder / "c.parquet"
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("n", pa.int32())])
    numbers = pa.array(range(ROWS), pa.int64())
    texts = pa.array([f"{i} {TEXT}" for i in range(ROWS)])
    with pq.ParquetWriter(path, schema, use_dictionary=False, compression="zstd") as writer:
        writer.write_batch(pa.record_batch([numbers, texts, numbers.cast(pa.int32())], schema), row_group_size=ROWS)
    return path


@pytest.mark.parametrize("make", [jsonl_gz, parquet_in_one_group])
def test_memory_does_not_grow_with_a_file(make: object, tmp_path: Path) -> None:
    assert callable(make)
    path = make(tmp_path)
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    rows, mebibytes = map(int, done.stdout.split())
    assert rows == ROWS
    assert mebibytes < LIMIT_MIB
