"""Publishing: a committed file gets its final name, its manifest line, and loses its commit record.

Any process that sees the dataset may do it, and doing it twice is harmless.
"""

from __future__ import annotations

import redis
from embedq_broker import metrics
from embedq_broker.commit import CommitRecord, published
from embedq_broker.faults import fault_point
from embedq_broker.keys import Keys

from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.files import storage_errors


def publish(client: redis.Redis, keys: Keys, dataset: Dataset, record: CommitRecord, *, replay: bool = False) -> None:
    """Publish one committed file.

    Args:
        replay: another process may have begun: look into the manifest before appending to it.

    Raises:
        StorageError: the disk refused, or the committed file is gone.
        OutputError: the object store refuses for good.
    """
    with metrics.stage_duration.labels("publish").time():
        fault_point("publish.before")
        with storage_errors(f"publish {dataset}/{record.file.name}"):
            dataset.store.publish(record.file, thoroughly=replay)
            dataset.store.enlist(record.file, replay=replay)
        fault_point("publish.listed")
        published(client, keys, record)
        fault_point("publish.dropped")
