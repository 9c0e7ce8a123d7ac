"""embedq: queue-driven batch embedding. For services: `Client`, `AsyncClient` and the handles of their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedq_producer.client import AsyncClient, AsyncRunHandle, Client, RunHandle

__all__ = ["AsyncClient", "AsyncRunHandle", "Client", "RunHandle"]


def __getattr__(name: str) -> Any:
    # With the first use: the command line imports this package too, and most of its commands need no client.
    if name in __all__:
        from embedq_producer import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
