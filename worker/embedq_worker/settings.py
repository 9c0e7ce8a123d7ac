"""What a worker's processes need to know. No torch here: the supervisor and the tokenizer process read these fields."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from embedq_broker.settings import BrokerSettings
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from embedq_worker.checkpoint import Checkpoint, load_checkpoint
from embedq_worker.engine.settings import EngineSettings

Location = Annotated[str, BeforeValidator(lambda place: os.fspath(place) if isinstance(place, os.PathLike) else place)]
"""A path, or the URL of a place on an object store, which a path would garble."""


class WorkerSettings(BaseModel):
    """Fields of `embedq worker` and `embedq run` beyond those of the broker and the engine."""

    model: str = Field(
        "", description="Checkpoint: a local folder, or a model hub id such as Qwen/Qwen3-Embedding-0.6B."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; a commit makes runs repeatable."
    )
    pooling: str | None = Field(None, description="Pooling to use instead of the checkpoint's: lasttoken, mean or cls.")
    causal: bool | None = Field(
        None, description="Attention to use instead of the checkpoint's: causal, or each token sees all."
    )
    dense: str | None = Field(
        None,
        description="Folder of the checkpoint with the Dense head to use, such as 2_Dense_1024. "
        "Unset: as modules.json says.",
    )
    tokenizer_backend: Literal["auto", "gigatoken", "huggingface"] = Field(
        "auto", description="auto takes the fast tokenizer where its ids equal the reference's, else the reference."
    )
    output_roots: tuple[Location, ...] = Field(
        (),
        description="Directories, and s3://bucket/prefix, below which datasets may be written; "
        "none: the directory the worker starts in.",
    )
    flush_interval_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Seconds after which rows are written to a file although it is not full; "
        "progress counts written rows, a killed worker repeats at most this much work.",
    )
    grace_s: float = Field(30.0, gt=0, le=3600, description="Seconds a worker may take to finish on SIGTERM or Ctrl-C.")
    storage_patience_s: float = Field(
        600.0, ge=0, description="Seconds to hold finished vectors and retry while the disk refuses them."
    )
    prefetch: int = Field(4, ge=1, le=1024, description="Token batches of a corpus an embedder holds ahead.")
    window_jobs: int = Field(4, ge=1, le=1024, description="Jobs a tokenizer takes at once while embedders are busy.")

    def load_checkpoint(self) -> Checkpoint:
        """Read the checkpoint these settings name; raises ModelError."""
        return load_checkpoint(
            self.model, revision=self.revision, pooling=self.pooling, causal=self.causal, dense=self.dense
        )


class ProcessConfig(BaseModel):
    """Everything one child process of the supervisor is told."""

    model_config = ConfigDict(frozen=True)

    role: Literal["tokenizer", "embedder"]
    consumer: str
    broker: BrokerSettings
    worker: WorkerSettings
    engine: EngineSettings
    log_level: str = "INFO"
