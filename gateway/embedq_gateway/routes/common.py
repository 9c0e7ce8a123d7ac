"""What routes take from the application: the gateway, and the tenant of the request."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from embedq_gateway.gateway import Gateway

_bearer = HTTPBearer(auto_error=False, description="An API key, where the gateway was given any.")


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves `request`."""
    return cast(Gateway, request.app.state.gateway)


def _tenant(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)], gateway: TheGateway
) -> str:
    return gateway.keys.tenant(request.headers.get("authorization"))


TheGateway = Annotated[Gateway, Depends(gateway_of)]
Tenant = Annotated[str, Depends(_tenant)]
