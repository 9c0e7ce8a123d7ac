"""Who is alive: heartbeats, and locks for work that one process at a time should do."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import redis
from embedq_schemas.errors import ModelMismatchError

from embedq_broker import scripts
from embedq_broker.keys import Keys
from embedq_broker.scripts import text


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process says of itself, a few times per lease."""

    consumer: str
    role: str  # "tokenizer" or "embedder"
    host: str
    pid: int
    started_at: float  # Unix time, s
    at: float  # Unix time of this heartbeat, s
    state: str  # "starting", "idle", "working", "stuck", "draining", "waiting for the server"
    state_s: float  # how long it has been in that state
    held: int  # entries under lease
    documents: int  # committed since start
    tokens: int  # committed since start
    #: The token budget an embedder wants its batches packed to; 0 for tokenizers.
    max_batch_tokens: int = 0
    detail: str = ""


def beat(client: redis.Redis, keys: Keys, heartbeat: Heartbeat) -> None:
    """Publish a heartbeat."""
    scripts.call(client, "beat", [keys.workers], [heartbeat.consumer, msgspec.json.encode(heartbeat)], allow_oom=True)


def heartbeats(client: redis.Redis, keys: Keys) -> list[Heartbeat]:
    """All heartbeats on record, the silent ones included; unreadable ones (of another version) are left out."""
    found = []
    for value in client.hvals(keys.workers):
        try:
            found.append(msgspec.json.decode(value, type=Heartbeat))
        except msgspec.DecodeError:
            continue
    return sorted(found, key=lambda beat: (beat.role, beat.consumer))


def bury(client: redis.Redis, keys: Keys, consumer: str) -> None:
    """Forget a process that ended."""
    client.hdel(keys.workers, consumer)


def wanted_batch_tokens(client: redis.Redis, keys: Keys, *, fresh_s: float) -> dict[str, int]:
    """The `max_batch_tokens` of each live embedder, by its consumer name; empty while there is none."""
    now = time.time()
    beats = (b for b in heartbeats(client, keys) if b.max_batch_tokens and now - b.at < fresh_s)
    return {b.consumer: b.max_batch_tokens for b in beats}


def bind_model(client: redis.Redis, keys: Keys, fingerprint: str, facts: dict[str, str | int]) -> None:
    """Bind the queue to a model, or check that it is bound to this one; raises ModelMismatchError."""
    flat: list[str | int] = [part for pair in facts.items() for part in pair]
    bound = text(scripts.call(client, "bind_model", [keys.model], [fingerprint, *flat], allow_oom=True))
    if bound != fingerprint:
        name = client.hget(keys.model, "model_id")
        raise ModelMismatchError(
            f"queue {keys.queue} is bound to another model ({text(name or b'unknown')}, fingerprint {bound[:12]}; "
            f"this one has {fingerprint[:12]}); use another --queue for this model"
        )


def model_facts(client: redis.Redis, keys: Keys) -> dict[str, str]:
    """What the queue is bound to; empty before the first worker."""
    return {text(k): text(v) for k, v in client.hgetall(keys.model).items()}


@contextmanager
def exclusive(client: redis.Redis, keys: Keys, name: str, *, ttl_ms: int) -> Iterator[bool]:
    """Hold the lock `name` for the block, if nobody does; yields whether it is held.

    The lock ends by its TTL whatever happens, so the block must be safe to overlap with another's: it saves work, it
    does not protect data.
    """
    mine = uuid.uuid4().hex
    held = bool(scripts.call(client, "lock", [keys.lock(name)], [mine, ttl_ms], allow_oom=True))
    try:
        yield held
    finally:
        if held:
            scripts.call(client, "unlock", [keys.lock(name)], [mine], allow_oom=True)
