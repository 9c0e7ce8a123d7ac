"""The Lua scripts behind typed wrappers. Each script's header documents its KEYS, ARGV and replies.

Every script starts with a `#!lua` line, so that a server at `maxmemory` refuses it up front and nothing is half
written. Scripts that free memory, keep leases or let a worker start carry `allow-oom`: refusing those would keep a
full server full for good. `create_run`, `enqueue`, and commits whose output stays in Redis, do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError, ResponseError

Arg = str | int | bytes | memoryview
Call = tuple[str, Sequence[str], Sequence[Arg]]
"""A script's name, its KEYS and its ARGV."""

#: Scripts that call functions of the prelude.
_WITH_PRELUDE = frozenset(
    {"create_run", "enqueue", "commit", "published", "transition", "depths"}
    | {"drain", "drop_results", "drop_run", "release_held"}
)


@cache
def _source(name: str, allow_oom: bool) -> tuple[str, str]:
    """Text of a script and its SHA-1, as the server computes it."""
    folder = resources.files(__package__) / "lua"
    body = (folder / f"{name}.lua").read_text()
    if name in _WITH_PRELUDE:
        body = (folder / "prelude.lua").read_text() + "\n" + body
    text = ("#!lua flags=allow-oom\n" if allow_oom else "#!lua\n") + body
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def call(
    client: redis.Redis,
    name: str,
    keys: Sequence[str],
    args: Sequence[Arg],
    *,
    allow_oom: bool = False,
) -> Any:
    """Run script `name`; loads it again after SCRIPT FLUSH or a failover."""
    text, sha = _source(name, allow_oom)
    try:
        return client.evalsha(sha, len(keys), *keys, *args)
    except NoScriptError:
        return client.eval(text, len(keys), *keys, *args)


def call_many(client: redis.Redis, calls: Sequence[Call], *, allow_oom: bool = False) -> list[Any]:
    """Run idempotent scripts in order, in one round trip. A failed call's reply is its exception.

    Other clients' calls may come between them. Where the server does not know a script all calls are made again.
    """
    # Not a transaction: a full server refuses to queue even scripts that it would run.
    pipe = client.pipeline(transaction=False)
    for name, keys, args in calls:
        pipe.evalsha(_source(name, allow_oom)[1], len(keys), *keys, *args)
    replies: list[Any] = pipe.execute(raise_on_error=False)
    if not any(isinstance(reply, NoScriptError) for reply in replies):
        return replies
    replies = []
    for name, keys, args in calls:
        try:
            replies.append(call(client, name, keys, args, allow_oom=allow_oom))
        except ResponseError as error:
            replies.append(error)
    return replies


def text(value: Any) -> str:
    """A reply's string; connections here return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
