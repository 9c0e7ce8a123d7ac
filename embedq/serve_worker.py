"""`embedq worker`: a supervisor in the foreground until it is told to stop."""

from __future__ import annotations

import os
from collections.abc import Callable

from embedq_broker.connect import broker_errors, check_server, connect
from embedq_schemas.errors import UsageError
from embedq_worker.sinks.dataset import dataset_at, is_url
from embedq_worker.supervisor import Supervisor, plan_slots

from embedq.options import WorkerOptions


def run_worker(options: WorkerOptions, stopping: Callable[[], bool]) -> int:
    """Run the worker's processes until `stopping`, then drain them. Returns the exit status 0.

    Raises:
        EmbedqError: the worker cannot start, or will not run whatever is tried.
    """
    import logging
    import time

    if not options.model:
        raise UsageError("--model is missing: name a checkpoint folder or a model hub id")
    given = options.output_roots or (os.getcwd(),)
    roots = tuple(str(dataset_at(root)) if is_url(root) else os.path.abspath(root) for root in given)
    with broker_errors(options.redis_url):
        for warning in check_server(connect(options.redis_url, role="worker"), options.redis_url):
            logging.getLogger(__name__).warning("%s", warning)
    slots = plan_slots(
        tokenizers=options.tokenizers if "tokenizer" in options.roles else 0,
        embedders=options.embedders if "embedder" in options.roles else 0,
        gpus=options.gpus if "embedder" in options.roles else (),
        engine=options.engine_settings(),
    )
    broker, worker = options.broker(), options.worker_settings(roots)
    with options.metrics(broker, processes=True) as folder:
        supervisor = Supervisor(slots, broker, worker, log_level=options.log_level, metrics_folder=folder)
        try:
            while not stopping():
                supervisor.poll()
                time.sleep(0.1)
        finally:
            supervisor.drain()
    return 0
