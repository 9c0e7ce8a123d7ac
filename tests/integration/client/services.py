"""A queue with real workers around an engine that returns fixed vectors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from embedq_broker.settings import BrokerSettings
from embedq_schemas.encoding import EncodingOptions
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.generate import generate_checkpoint
from embedq_worker.engine.null import NullEngine
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings
from embedq_worker.supervisor import Supervisor, plan_slots
from embedq_worker.tokenization import TextTokenizer
from numpy.typing import NDArray
from servers import Server

MAX_LENGTH = 32
DIMENSION = 24


@dataclass(frozen=True)
class Service:
    """A server, a queue with a tokenizer and an embedder, and what their vectors must be."""

    server: Server
    settings: BrokerSettings
    tokenizer: TextTokenizer
    engine: NullEngine

    def token_ids(self, text: str) -> list[int]:
        """The reference's ids, the end token included."""
        encoded = self.tokenizer.encode(pa.array([text]))
        return encoded.input_ids.tolist()

    def vectors(self, texts: list[str], options: EncodingOptions | None = None) -> NDArray[np.float32]:
        """float32 [n, dimension], each text embedded alone."""
        return self.of_ids([self.token_ids(text) for text in texts], options)

    def of_ids(self, lists: list[list[int]], options: EncodingOptions | None = None) -> NDArray[np.float32]:
        """The same for texts that are token ids already."""
        dimensions = options.dimensions if options else None
        rows = []
        for ids in lists:
            packed = PackedBatch(np.array(ids, np.uint32), np.array([0, len(ids)], np.int32))
            rows.append(self.engine.encode(packed, dimensions=dimensions)[0])
        return np.stack(rows)


@contextmanager
def run_service(folder: Path) -> Iterator[Service]:
    """Start the server and the workers of one queue; they end with the block."""
    path = generate_checkpoint(folder / "model", hidden_size=DIMENSION, layers=1, max_length=MAX_LENGTH)
    checkpoint = load_checkpoint(str(path))
    with Server("valkey") as server:
        settings = BrokerSettings(redis_url=server.url, queue="service", lease_s=5)
        engine = EngineSettings(kind="null")
        worker = WorkerSettings(model=str(path), output_roots=(folder,), tokenizer_backend="huggingface")
        supervisor = Supervisor(
            plan_slots(tokenizers=1, embedders=1, gpus=(), engine=engine), settings, worker, log_level="WARNING"
        )
        try:
            deadline = time.monotonic() + 60
            while not supervisor.ready:
                supervisor.poll()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            tokenizer = TextTokenizer.load(checkpoint.tokenizer_file, max_length=MAX_LENGTH, backend="huggingface")
            yield Service(server, settings, tokenizer, NullEngine(checkpoint, engine))
        finally:
            supervisor.drain()
