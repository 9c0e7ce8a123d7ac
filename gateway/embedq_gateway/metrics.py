"""What the gateway counts, for Prometheus. Units are in the names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_UNKNOWN_ROUTE = "unknown"


class Metrics:
    """One gateway's metrics, in a registry of its own so that two gateways fit into one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests.", "route", "method", "status")
        self.seconds = Histogram(
            "embedq_gateway_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ["route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.in_flight = self._gauge("in_flight_requests", "Requests between their head and the end of their answer.")
        self.embedding = self._gauge("embedding_requests", "Requests whose vectors are being computed.")
        self.documents = self._counter("documents", "Documents embedded for requests.")
        self.tokens = self._counter("tokens", "Tokens embedded for requests, special ones included.")
        self.received = self._counter("received_bytes", "Bytes of request bodies.")
        self.sent = self._counter("sent_bytes", "Bytes of answers.")
        self.rejected = self._counter("rejected_requests", "Requests refused, by error code.", "reason")
        self.backlog = self._gauge("queue_backlog_bytes", "Payload bytes the queue held at the last look.")
        self.ready = self._gauge("ready", "1 while workers are at work on the queue.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"embedq_gateway_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"embedq_gateway_{name}", text, registry=self.registry)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as one request being embedded."""
        self.embedding.inc()
        try:
            yield
        finally:
            self.embedding.dec()


class MetricsMiddleware:
    """Counts every request by the template of its route, never by its path, of which there are endlessly many."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, started = self._metrics, time.perf_counter()
        status = 499  # the client left before its answer

        async def counted_receive() -> Message:
            message = await receive()
            metrics.received.inc(len(message.get("body", b"")))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            metrics.sent.inc(len(message.get("body", b"")))

        metrics.in_flight.inc()
        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", _UNKNOWN_ROUTE)
            metrics.requests.labels(route, scope["method"] if route != _UNKNOWN_ROUTE else "any", status).inc()
            metrics.seconds.labels(route).observe(time.perf_counter() - started)
