"""What may be decided about the gateway. Units are in the names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from embedq_schemas.encoding import OnLong
from pydantic import BaseModel, Field


class GatewaySettings(BaseModel):
    """Fields of `embedq serve` beyond those of the broker."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one and says which.")
    data_dir: Path = Field(
        Path("gateway-data"),
        description="Directory for uploaded files and batch results; gateways of one queue may share it.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="File with one API key a line. Each key is a tenant that sees its own files and batches alone.",
    )
    api_keys: tuple[str, ...] = Field(
        (),
        description="API keys, comma-separated; give them as a variable. None here and no file: no key is asked for.",
    )
    model_alias: tuple[str, ...] = Field(
        (),
        description="Further names under which requests may ask for the queue's model, such as "
        "text-embedding-3-small; comma-separated.",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins of web pages that may call the gateway, comma-separated; * for any. None: no CORS."
    )
    on_long: Literal[OnLong.ERROR, OnLong.TRUNCATE] = Field(
        OnLong.ERROR,
        description="A text above the model's maximum: error answers 400, truncate cuts it. A request's "
        "`truncate` goes before.",
    )
    max_body_bytes: int = Field(16 << 20, ge=1024, description="Largest request body in bytes, except for uploads.")
    max_inputs: int = Field(2048, ge=1, le=65536, description="Most texts in one request.")
    max_request_tokens: int = Field(
        1 << 20, ge=1, description="Most token ids in one request; texts are bounded by the body's bytes."
    )
    max_in_flight: int = Field(
        512, ge=1, description="Requests being embedded at once; more are answered with 429 and Retry-After."
    )
    max_in_flight_inputs: int = Field(
        16_384, ge=1, description="Texts being embedded at once for all requests; more are answered with 429."
    )
    max_buffered_bytes: int = Field(
        256 << 20, ge=1 << 20, description="Bytes of all request bodies held in memory at once; above it 429."
    )
    max_connections: int = Field(4096, ge=1, description="Open connections; further ones are answered with 503.")
    request_timeout_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Seconds a request may wait for its vectors; then 504, and its work is cancelled.",
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds a client may take to send a body; then 408."
    )
    head_timeout_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="Seconds a client may take to send a request's head, or to read an answer that "
        "waits for it; then its connection is closed.",
    )
    max_file_bytes: int = Field(200 << 20, ge=1024, description="Largest uploaded file in bytes.")
    upload_timeout_s: float = Field(3600.0, gt=0, description="Seconds an upload may take; then 408.")
    max_batch_requests: int = Field(50_000, ge=1, le=1_000_000, description="Most lines in a batch's input file.")
    max_batch_inputs: int = Field(
        500_000, ge=1, le=100_000_000, description="Most texts in all lines of a batch together."
    )
    max_open_batches: int = Field(
        256, ge=1, description="Batches that are not over, of all keys together; more are answered with 429."
    )
    grace_s: float = Field(30.0, gt=0, le=3600, description="Seconds requests may take to finish on SIGTERM or Ctrl-C.")
