"""Every Redis key embedq touches, in one place.

All keys of a queue share the hash tag `{<queue>}`: each Lua call stays atomic, and a Redis Cluster can hold many
queues.
"""

from __future__ import annotations

from dataclasses import dataclass

from embedq_schemas.errors import UsageError
from embedq_schemas.names import Lane, QueueName, RunId
from pydantic import TypeAdapter, ValidationError

_queue_name = TypeAdapter(QueueName)
_run_id = TypeAdapter(RunId)


def check_queue_name(name: str) -> str:
    """`name` if it may name a queue; raises UsageError."""
    return _check(_queue_name, name, "queue name")


def check_run_id(name: str) -> str:
    """`name` if it may name a run; raises UsageError."""
    return _check(_run_id, name, "run id")


def _check(adapter: TypeAdapter[str], name: str, what: str) -> str:
    try:
        return adapter.validate_python(name)
    except ValidationError:
        raise UsageError(
            f"{name[:120]!r} is not a {what}: up to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
        ) from None


@dataclass(frozen=True)
class Keys:
    """Key names of one queue."""

    queue: str

    def __post_init__(self) -> None:
        check_queue_name(self.queue)

    def _key(self, *parts: str) -> str:
        return ":".join((f"embedq:{{{self.queue}}}", *parts))

    def jobs(self, lane: Lane) -> str:
        """Stream of jobs; group `tokenizers`."""
        return self._key("jobs", lane)

    def batches(self, lane: Lane) -> str:
        """Stream of token batches; group `embedders`."""
        return self._key("batches", lane)

    @property
    def commits(self) -> str:
        """Stream of commit records whose file is not published yet."""
        return self._key("commits")

    @property
    def bytes(self) -> str:
        """Hash: payload bytes held by each stream of jobs and token batches, by all `results`, by all `dead` letters.

        Their sum is the backlog. The fields stay few, however many runs there are: each job sent adds them up.
        """
        return self._key("bytes")

    @property
    def held(self) -> str:
        """Hash: payload bytes of each run's results and dead letters, by their streams' suffixes."""
        return self._key("held")

    @property
    def model(self) -> str:
        """Hash: the model this queue is bound to."""
        return self._key("model")

    @property
    def workers(self) -> str:
        """Hash: consumer name to heartbeat (JSON)."""
        return self._key("workers")

    @property
    def runs(self) -> str:
        """Sorted set: run ids by creation time."""
        return self._key("runs")

    @property
    def open_datasets(self) -> str:
        """Set: runs whose dataset is not finished."""
        return self._key("open")

    @property
    def events(self) -> str:
        """Stream, trimmed: ids of runs whose results, dead letters or status just changed. It wakes clients up."""
        return self._key("events")

    def run(self, run: str) -> str:
        """Hash: one run's specification, status and counters."""
        return self._key("run", run)

    def results(self, run: str) -> str:
        """Stream of vector batches of a run whose sink is `stream`."""
        return self._key("results", run)

    def dead(self, run: str) -> str:
        """Stream of a run's dead letters."""
        return self._key("dead", run)

    def token(self, token: str) -> str:
        """String: set once the commit of that idempotency token is done."""
        return self._key("tok", token)

    @property
    def tries(self) -> str:
        """Hash: entry (stream suffix and id) to the number of tries that never came back."""
        return self._key("tries")

    def store(self, store: str, *parts: str) -> str:
        """Records of the files and batches of one data directory of the gateway, and their indexes."""
        return self._key("store", store, *parts)

    def lock(self, name: str) -> str:
        """String: a mutual exclusion with a TTL, such as one sweeper per group."""
        return self._key("lock", name)

    def suffix(self, key: str) -> str:
        """The part of `key` after the hash tag, as used for fields of `bytes` and `held`."""
        return key.partition("}:")[2]

    def of(self, suffix: str) -> str:
        """The key of that suffix."""
        return self._key(suffix)
