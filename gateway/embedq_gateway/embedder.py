"""From a request to its vectors: refused where the queue cannot take it, cancelled where nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from embedq_producer.client.aio import AsyncClient
from embedq_producer.client.values import DocumentsFailedError, Embeddings
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import NoWorkerError, RunCancelledError, RunEndedError, RunNotFoundError, WaitTimeoutError
from embedq_schemas.names import Lane
from starlette.requests import ClientDisconnect, Request

from embedq_gateway.errors import ApiError
from embedq_gateway.failures import of_document
from embedq_gateway.inputs import Inputs
from embedq_gateway.metrics import Metrics
from embedq_gateway.watch import QueueWatch, ServedModel

T = TypeVar("T")

_STALE_S = 15.0
_SERVER_GRACE_S = 20.0
"""Beyond the request's own timeout: a call to a server that hangs is given up by its connection, not by us."""


class Embedder:
    """Embeds for requests, at most `max_in_flight` of them and `max_in_flight_inputs` texts at once."""

    def __init__(
        self,
        client: AsyncClient,
        watch: QueueWatch,
        metrics: Metrics,
        *,
        max_backlog_bytes: int,
        max_in_flight: int,
        max_in_flight_inputs: int,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._watch = watch
        self._metrics = metrics
        self._max_backlog_bytes = max_backlog_bytes
        self._most = max_in_flight
        self._most_inputs = max_in_flight_inputs
        self._timeout_s = timeout_s
        self._running = 0
        self._running_inputs = 0

    def model(self) -> ServedModel:
        """The queue's model; raises ApiError 503 before the first worker has said what it is."""
        state = self._watch.state
        if state.model is None:
            raise ApiError(503, "not_ready", "No worker has served this queue yet.", retry_after_s=5)
        return state.model

    def check_reachable(self) -> None:
        """Raise ApiError 503 if the queue's server did not answer lately."""
        state = self._watch.state
        if not state.reachable or state.age_s > _STALE_S:
            raise ApiError(503, "broker_unavailable", "The queue's server does not answer.", retry_after_s=2)

    async def embed(
        self, request: Request, inputs: Inputs, options: EncodingOptions, *, param: str = "input"
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """Vectors float32 [n, dimension] in the order of `inputs`, and the tokens the model has seen.

        Raises:
            ApiError: 400 or 422 naming a document, 429, 503 or 504.
            ClientDisconnect: the client left; its work was cancelled.
        """
        self._admit(len(inputs))
        self._running += 1
        self._running_inputs += len(inputs)
        try:
            with self._metrics.computing():
                embeddings = await _unless_disconnected(request, self._embed(inputs, options, param))
        finally:
            self._running -= 1
            self._running_inputs -= len(inputs)
        seen = np.where(embeddings.truncated, self.model().max_length, embeddings.n_tokens)
        tokens = int(seen.sum(dtype=np.int64))
        self._metrics.documents.inc(len(inputs))
        self._metrics.tokens.inc(tokens)
        return embeddings.vectors, tokens

    def _admit(self, inputs: int) -> None:
        self.check_reachable()
        state = self._watch.state
        if state.problem:
            raise ApiError(503, "no_worker", f"Nothing is embedded at the moment: {state.problem}.", retry_after_s=5)
        if state.backlog_bytes >= self._max_backlog_bytes:
            raise ApiError(
                429, "queue_full", "The queue is full; try again later.", retry_after_s=state.retry_after_s()
            )
        if self._running >= self._most or self._running_inputs + inputs > self._most_inputs:
            raise ApiError(
                429, "overloaded", "Too many requests are being embedded.", retry_after_s=state.retry_after_s()
            )

    async def _embed(self, inputs: Inputs, options: EncodingOptions, param: str) -> Embeddings:
        late = ApiError(504, "timeout", f"No vectors within {self._timeout_s:g} s; the work was cancelled.")
        try:
            async with asyncio.timeout(self._timeout_s + _SERVER_GRACE_S):
                return await self._client.embed_detailed(
                    inputs.documents, options=options, lane=Lane.INTERACTIVE, timeout_s=self._timeout_s
                )
        except TimeoutError:
            raise late from None
        except DocumentsFailedError as error:
            failure = min(error.failures, key=lambda failure: failure.index)
            raise of_document(failure.index, failure.code, failure.message, len(inputs), param=param) from None
        except NoWorkerError:
            raise ApiError(503, "no_worker", "No worker is at work on this queue.", retry_after_s=5) from None
        except WaitTimeoutError:
            raise late from None
        except RunCancelledError:
            raise ApiError(503, "run_cancelled", "The request was cancelled by an operator.", retry_after_s=1) from None
        except (RunEndedError, RunNotFoundError):
            raise ApiError(
                503, "run_lost", "The queue's server lost the request; send it again.", retry_after_s=1
            ) from None


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`, which is cancelled if the client leaves; raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
