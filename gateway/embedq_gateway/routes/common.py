"""What routes share: the gateway and the tenant of a request, and pages of what a tenant has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Generic, Literal, Self, TypeVar, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel

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


class Identified(BaseModel):
    """What can stand on a page."""

    id: str


Item = TypeVar("Item", bound=Identified)


class Page(BaseModel, Generic[Item]):
    """Part of a list; `after` its last id the next part begins."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool

    @classmethod
    def of(cls, items: Iterable[Item], limit: int) -> Self:
        """The first `limit` of `items`, of which one more is taken at most."""
        found = list(islice(items, limit + 1))
        data = found[:limit]
        return cls(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > limit,
        )
