"""For those who run the gateway: is it alive, can it embed, what has it done."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from embedq_gateway.errors import ApiError
from embedq_gateway.routes.common import TheGateway
from embedq_gateway.spec import errors

router = APIRouter()

_STALE_S = 15.0


class Status(BaseModel):
    status: Literal["ok"] = "ok"


@router.get("/health", response_model=Status)
async def health() -> Status:
    """The process answers. Says nothing about the queue: a restart of the gateway would not mend it."""
    return Status()


@router.get("/ready", response_model=Status, responses=errors(503))
async def ready(gateway: TheGateway) -> Status:
    """The queue's server answers, and a tokenizer and an embedder with a loaded model are at work."""
    state = gateway.watch.state
    if state.problem or state.age_s > _STALE_S:
        reason = state.problem or f"the queue was last seen {state.age_s:.0f} s ago"
        raise ApiError(503, "not_ready", f"Not ready: {reason}.", retry_after_s=2)
    return Status()


@router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
)
async def metrics(gateway: TheGateway) -> Response:
    """Prometheus metrics."""
    state = gateway.watch.state
    gateway.metrics.backlog.set(state.backlog_bytes)
    gateway.metrics.ready.set(not state.problem)
    return Response(gateway.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
