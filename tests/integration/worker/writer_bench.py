"""A writer with the embedder before it played by the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from embedq_broker.consume import Consumer, Entry, Share, Stage
from embedq_broker.keys import Keys
from embedq_broker.registry import Registry
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import DocumentErrorCode
from embedq_schemas.manifest import read_manifest
from embedq_schemas.names import Lane
from embedq_schemas.run import ParquetSink, RunSpec, StreamSink
from embedq_schemas.token_batch import TokenBatch, make_token_batch
from embedq_worker.embed import Embedded, split_by_run
from embedq_worker.keeper import Progress
from embedq_worker.writer import Writer
from numpy.typing import NDArray


def tokens(ids: list[str]) -> TokenBatch:
    n = len(ids)
    return make_token_batch(
        pa.RecordBatch.from_pydict({"id": ids, "ordinal": [int(each.rpartition("-")[2]) for each in ids]}),
        input_ids=np.zeros(n, np.uint32),
        offsets=np.arange(n + 1, dtype=np.int32),
        n_tokens=np.ones(n, np.int32),
        truncated=np.zeros(n, np.bool_),
        text_sha256=pa.array([bytes(32)] * n, pa.binary(32)),
        metadata=(),
    )


class Bench:
    """One embedder of queue `q`, with the leases that its writer works under."""

    def __init__(self, client: redis.Redis, root: Path, name: str = "embedder") -> None:
        self.client = client
        self.root = root
        self.keys = Keys("q")
        self.registry = Registry(client, self.keys)
        self.consumer = Consumer(client, self.keys, Stage.EMBED, name, lease_ms=60_000)
        self.consumer.ensure_groups()
        self.progress = Progress()
        self.sent = 0
        self.writer = self.make()

    def make(self, *, flush_interval_s: float = 60.0, storage_patience_s: float = 5.0, most: int = 1 << 30) -> Writer:
        self.writer = Writer(
            self.client,
            self.consumer,
            self.progress,
            url="redis://test",
            roots=[self.root],
            file_metadata=lambda spec: {"embedq.run": spec.run},
            flush_interval_s=flush_interval_s,
            storage_patience_s=storage_patience_s,
            most_input_bytes=most,
        )
        return self.writer

    def run(
        self,
        name: str = "r",
        *,
        stream: bool = False,
        path: Path | None = None,
        encoding: EncodingOptions = EncodingOptions(),  # noqa: B008  it is frozen
    ) -> RunSpec:
        sink = StreamSink() if stream else ParquetSink(path=str(path or self.root / name), file_bytes=1 << 16)
        return self.registry.create(RunSpec(run=name, queue="q", encoding=encoding, sink=sink, created_at=1.0))

    def embedded(
        self,
        *shares: Share,
        bad: tuple[int, ...] = (),
        dimension: int = 4,
        vectors: NDArray[np.float32] | None = None,
    ) -> Embedded:
        """A batch read from the stream under lease, then embedded as `vectors`, or as ones."""
        ids = []
        for share in shares:
            ids += [f"{share.run}-{self.sent + n}" for n in range(share.documents)]
            self.sent += share.documents
        batch = tokens(ids)
        fields: dict[Any, Any] = {"v": 1, "codec": "arrow", "payload": bytes(batch.encode())}
        fields |= {"run": ",".join(s.run for s in shares), "n": ",".join(str(s.documents) for s in shares)}
        self.client.xadd(self.keys.batches(Lane.BULK), fields)
        (entry,) = self.consumer.read(self.client, [Lane.BULK], count=1, block_ms=None)
        vectors = np.ones((len(ids), dimension), np.float32) if vectors is None else vectors
        reasons = dict.fromkeys(bad, (DocumentErrorCode.NOT_FINITE, "NaN"))
        return Embedded(entry, split_by_run(entry.shares, batch, vectors, reasons))

    def steal(self, entry: Entry) -> None:
        self.client.xclaim(entry.stream, Stage.EMBED, "thief", 0, [entry.id])

    def close(self) -> None:
        self.writer.close(20)

    def published(self, run: str = "r") -> list[str]:
        """Ids of all rows a reader of the manifest finds, as often as it finds them; there are no other files."""
        listed = {each.name for each in read_manifest(self.root / run).values()}
        files = sorted((self.root / run).glob("*.parquet"))
        assert listed <= {file.name for file in files}
        if not self.writer._thread.is_alive():
            assert listed == {file.name for file in files}
        files = [file for file in files if file.name in listed]
        return sorted(id for file in files for id in pq.ParquetFile(file).read().column("id").to_pylist())

    def counters(self, run: str = "r") -> tuple[int, int, int, int]:
        counters = self.registry.state(run).counters
        return counters.succeeded, counters.failed, counters.skipped, counters.tokens

    def open_work(self) -> int:
        return int(self.client.xlen(self.keys.batches(Lane.BULK)))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
