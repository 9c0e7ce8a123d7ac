"""The options of the commands that make and watch runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from embedq_broker.keys import check_queue_name
from embedq_broker.metrics_server import serve_metrics
from embedq_broker.settings import BrokerSettings
from embedq_schemas.encoding import EncodingOptions, OnLong, OnSpecialTokens, TruncationSide
from embedq_schemas.errors import UsageError
from embedq_schemas.names import Lane
from embedq_schemas.quantize import VectorType, checked_ranges, encode_ranges
from embedq_schemas.run import Durability
from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine.settings import AttentionKind, Dtype, EngineKind, EngineSettings
from embedq_worker.settings import Location, WorkerSettings
from numpy.typing import NDArray
from pydantic import Field, field_validator

from embedq.corpus_options import CorpusOptions
from embedq.option_base import Options, register, usage_errors


class ConnectOptions(Options):
    """Which queue on which server."""

    redis_url: str = BrokerSettings.model_fields["redis_url"].default
    queue: str = BrokerSettings.model_fields["queue"].default

    @field_validator("queue")
    @classmethod
    def _queue_name(cls, name: str) -> str:
        return check_queue_name(name)


class EncodingFlags(Options):
    """How texts become vectors."""

    dimensions: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Components per vector: cut (Matryoshka), then normalised. Unset: the model's.",
    )
    prompt: str | None = Field(None, max_length=65536, description="Text put before every document, verbatim.")
    prompt_name: str | None = Field(
        None, description="Name of a prompt of the checkpoint to put before every document."
    )
    normalize: bool | None = Field(None, description="L2-normalise vectors. Unset: as the checkpoint says.")
    max_length: int | None = Field(
        None, ge=2, le=1 << 20, description="Tokens per document, special ones included. Unset: the model's."
    )
    truncation_side: TruncationSide = Field(
        TruncationSide.RIGHT, description="Which end of a text above the maximum is dropped."
    )
    on_special_tokens: OnSpecialTokens = Field(
        OnSpecialTokens.KEEP,
        description="A literal <|im_end|> in a text: keep makes it the special token, escape plain text.",
    )
    on_long: OnLong = Field(
        OnLong.TRUNCATE,
        description="A text above the maximum: truncate, or error makes it an error row. chunk cuts a text above "
        "--chunk-tokens into several documents, each with its place in the text.",
    )
    chunk_tokens: int | None = Field(
        None,
        ge=2,
        le=1 << 20,
        description="With --on-long chunk: tokens of a chunk at most, prompt and special ones included. Unset: the "
        "maximum.",
    )
    chunk_overlap: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="With --on-long chunk: tokens that a chunk repeats of the one before it, at most. Unset: an eighth "
        "of a chunk.",
    )
    vector_type: VectorType = Field(
        VectorType.FLOAT32,
        description="How vectors are stored: float16 takes half the bytes of float32, int8 and uint8 a quarter, "
        "binary and ubinary a 32nd; see docs/dataset.md for what each costs in recall.",
    )
    vector_ranges: Path | None = Field(
        None,
        description="For int8 and uint8, a .npy file with the ranges: float32 [2, dimensions], such as the _ranges.npy "
        "of another dataset, whose vectors then compare. Unset: those of the run's first vectors.",
    )

    def encoding(self, prompts: dict[str, str]) -> EncodingOptions:
        """Encoding options, with the prompt's name looked up in `prompts`; raises UsageError."""
        prompt = self.prompt or ""
        if self.prompt_name is not None:
            if self.prompt is not None:
                raise UsageError("--prompt and --prompt-name exclude each other")
            prompt = named_prompt(prompts, self.prompt_name)
        with usage_errors():
            return EncodingOptions(
                dimensions=self.dimensions,
                prompt=prompt,
                normalize=self.normalize,
                max_length=self.max_length,
                truncation_side=self.truncation_side,
                on_special_tokens=self.on_special_tokens,
                on_long=self.on_long,
                chunk_tokens=self.chunk_tokens,
                chunk_overlap=self.chunk_overlap,
                vector_type=self.vector_type,
                vector_ranges=None if self.vector_ranges is None else encode_ranges(_load_ranges(self.vector_ranges)),
            )


def named_prompt(prompts: Mapping[str, str], name: str) -> str:
    """A prompt of the checkpoint; raises UsageError."""
    if name not in prompts:
        names = ", ".join(sorted(prompts)) or "none"
        raise UsageError(f"the model has no prompt {name!r}; it has: {names}")
    return prompts[name]


def _load_ranges(path: Path) -> NDArray[np.float32]:
    try:
        return checked_ranges(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"--vector-ranges {path} cannot be read: {reason}") from None


def check_vector_type(encoding: EncodingOptions, dimension: int, *, dataset: bool = True) -> None:
    """Refuse a type that vectors of a model of `dimension` (0: not known) cannot have; raises UsageError."""
    kind = encoding.vector_type
    known = encoding.dimensions or dimension
    if known and (fault := kind.fault(known, encoding.ranges)):
        raise UsageError(f"--vector-type {kind}: {fault}")
    if kind.ranged and encoding.vector_ranges is None and not dataset:
        raise UsageError(f"--vector-type {kind} needs --vector-ranges where results go to a stream, without --output")


class SinkFlags(Options):
    """Where vectors go, and what goes with them."""

    keep_text: bool = Field(False, description="Keep each document's text as a column of the output.")
    file_bytes: int = Field(
        64 << 20,
        ge=1 << 16,
        le=1 << 30,
        description="Bytes of vectors per file; also what a worker holds in memory before it commits.",
    )
    durability: Durability = Field(
        Durability.PROCESS,
        description="When a commit counts: process (the server has it), fsync (its disk has it), "
        "replica (a replica has it).",
    )


class _StateField(Options):
    state: Path | None = Field(
        None,
        description="Folder of this machine for the embedded server of a run whose dataset is on an object store. "
        "Unset: ~/.local/state/embedq.",
    )


class _BrokerFields(ConnectOptions):
    lease_s: float = Field(30.0, ge=0.5, le=3600)
    max_deliveries: int = Field(3, ge=1, le=100)
    max_backlog_bytes: int = Field(256 << 20, ge=1 << 20)
    max_ready_batches: int = Field(256, ge=1)

    def broker(self, **overrides: str) -> BrokerSettings:
        """For the broker; `redis_url` and `queue` may be overridden."""
        fields = {name: getattr(self, name) for name in BrokerSettings.model_fields}
        return BrokerSettings(**fields | overrides)


class _MetricsFields(Options):
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Port on which Prometheus finds /metrics. Unset: no metrics are served."
    )
    metrics_host: str = Field("0.0.0.0", description="Address to serve metrics on; 127.0.0.1 for this machine alone.")  # noqa: S104

    def metrics(self, broker: BrokerSettings, *, processes: bool = False) -> AbstractContextManager[Path | None]:
        """Serve metrics for a block, where a port is given; yields the folder for counts of other processes."""
        return serve_metrics(
            self.metrics_port,
            self.metrics_host,
            broker.redis_url,
            broker.queue,
            lease_s=broker.lease_s,
            processes=processes,
        )


class _EngineFields(Options):
    model: str = Field("")
    revision: str | None = None
    pooling: str | None = None
    causal: bool | None = None
    dense: str | None = None
    engine: EngineKind = "auto"
    device: str = "auto"
    dtype: Dtype = "auto"
    attention: AttentionKind = "auto"
    tensor_parallel: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    threads: int | None = Field(None, ge=1)
    max_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    compile: bool | Literal["auto"] = "auto"

    def engine_settings(self) -> EngineSettings:
        """For the engine."""
        return EngineSettings(
            kind=self.engine,
            device=self.device,
            dtype=self.dtype,
            attention=self.attention,
            tensor_parallel=self.tensor_parallel,
            threads=self.threads,
            max_batch_tokens=self.max_batch_tokens,
            compile=self.compile,
        )

    def checkpoint(self) -> Checkpoint:
        """Read the checkpoint that `--model` names; raises UsageError, ModelError."""
        if not self.model:
            raise UsageError("--model is missing: name a checkpoint folder or a model hub id")
        names = ("model", "revision", "pooling", "causal", "dense")
        return WorkerSettings(**{name: getattr(self, name) for name in names}).load_checkpoint()


class _WorkerFields(_EngineFields):
    tokenizers: int = Field(1, ge=0, le=256, description="Tokenizer processes; one feeds several GPUs.")
    embedders: int = Field(
        1, ge=0, le=256, description="Embedder processes where no GPU is named; on one CPU one is fastest."
    )
    gpus: tuple[int, ...] = Field(
        (), description="GPUs to use, comma-separated: a replica of the model on each, or tensor-parallel groups."
    )
    tokenizer_backend: Literal["auto", "gigatoken", "huggingface"] = "auto"
    flush_interval_s: float = Field(30.0, gt=0, le=3600)
    grace_s: float = Field(30.0, gt=0, le=3600)
    storage_patience_s: float = Field(600.0, ge=0)
    prefetch: int = Field(4, ge=1, le=1024)
    window_jobs: int = Field(4, ge=1, le=1024)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severe log lines to write."
    )

    def worker_settings(self, output_roots: tuple[str | Path, ...]) -> WorkerSettings:
        """For the worker's processes."""
        names = [name for name in WorkerSettings.model_fields if name != "output_roots"]
        return WorkerSettings(output_roots=output_roots, **{name: getattr(self, name) for name in names})


class ModelOptions(_EngineFields):
    """Options of `embedq model inspect`."""

    json_output: bool = Field(False, description="One JSON document instead of text.")

    flags: ClassVar[dict[str, str]] = {**Options.flags, "json_output": "--json"}


class BenchOptions(_EngineFields):
    """Options of `embedq bench`."""

    text_tokens: tuple[int, ...] = Field((128, 512), description="Lengths of the texts to measure, in tokens.")
    repeats: int = Field(3, ge=1, le=100, description="Batches to time per length; the median counts.")
    json_output: bool = Field(False, description="One JSON document instead of text.")

    flags: ClassVar[dict[str, str]] = {**Options.flags, "json_output": "--json"}


class DoctorOptions(ConnectOptions, _EngineFields):
    """Options of `embedq doctor`."""


class ProduceOptions(_BrokerFields, _MetricsFields, CorpusOptions, EncodingFlags, SinkFlags):
    """Options of `embedq produce`."""

    output: Location | None = Field(
        None,
        description="Dataset directory as the workers see it, or s3://bucket/prefix. Unset: results go to a stream in "
        "Redis.",
    )
    run: str | None = Field(
        None,
        description="Name of the run. Unset: made from the corpus and the options, so that the same command resumes.",
    )
    lane: Lane = Field(Lane.BULK, description="interactive goes before bulk.")
    model: str = Field(
        "", description="With --on-long chunk: the workers' checkpoint, whose tokenizer says where a text is too long."
    )
    revision: str | None = None
    ttl_s: int = Field(
        3600, ge=1, le=30 * 86400, description="Seconds the results of a run without a dataset stay in Redis."
    )
    wait: bool = Field(False, description="Wait until every document has its outcome.")


class WorkerOptions(_BrokerFields, _MetricsFields, _WorkerFields):
    """Options of `embedq worker`."""

    output_roots: tuple[Location, ...] = ()
    roles: tuple[Literal["tokenizer", "embedder"], ...] = Field(
        ("tokenizer", "embedder"), description="Which processes to run here, comma-separated: tokenizer, embedder."
    )


class RunOptions(_StateField, _BrokerFields, _MetricsFields, _WorkerFields, CorpusOptions, EncodingFlags, SinkFlags):
    """Options of `embedq run`."""

    redis_url: str | None = Field(
        None, description="Server that holds the queue. Unset: an embedded one, its state in the output directory."
    )  # type: ignore[assignment]
    output: Location | None = Field(
        None,
        description="Dataset directory, in which everything lies that a run needs to resume; or s3://bucket/prefix, "
        "see --state.",
    )
    incremental: bool = Field(
        False,
        description="Bring a complete dataset up to date with its corpus: compute new and changed texts, drop what is "
        "gone, keep the vectors of all others.",
    )
    reindex: bool = Field(
        False,
        description="Compute a complete dataset anew, with whatever model and options; readers see the old one until "
        "the new one is complete.",
    )
    dry_run: bool = Field(
        False,
        description="Only say what would be done: documents unchanged, changed, new and deleted, tokens, time, bytes.",
    )
    storage_patience_s: float = Field(20.0, ge=0)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "WARNING", description="Least severe log lines to write."
    )


class RunPlaceOptions(_StateField, ConnectOptions):
    """Where a run is to be found."""


class StatusOptions(RunPlaceOptions):
    """Options of `embedq status`."""

    json_output: bool = Field(False, description="One JSON document instead of tables.")
    watch: bool = Field(False, description="Show it again every second until interrupted.")

    flags: ClassVar[dict[str, str]] = {**Options.flags, "json_output": "--json"}


class ResultsOptions(RunPlaceOptions):
    """Options of `embedq results`."""

    follow: bool = Field(False, description="Wait for more until the run is over.")
    after: str | None = Field(None, description="Cursor printed by an earlier call: only what came after it.")


class ErrorsOptions(RunPlaceOptions):
    """Options of `embedq errors`."""

    json_output: bool = Field(False, description="One JSON object per line instead of a table.")
    code: str | None = Field(None, description="Only errors of this code.")

    flags: ClassVar[dict[str, str]] = {**Options.flags, "json_output": "--json"}


class RetryOptions(_StateField):
    """Options of `embedq retry`."""

    code: str | None = Field(None, description="Only documents that failed with this code.")


class CancelOptions(RunPlaceOptions):
    """Options of `embedq cancel`."""


register(
    RunOptions,
    ProduceOptions,
    WorkerOptions,
    StatusOptions,
    ResultsOptions,
    ErrorsOptions,
    RetryOptions,
    CancelOptions,
    ModelOptions,
    BenchOptions,
    DoctorOptions,
)
