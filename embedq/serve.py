"""`embedq serve`: the HTTP gateway in the foreground, with `--model` and all it needs on a single machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from embedq_broker.connect import connect
from embedq_broker.embedded import EmbeddedServer
from embedq_broker.keys import Keys
from embedq_broker.settings import BrokerSettings
from embedq_gateway.settings import GatewaySettings
from embedq_schemas.errors import EmbedqError, UsageError
from embedq_worker.supervisor import Supervisor, plan_slots
from pydantic import Field

from embedq.option_base import register, usage_errors
from embedq.options import _BrokerFields, _WorkerFields

_POLL_S = 0.1
_STATE_NAME = "redis"


class ServeOptions(_BrokerFields, _WorkerFields, GatewaySettings):
    """Options of `embedq serve`."""

    redis_url: str | None = Field(
        None,
        description="Server that holds the queue. Unset: the one on this machine, or with --model an embedded one, "
        "its state in the data directory.",
    )  # type: ignore[assignment]
    model: str = Field(
        "", description="Start a worker with this checkpoint, too: a local folder, or a model hub id. Unset: none."
    )
    grace_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds requests and worker processes may each take to finish on SIGTERM."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severe log lines to write."
    )

    def gateway(self) -> GatewaySettings:
        """For the gateway; raises UsageError."""
        with usage_errors():
            return GatewaySettings(**{name: getattr(self, name) for name in GatewaySettings.model_fields})


register(ServeOptions)


def run_gateway(options: ServeOptions, stopping: Callable[[], bool], on_listening: Callable[[str], None]) -> int:
    """Serve until `stopping`, SIGTERM or SIGINT. Returns the exit status 0.

    Raises:
        EmbedqError: the gateway cannot start, or the worker it started will not run whatever is tried.
    """
    try:
        from embedq_gateway.gateway import Gateway
        from embedq_gateway.server import serve
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed; `pip install 'embedq[gateway]'` adds it") from None
    if not options.model:
        serve(Gateway(options.gateway(), _broker(options, options.redis_url)), on_listening, stopping)
        return 0
    with _local_worker(options) as (broker, failed):
        serve(Gateway(options.gateway(), broker), on_listening, lambda: stopping() or failed())
    return 0


def _broker(options: ServeOptions, url: str | None) -> BrokerSettings:
    return options.broker(redis_url=url or BrokerSettings.model_fields["redis_url"].default)


@contextmanager
def _local_worker(options: ServeOptions) -> Iterator[tuple[BrokerSettings, Callable[[], bool]]]:
    """A worker for the length of the block, and a server where none is named.

    Yields how to reach the queue, and what says whether the worker has failed for good; the block's end raises why.

    The worker outlives the requests: it is drained after the block.
    """
    options.checkpoint()
    with usage_errors():
        slots = plan_slots(
            tokenizers=options.tokenizers,
            embedders=options.embedders,
            gpus=options.gpus,
            engine=options.engine_settings(),
        )
    with ExitStack() as stack:
        url, server = options.redis_url, None
        if url is None:
            server = stack.enter_context(EmbeddedServer(options.data_dir.absolute() / _STATE_NAME))
            url = server.url
        broker = _broker(options, url)
        if server is not None:
            _release_the_dead(broker)
        watch = _WorkerWatch(
            Supervisor(slots, broker, options.worker_settings((Path.cwd(),)), log_level=options.log_level), server
        )
        watch.start()
        try:
            yield broker, lambda: watch.failure is not None
        finally:
            watch.stop()


def _release_the_dead(broker: BrokerSettings) -> None:
    """An embedded server has no clients but ours: whoever held leases in its earlier life is gone."""
    from embedq.recover import release_the_dead

    client = connect(broker.redis_url, role="serve")
    release_the_dead(client, Keys(broker.queue), broker)
    client.close()


class _WorkerWatch:
    """The thread that keeps a worker's processes running, until that is pointless."""

    def __init__(self, supervisor: Supervisor, server: EmbeddedServer | None) -> None:
        self._supervisor = supervisor
        self._server = server
        self.failure: EmbedqError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the processes finish; raises the error that ended them early."""
        self._stop.set()
        self._thread.join()
        if self._server is not None and self._server.poll() is not None:
            self._supervisor.kill()
        self._supervisor.drain()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._server is not None:
                    self._server.check()
                self._supervisor.poll()
                self._stop.wait(_POLL_S)
        except EmbedqError as error:
            self.failure = error
