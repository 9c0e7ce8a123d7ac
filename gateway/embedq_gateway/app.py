"""The application: routes, errors in one shape, metrics, CORS."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from embedq_broker.connect import translate
from embedq_schemas.errors import EmbedqError
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from embedq_gateway.errors import ApiError, of_embedq
from embedq_gateway.gateway import Gateway
from embedq_gateway.metrics import MetricsMiddleware
from embedq_gateway.routes import batches, embeddings, files, probes, tei
from embedq_gateway.spec import describe

log = logging.getLogger(__name__)

_STATUS_NOBODY_READS = 499


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application of `gateway`, whose lifetime it drives."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(
        title="embedq gateway",
        version=version("embedq"),
        description="Embeddings from a queue of workers: OpenAI's embeddings, files and batches, "
        "and text-embeddings-inference's routes.",
        lifespan=lifespan,
        # The pages load their scripts from elsewhere; a gateway needs no such thing.
        docs_url=None,
        redoc_url=None,
    )
    app.state.gateway = gateway
    for router in (embeddings.router, tei.router, files.router, batches.router, probes.router):
        app.include_router(router)
    app.openapi = lambda: describe(app, keys_required=gateway.keys.required)  # type: ignore[method-assign]
    _handle_errors(app, gateway)
    if gateway.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(MetricsMiddleware, metrics=gateway.metrics)
    return app


def _handle_errors(app: FastAPI, gateway: Gateway) -> None:
    def answer(error: ApiError) -> Response:
        gateway.metrics.rejected.labels(error.code).inc()
        return error.response()

    def on(kind: type[Exception], mapped: Callable[[Exception], ApiError]) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return answer(mapped(error))

        app.add_exception_handler(kind, handler)

    on(ApiError, lambda error: error)  # type: ignore[arg-type, return-value]
    on(EmbedqError, _of_embedq)
    on(RedisError, lambda error: _of_embedq(translate(error)))  # type: ignore[arg-type]
    on(RequestValidationError, _of_validation)
    on(HTTPException, _of_http)
    on(Exception, lambda _: ApiError(500, "internal", "The gateway failed on this request; its log says why."))

    async def nobody_reads(request: Request, error: Exception) -> Response:
        return Response(status_code=_STATUS_NOBODY_READS)

    app.add_exception_handler(ClientDisconnect, nobody_reads)


def _of_embedq(error: Exception) -> ApiError:
    assert isinstance(error, EmbedqError)
    log.warning("a request failed: %s", error)
    return of_embedq(error)


def _of_validation(error: Exception) -> ApiError:
    """What FastAPI refuses: query and path parameters."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return ApiError(400, "invalid_value", f"`{name}`: {first['msg']}.", param=name)


def _of_http(error: Exception) -> ApiError:
    """What the router refuses: paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return ApiError(404, "not_found", "There is no such path.")
    if error.status_code == 405:
        return ApiError(405, "method_not_allowed", "The path does not take this method.", headers=error.headers)
    return ApiError(error.status_code, "http", str(error.detail), headers=error.headers)
