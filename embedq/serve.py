"""`embedq serve`: the HTTP gateway in the foreground until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from embedq_gateway.settings import GatewaySettings
from embedq_schemas.errors import UsageError
from pydantic import Field

from embedq.options import _BrokerFields, register


class ServeOptions(_BrokerFields, GatewaySettings):
    """Options of `embedq serve`."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severe log lines to write."
    )

    def gateway(self) -> GatewaySettings:
        """For the gateway."""
        return GatewaySettings(**{name: getattr(self, name) for name in GatewaySettings.model_fields})


register(ServeOptions)


def run_gateway(options: ServeOptions, on_listening: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status 0.

    Raises:
        EmbedqError: the gateway cannot start.
    """
    try:
        from embedq_gateway.gateway import Gateway
        from embedq_gateway.server import serve
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed; `pip install 'embedq[gateway]'` adds it") from None
    serve(Gateway(options.gateway(), options.broker()), on_listening)
    return 0
