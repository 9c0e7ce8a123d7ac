"""Serving metrics: this process's, those of the processes it supervises, and gauges of the queue, as one page.

The processes of a worker write their counts into files of a private directory, and whoever supervises them adds the
files up when it is asked; a process that ended keeps its counts.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from embedq_schemas.errors import UsageError
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from redis.exceptions import RedisError

from embedq_broker.connect import connect
from embedq_broker.depths import depths
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats
from embedq_broker.metrics import REGISTRY
from embedq_broker.scripts import text

log = logging.getLogger(__name__)

_CLIENT_TIMEOUT_S = 10.0


class QueueCollector:
    """Gauges of a queue, read from its server when they are asked for."""

    def __init__(self, url: str, queue: str, *, lease_s: float) -> None:
        self._keys = Keys(queue)
        self._live_s = max(10.0, lease_s)
        # A server that hangs must not hang the scrape.
        self._client = connect(url, role="metrics", blocking=True, socket_timeout_s=5.0)

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("embedq_server_up", "1 if the server of the queue answered this scrape.")
        backlog = GaugeMetricFamily(
            "embedq_backlog_bytes", "Payload bytes held in Redis, by what they are.", labels=["kind"]
        )
        waiting = GaugeMetricFamily(
            "embedq_waiting_entries", "Entries that no worker has taken.", labels=["stage", "lane"]
        )
        leased = GaugeMetricFamily(
            "embedq_leased_entries", "Entries taken by a worker and not committed yet.", labels=["stage", "lane"]
        )
        oldest = GaugeMetricFamily(
            "embedq_oldest_entry_age_seconds",
            "Age of the oldest entry, leased or not; 0 where there is none.",
            labels=["stage", "lane"],
        )
        alive = GaugeMetricFamily(
            "embedq_live_processes", "Worker processes of the queue whose heartbeat is fresh.", labels=["role"]
        )
        try:
            self._fill(backlog, waiting, leased, oldest, alive)
        except RedisError:
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        return [up, backlog, waiting, leased, oldest, alive]

    def _fill(
        self,
        backlog: GaugeMetricFamily,
        waiting: GaugeMetricFamily,
        leased: GaugeMetricFamily,
        oldest: GaugeMetricFamily,
        alive: GaugeMetricFamily,
    ) -> None:
        sizes = dict.fromkeys(("jobs", "batches", "results", "dead"), 0)
        held: dict[Any, Any] = self._client.hgetall(self._keys.bytes)
        for field, size in held.items():
            kind = text(field).partition(":")[0]
            sizes[kind] = sizes.get(kind, 0) + int(size)
        for kind, size in sizes.items():
            backlog.add_metric([kind], size)
        for depth in depths(self._client, self._keys):
            labels = [depth.stage.value, depth.lane.value]
            waiting.add_metric(labels, depth.waiting)
            leased.add_metric(labels, depth.leased)
            oldest.add_metric(labels, depth.oldest_s)
        now = time.time()
        beats = heartbeats(self._client, self._keys)
        for role in ("tokenizer", "embedder"):
            alive.add_metric([role], sum(b.role == role and now - b.at < self._live_s for b in beats))


class _Sum:
    """Several collectors as one: series that more than one of them has are added up."""

    def __init__(self, *collectors: Any) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family in (family for collector in self._collectors for family in collector.collect()):
            families.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                # Files and memory name the labels of a series in different orders.
                series = sample.name, tuple(sorted(sample.labels.items()))
                sums[series] = sums.get(series, 0.0) + sample.value
        for name, family in families.items():
            merged = Metric(name, family.documentation, family.type)
            for (sample_name, labels), value in values[name].items():
                merged.add_sample(sample_name, dict(labels), value)
            yield merged


def _client_left(request: Any, client_address: Any) -> None:
    log.debug("a request for metrics by %s ended", client_address, exc_info=True)


@contextmanager
def serve_metrics(
    port: int | None, host: str, url: str, queue: str, *, lease_s: float, processes: bool = False
) -> Iterator[Path | None]:
    """Answer Prometheus at `http://host:port/metrics` for the block; without a port do nothing.

    Args:
        host: address to listen on; 0.0.0.0 is all.
        url, queue: whose gauges to show.
        lease_s: seconds after which a silent process no longer counts as alive.
        processes: make a directory for the counts of other processes, which is yielded: the value of their
            PROMETHEUS_MULTIPROC_DIR. It is removed with the block.

    Raises:
        UsageError: the port cannot be listened on.
    """
    if port is None:
        yield None
        return
    with ExitStack() as stack:
        folder = None
        collectors: list[Any] = [REGISTRY, QueueCollector(url, queue, lease_s=lease_s)]
        if processes:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="embedq-metrics-")))
            collectors.append(MultiProcessCollector(None, path=str(folder)))  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        registry.register(_Sum(*collectors))
        try:
            server, thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UsageError(f"metrics cannot be served on {host}:{port}: {error.strerror or error}") from None
        # Each connection has a thread, which a client that sends nothing would keep for good.
        handler: Any = server.RequestHandlerClass
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _CLIENT_TIMEOUT_S})
        server.handle_error = _client_left  # type: ignore[method-assign]
        stack.callback(thread.join)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        yield folder
