"""What every process that speaks to the queue must agree on or may decide. Units are in the names."""

from __future__ import annotations

from pydantic import BaseModel, Field


class BrokerSettings(BaseModel):
    """Fields shared by producers, workers and the CLI."""

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss://, unix:// or redis+sentinel:// URL of the server that holds the queue.",
    )
    queue: str = Field(
        "default", description="Name of the queue; a queue serves one model, and refuses workers of another."
    )
    lease_s: float = Field(
        30.0, ge=0.5, le=3600, description="Seconds a worker may be silent before others take its work over."
    )
    max_deliveries: int = Field(
        3, ge=1, le=100, description="Deliveries after which work that kills its worker is split, then dead-lettered."
    )
    max_backlog_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        description="Payload bytes the queue may hold; producers wait above it. Bounds server memory.",
    )
    max_ready_batches: int = Field(
        256, ge=1, description="Token batches kept ready ahead of the embedders; tokenizers wait above it."
    )

    @property
    def lease_ms(self) -> int:
        return round(self.lease_s * 1000)
