"""The client of services: submit texts to a queue, wait, read vectors. Needs Redis and nothing of the workers."""

from embedq_producer.client.aio import AsyncClient, AsyncRunHandle
from embedq_producer.client.sync import Client, RunHandle
from embedq_producer.client.values import (
    Backlog,
    DocumentsFailedError,
    Embeddings,
    Failure,
    ModelInfo,
    ResultPage,
    RunResults,
)

__all__ = [
    "AsyncClient",
    "AsyncRunHandle",
    "Backlog",
    "Client",
    "DocumentsFailedError",
    "Embeddings",
    "Failure",
    "ModelInfo",
    "ResultPage",
    "RunHandle",
    "RunResults",
]
