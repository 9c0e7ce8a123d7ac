"""A service's vectors come while the files of a corpus cannot be written."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from embedq_broker.connect import connect
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats
from embedq_broker.registry import Registry
from embedq_schemas.job import encode_job
from embedq_schemas.run import ParquetSink, RunSpec, RunStatus
from services import run_service
from waiting import wait_until

from embedq import Client


def test_interactive_results_do_not_wait_for_a_disk_that_refuses(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "_staging").parent.mkdir()
    (out / "_staging").write_text("in the way")
    with run_service(tmp_path) as service, connect(service.settings.redis_url) as redis:
        keys = Keys(service.settings.queue)
        registry = Registry(redis, keys)
        spec = registry.create(
            RunSpec(run="corpus", queue=keys.queue, sink=ParquetSink(path=str(out)), created_at=time.time())
        )
        job = pa.RecordBatch.from_pydict({"id": ["a", "b"], "ordinal": [0, 1], "text": ["x", "y"]})
        registry.enqueue(
            spec,
            expected="",
            position="1",
            max_backlog_bytes=1 << 20,
            documents=2,
            payload=encode_job(job),
            close=True,
        )
        wait_until(lambda: any(beat.state == "waiting for storage" for beat in heartbeats(redis, keys)), timeout_s=60)
        with Client(settings=service.settings) as client:
            np.testing.assert_array_equal(client.embed(["now"], timeout_s=60), service.vectors(["now"]))
        assert registry.state("corpus").counters.succeeded == 0
        (out / "_staging").unlink()
        wait_until(lambda: registry.status("corpus") is RunStatus.COMPLETED, timeout_s=60)
