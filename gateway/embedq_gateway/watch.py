"""What the gateway knows of its queue: looked up by one thread, so that no request waits for the answer.

Probes, refusals and Retry-After are answered from the last look; a server that hangs makes it old, not slow.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import redis
from embedq_broker.connect import connect, translate
from embedq_broker.keys import Keys
from embedq_broker.liveness import heartbeats, model_facts
from embedq_broker.registry import Registry
from embedq_broker.settings import BrokerSettings
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_WINDOW_S = 20.0
_BYTES_PER_TOKEN = 4
"""A token id is four bytes; a token of text is about as many."""
_LONGEST_RETRY_S = 60
_NOT_AT_WORK = ("starting", "stuck")


@dataclass(frozen=True)
class ServedModel:
    """The model the queue is bound to, as its first worker described it."""

    id: str
    fingerprint: str
    revision: str
    dimension: int
    max_length: int
    prompts: Mapping[str, str]


@dataclass(frozen=True)
class QueueState:
    """One look at the queue."""

    seen_at: float = field(default_factory=time.monotonic)
    #: Why the queue cannot be used; empty when it can.
    problem: str = "the queue has not been looked at yet"
    reachable: bool = False
    model: ServedModel | None = None
    backlog_bytes: int = 0
    #: Tokens committed per second over the last 20 s.
    tokens_per_s: float = 0.0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.seen_at

    def retry_after_s(self) -> int:
        """Seconds until the work that waits now is done, at the present rate: 1 to 60."""
        if not self.tokens_per_s:
            return 5
        return max(1, min(_LONGEST_RETRY_S, round(self.backlog_bytes / _BYTES_PER_TOKEN / self.tokens_per_s)))


class QueueWatch:
    """The thread that looks. `state` is always the last look."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._keys = Keys(settings.queue)
        self._client: redis.Redis | None = None
        self._tokens: deque[tuple[float, int]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.state = QueueState()

    def start(self) -> None:
        """Look once, then go on in the background."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            try:
                self._look()
            except Exception:
                # Without this thread the gateway would be blind; the next look may succeed.
                log.exception("cannot look at the queue")

    def _look(self) -> None:
        try:
            if self._client is None:
                self._client = connect(
                    self._settings.redis_url, role="watch", blocking=True, socket_timeout_s=_TIMEOUT_S
                )
            self.state = self._state(self._client)
        except RedisError as error:
            problem = str(translate(error))
            if problem != self.state.problem:
                log.warning("%s", problem)
            self.state = QueueState(problem=problem, model=self.state.model)

    def _state(self, client: redis.Redis) -> QueueState:
        beats = heartbeats(client, self._keys)
        model = served_model(model_facts(client, self._keys))
        backlog = Registry(client, self._keys).backlog_bytes()
        fresh_s = max(10.0, 2 * self._settings.lease_s)
        now = time.time()
        at_work = {b.role for b in beats if now - b.at < fresh_s and b.state not in _NOT_AT_WORK}
        problem = ""
        if model is None:
            problem = "no worker has ever served this queue"
        elif missing := [role for role in ("tokenizer", "embedder") if role not in at_work]:
            problem = f"no {' and no '.join(missing)} is at work"
        return QueueState(
            problem=problem,
            reachable=True,
            model=model,
            backlog_bytes=backlog,
            tokens_per_s=self._rate(sum(b.tokens for b in beats if b.role == "embedder")),
        )

    def _rate(self, tokens: int) -> float:
        now = time.monotonic()
        if self._tokens and tokens < self._tokens[-1][1]:
            self._tokens.clear()  # a worker left, and took its count along
        self._tokens.append((now, tokens))
        while now - self._tokens[0][0] > _WINDOW_S:
            self._tokens.popleft()
        first = self._tokens[0]
        return (tokens - first[1]) / (now - first[0]) if now > first[0] else 0.0


def served_model(facts: Mapping[str, str]) -> ServedModel | None:
    """The model of `facts`, which a queue's first worker writes down; None before."""
    if not facts.get("fingerprint"):
        return None
    return ServedModel(
        id=facts.get("model_id") or facts["fingerprint"][:12],
        fingerprint=facts["fingerprint"],
        revision=facts.get("revision", ""),
        dimension=int(facts["dimension"]),
        max_length=int(facts["max_length"]),
        prompts=json.loads(facts.get("prompts", "{}")),
    )
