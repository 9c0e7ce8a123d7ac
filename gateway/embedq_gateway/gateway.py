"""One gateway: what its routes share, and its lifetime."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis
from embedq_broker.batches import BatchRegistry
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.settings import BrokerSettings
from embedq_producer.client.aio import AsyncClient
from starlette.concurrency import run_in_threadpool

from embedq_gateway.auth import ApiKeys, read_keys
from embedq_gateway.batch.plan import BatchLimits
from embedq_gateway.batch.runner import BatchRunner
from embedq_gateway.body import BodyReader
from embedq_gateway.embedder import Embedder
from embedq_gateway.files import FileStore
from embedq_gateway.inputs import Limits
from embedq_gateway.metrics import Metrics
from embedq_gateway.settings import GatewaySettings
from embedq_gateway.watch import QueueWatch

log = logging.getLogger(__name__)


class Gateway:
    """Connections, threads and directories of one gateway. Made before the event loop; runs inside `running`."""

    def __init__(self, settings: GatewaySettings, broker: BrokerSettings) -> None:
        """Raises UsageError (keys, URL), StorageError (data directory). Nothing is sent to the server yet."""
        self.settings = settings
        self.broker = broker
        self.keys: ApiKeys = read_keys(settings.api_keys_file, settings.api_keys)
        self.limits = Limits(
            max_inputs=settings.max_inputs, max_request_tokens=settings.max_request_tokens, on_long=settings.on_long
        )
        self.metrics = Metrics()
        self.store = FileStore(settings.data_dir)
        self.watch = QueueWatch(broker)
        self.client: redis.Redis = connect(broker.redis_url, role="gateway")
        self.batches = BatchRegistry(self.client, Keys(broker.queue), self.store.id)
        self.bodies = BodyReader(
            max_body_bytes=settings.max_body_bytes,
            max_buffered_bytes=settings.max_buffered_bytes,
            timeout_s=settings.body_timeout_s,
        )
        # Producers of corpora and batches may fill the queue for hours: those who wait have room beyond that.
        limit = broker.max_backlog_bytes + broker.max_backlog_bytes // 4
        self._async_client = AsyncClient(settings=broker.model_copy(update={"max_backlog_bytes": limit}))
        self.embedder = Embedder(
            self._async_client,
            self.watch,
            self.metrics,
            max_backlog_bytes=limit,
            max_in_flight=settings.max_in_flight,
            max_in_flight_inputs=max(settings.max_in_flight_inputs, settings.max_inputs),
            timeout_s=settings.request_timeout_s,
        )
        self._runner = BatchRunner(
            connect(broker.redis_url, role="batches"),
            broker,
            self.batches,
            self.store,
            self.watch,
            BatchLimits(
                max_requests=settings.max_batch_requests,
                max_inputs=settings.max_batch_inputs,
                max_line_bytes=settings.max_body_bytes,
                request=self.limits,
                aliases=settings.model_alias,
            ),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the queue and work on batches for the length of the block."""
        await run_in_threadpool(self.watch.start)
        self._runner.start()
        try:
            yield
        finally:
            await run_in_threadpool(self._runner.stop, self.settings.grace_s)
            await self._async_client.aclose()
            await run_in_threadpool(self.watch.stop)
            self.client.close()
