"""Every answer that is no success, in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from embedq_schemas.errors import (
    BrokerError,
    BrokerOutOfMemoryError,
    EmbedqError,
    StorageError,
)
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that ends with `status`. `code` is stable; `param` names the part of the request that is wrong."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self._headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, as the OpenAI API answers."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        headers = dict(self._headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            # The rest of the body is not read, so nothing more can come over this connection.
            headers["Connection"] = "close"
        return headers

    def response(self) -> Response:
        return Response(orjson.dumps(self.body), self.status, dict(self.headers), "application/json")


def of_embedq(error: EmbedqError) -> ApiError:
    """What a failure of the queue or of the disk is to a client. Addresses and paths stay inside."""
    if isinstance(error, BrokerOutOfMemoryError):
        return ApiError(503, error.code, "The queue's server is full; try again later.", retry_after_s=5)
    if isinstance(error, BrokerError):
        return ApiError(503, error.code, "The queue's server cannot be used at the moment.", retry_after_s=2)
    if isinstance(error, StorageError):
        return ApiError(503, error.code, "The gateway's disk refused a write; try again later.", retry_after_s=5)
    return ApiError(500, error.code, str(error))
