"""What a worker and a producer count, for Prometheus; docs/metrics.md describes each.

In the processes of a worker these write into files of a directory they share (prometheus_client's multiprocess mode);
without one they count in memory. Nothing is counted per document: a batch costs a few microseconds.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

#: Not prometheus_client's default, which whoever imports this may use for their own.
REGISTRY = CollectorRegistry()

_DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WAITS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)

stage_duration = Histogram(
    "embedq_stage_duration_seconds",
    "Time of one step: produce and commit are calls of the server, tokenize one window of jobs, embed one token batch, "
    "publish one file.",
    ["stage"],
    buckets=_DURATIONS,
    registry=REGISTRY,
)
queue_wait = Histogram(
    "embedq_queue_wait_seconds",
    "From an entry's arrival in a stream to its first delivery, by the clocks of server and reader.",
    ["stage", "lane"],
    buckets=_WAITS,
    registry=REGISTRY,
)
batch_fill = Histogram(
    "embedq_batch_fill_ratio",
    "Tokens of a token batch by the budget it was packed to.",
    buckets=_RATIOS,
    registry=REGISTRY,
)
documents = Counter("embedq_documents", "Documents that got their outcome.", ["outcome"], registry=REGISTRY)
tokens = Counter("embedq_tokens", "Tokens of documents that got a vector, after truncation.", registry=REGISTRY)
dead_letters = Counter(
    "embedq_dead_letters", "Documents without a vector, by the code of their error.", ["code"], registry=REGISTRY
)
leases_lost = Counter(
    "embedq_leases_lost",
    "Entries that another consumer had taken over when they were to be committed.",
    ["stage"],
    registry=REGISTRY,
)
redelivered = Counter(
    "embedq_redelivered_entries",
    "Entries delivered again after a process died, hung, or gave them back.",
    ["stage"],
    registry=REGISTRY,
)
retries = Counter(
    "embedq_retries",
    "Calls made again because the server could not take them, with the work in hand.",
    registry=REGISTRY,
)
restarts = Counter(
    "embedq_process_restarts", "Worker processes started again after they ended.", ["role"], registry=REGISTRY
)


def waited(stage: str, lane: str, entry_id: str) -> None:
    """Observe how long a stream entry waited for its first delivery."""
    arrived_s = int(entry_id.partition("-")[0]) / 1000
    queue_wait.labels(stage, lane).observe(max(0.0, time.time() - arrived_s))
