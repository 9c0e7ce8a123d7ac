"""Serving: the socket, uvicorn, and an end in good order."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable

import uvicorn
from embedq_schemas.errors import UsageError

from embedq_gateway.app import create_app
from embedq_gateway.gateway import Gateway
from embedq_gateway.protocol import bounded_protocol

log = logging.getLogger(__name__)

_BACKLOG = 2048
_OTHER_FILES = 256
"""Files open besides connections: uploads, results, the queue's server."""
_KEEP_ALIVE_S = 75
"""Longer than load balancers keep idle connections: the one that closes should be they."""


def serve(gateway: Gateway, on_listening: Callable[[str], None], stopping: Callable[[], bool] = lambda: False) -> None:
    """Serve until SIGTERM or SIGINT: then accept nothing more, and finish what is under way within the grace period.

    Args:
        on_listening: called once with the base URL, when requests are answered.
        stopping: asked several times a second; True is as a signal.

    Raises:
        UsageError: the address cannot be listened on.
    """
    settings = gateway.settings
    listener = _listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        create_app(gateway),
        http=bounded_protocol(
            head_timeout_s=settings.head_timeout_s, max_connections=_allowed_connections(settings.max_connections)
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.grace_s)),
    )
    shown = f"[{host}]" if ":" in host else host
    _Server(config, lambda: on_listening(f"http://{shown}:{port}"), stopping).run(sockets=[listener])


def _allowed_connections(wanted: int) -> int:
    """`wanted`, or as many as this process may have files open for; raises its soft limit as far as need be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            log.warning("this process may open %d files, so at most %d connections", soft, soft - _OTHER_FILES)
            return max(1, soft - _OTHER_FILES)
    return wanted


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], stopping: Callable[[], bool]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._stopping()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener
