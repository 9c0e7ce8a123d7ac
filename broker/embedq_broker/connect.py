"""Connections to Redis or Valkey: one URL in, a configured client out, and every failure as one sentence.

Two kinds of connection exist, and the difference matters for correctness. An ordinary connection retries a command
whose reply was lost; that is safe only because every write of embedq carries an idempotency token. A blocking
connection (`XREADGROUP ... BLOCK`) never retries by itself: a second read after a lost reply would leave the entries
of the first one stranded in the consumer's own pending list, so its owner re-reads that list instead.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import redis
from embedq_schemas.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    UsageError,
)
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    DataError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

#: Retries of an ordinary connection, and the seconds after which it gives up whatever the count says.
RETRIES: Final = 8
RETRY_BUDGET_S: Final = 15.0
CONNECT_TIMEOUT_S: Final = 5.0
_DIRECT_SCHEMES: Final = ("redis", "rediss", "unix")
_SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT: Final = 26379
_MINIMUM_VERSION: Final = {"redis": (7, 0), "valkey": (7, 2)}
_AUTH_ERRORS: Final = (
    AuthenticationError,
    AuthorizationError,
    AuthenticationWrongNumberOfArgsError,
    NoPermissionError,
)


class _BoundedRetry(Retry):
    """Retries with jittered exponential backoff inside a time budget, and never retries a refused password.

    redis-py nests the retries of connecting inside those of a command; the budget bounds their product.
    """

    def __init__(self, retries: int, budget_s: float) -> None:
        # OSError: redis-py before 8 lets a refused connection through unwrapped.
        errors = (ConnectionError, TimeoutError, OSError)
        super().__init__(ExponentialWithJitterBackoff(cap=2.0, base=0.05), retries, errors)
        self._budget_s = budget_s

    def call_with_retry(self, do: Callable[[], Any], fail: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + self._budget_s

        def give_up_late(error: Exception, *count: int) -> None:
            fail(error, *count)
            if isinstance(error, _AUTH_ERRORS) or time.monotonic() > deadline:
                raise error

        return super().call_with_retry(do, give_up_late, *args, **kwargs)


def connect(url: str, *, role: str = "client", blocking: bool = False, socket_timeout_s: float = 30.0) -> redis.Redis:
    """Return a client for `url`; nothing is sent before its first command.

    `url` is `redis://[user:password@]host:port/db`, the same with `rediss://` (TLS; `ssl_*` options as query
    arguments), `unix:///path/to.sock?db=0`, or
    `redis+sentinel://[user:password@]host:port,host2:port2/service[/db]` (`rediss+sentinel://` for TLS;
    `sentinel_username` and `sentinel_password` as query arguments when the sentinels have their own).

    `role` becomes part of the connection's name in `CLIENT LIST`. Replies are bytes, in RESP2 shapes.
    With `blocking`, nothing is ever retried and a `BLOCK` must be shorter than `socket_timeout_s` (seconds), or the
    client drops the connection before the server answers.

    Raises `UsageError` when the URL cannot be understood. The client itself raises redis-py's errors: use
    `broker_errors` or `translate`.
    """
    options: dict[str, Any] = {
        "decode_responses": False,
        # RESP2: the reply shapes that every redis-py release agrees on, no HELLO needed to authenticate.
        "protocol": 2,
        "client_name": _client_name(role),
        "socket_timeout": socket_timeout_s,
        "retry": Retry(NoBackoff(), 0) if blocking else _BoundedRetry(RETRIES, RETRY_BUDGET_S),
    }
    scheme = url.partition("://")[0].lower()
    try:
        pool: redis.ConnectionPool
        if scheme in _SENTINEL_SCHEMES:
            pool = _sentinel_pool(url, options)
        elif scheme in _DIRECT_SCHEMES:
            pool = _direct_pool(url, options)
        else:
            known = ", ".join(f"{name}://" for name in (*_DIRECT_SCHEMES, *_SENTINEL_SCHEMES))
            raise UsageError(f"The Redis URL {mask_url(url)!r} has no known scheme; use one of {known}.")
        pool.connection_class(**pool.connection_kwargs)  # an unknown option shows up only when a connection is built
    except (ValueError, TypeError, RedisError):
        # The causes quote pieces of the URL, and the piece may be the password.
        raise UsageError(
            f"The Redis URL {mask_url(url)!r} cannot be understood; check host, port and options, "
            "and percent-encode special characters in the password."
        ) from None
    return redis.Redis.from_pool(pool)


def _direct_pool(url: str, options: dict[str, Any]) -> redis.ConnectionPool:
    parts = urlsplit(url)
    if parts.scheme != "unix":
        _check_database(parts.path)
        if not parts.hostname:
            raise ValueError("no host")
    elif not parts.path:
        raise ValueError("no socket path")
    arguments: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    if parts.scheme != "unix":
        options = options | {"socket_keepalive": True}
    arguments.setdefault("socket_connect_timeout", CONNECT_TIMEOUT_S)
    return redis.ConnectionPool(**(arguments | options))


def _sentinel_pool(url: str, options: dict[str, Any]) -> SentinelConnectionPool:
    # urlsplit knows one host per URL, so the sentinels are split by hand.
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    user, _, password = userinfo.partition(":")
    service, _, database = path.partition("/")
    sentinels = [_host_and_port(host) for host in hosts.split(",")]
    if not service:
        raise ValueError("no service name")
    _check_database(database)

    # parse_url types the query arguments (booleans, numbers) as it does for a direct connection.
    arguments: dict[str, Any] = parse_url(f"redis://unused?{query}")  # type: ignore[no-untyped-call]
    arguments.pop("host")
    connect_timeout = arguments.setdefault("socket_connect_timeout", CONNECT_TIMEOUT_S)
    sentinel_options: dict[str, Any] = {
        "username": arguments.pop("sentinel_username", None),
        "password": arguments.pop("sentinel_password", None),
        "socket_timeout": connect_timeout,
        "socket_connect_timeout": connect_timeout,
        "retry": Retry(NoBackoff(), 0),  # the next sentinel is the retry
        "protocol": 2,
    }
    if scheme.startswith("rediss"):
        tls = {"ssl": True} | {name: value for name, value in arguments.items() if name.startswith("ssl_")}
        arguments |= tls
        sentinel_options |= tls
    arguments |= {"username": unquote(user) or None, "password": unquote(password) or None}
    arguments.setdefault("db", int(database or 0))
    manager = Sentinel(sentinels, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        unquote(service),
        manager,
        check_connection=True,
        **(arguments | options),
    )


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no sentinel host")
    return parts.hostname, parts.port or _SENTINEL_PORT


def _check_database(path: str) -> None:
    # redis-py ignores a database that is no number and would silently write to database 0.
    database = path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError("the database is not a number")


def _client_name(role: str) -> str:
    # CLIENT SETNAME refuses spaces and control characters.
    return f"embedq-{re.sub(r'[^A-Za-z0-9._-]', '-', role)}-{os.getpid()}"


def check_server(client: redis.Redis, url: str = "") -> tuple[str, ...]:
    """Verify that the server can hold queues, and return warnings (sentences) about what could not be verified.

    Checked: Redis 7.0 or Valkey 7.2 and newer; `maxmemory-policy noeviction` (a warning, since an evicting server
    loses work only when full; skipped where ACL forbids `CONFIG`); scripts may run and keys `embedq:*` may be read
    and written. Nothing is written.

    Raises `BrokerError` (too old), `BrokerAuthError`, `BrokerUnavailableError`; `url` is for their messages.
    """
    warnings = []
    with broker_errors(url):
        version = _server_version(client)
        if version is None:
            warnings.append(f"The version of {_server(url)} could not be checked, because its ACL forbids HELLO.")
        else:
            product, numbers = version
            minimum = _MINIMUM_VERSION[product]
            if numbers < minimum:
                raise BrokerError(
                    f"{_server(url)} is {product.capitalize()} {'.'.join(map(str, numbers))}, but embedq needs "
                    "Redis 7.0 or newer, or Valkey 7.2 or newer."
                )
        # EVAL asks for read and write access to the keys it declares, so this probes both without a write.
        _command(client, "EVAL", "#!lua flags=no-writes\nreturn 1", 1, "embedq:{probe}:acl")
        policy = _maxmemory_policy(client)
    if policy not in (None, "noeviction"):
        warnings.append(
            f"{_server(url)} evicts keys when it is full (maxmemory-policy {policy}) and would lose queued work; "
            "set maxmemory-policy to noeviction."
        )
    return tuple(warnings)


def _server_version(client: redis.Redis) -> tuple[str, tuple[int, ...]] | None:
    # HELLO, not INFO: ACL users without @dangerous may still call it.
    try:
        reply = _command(client, "HELLO")
    except NoPermissionError:
        return None
    except redis.ResponseError as error:
        if "unknown command" in str(error).lower():
            return "redis", (5,)
        raise
    # A flat list in RESP2; newer redis-py releases parse it into a dict.
    fields = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    text = {_text(name): _text(value) for name, value in fields.items()}
    product = "valkey" if text.get("server") == "valkey" else "redis"
    return product, tuple(int(number) for number in re.findall(r"\d+", text.get("version", "0"))[:3])


def _maxmemory_policy(client: redis.Redis) -> str | None:
    try:
        reply = _command(client, "CONFIG GET", "maxmemory-policy")
    except redis.ResponseError:
        return None  # managed services and narrow ACLs hide CONFIG
    pairs = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return next((_text(value) for name, value in pairs.items() if _text(name) == "maxmemory-policy"), None)


def _command(client: redis.Redis, *arguments: str | int) -> Any:
    return client.execute_command(*arguments)  # type: ignore[no-untyped-call]


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def mask_url(url: str) -> str:
    """Return `url` with every password replaced by `***`. It never raises, and when unsure it hides more."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if "@" not in url else f"***@{url.rpartition('@')[2]}"
    # Up to the last @: an unencoded password may itself contain @, / and ?.
    if not rest.startswith("/") and "@" in rest:
        userinfo, _, rest = rest.rpartition("@")
        user, colon, _ = userinfo.partition(":")
        rest = f"{user}{colon}{'***' if colon else ''}@{rest}"
    return f"{scheme}://" + re.sub(r"(?i)([?&][a-z_]*password=)[^&]*", r"\1***", rest)


def translate(error: RedisError | OSError, url: str = "") -> BrokerError:
    """Return the `BrokerError` that says in one sentence what `error`, raised by redis-py, means for `url`."""
    server, reason = _server(url), _reason(error)
    if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in reason:
        return BrokerOutOfMemoryError(
            f"{server} is out of memory (maxmemory) and refused a write; raise its maxmemory or let workers catch up."
        )
    if isinstance(error, _AUTH_ERRORS) or "ACL failure in script" in reason:
        return BrokerAuthError(f"{server} refused access: {reason}.")
    if isinstance(error, BusyLoadingError):
        return BrokerUnavailableError(f"{server} is still loading its data; try again in a moment.")
    if isinstance(error, ReadOnlyError):
        return BrokerUnavailableError(f"{server} is a read-only replica; give the URL of the primary or of Sentinel.")
    if reason.startswith("MISCONF"):
        return BrokerUnavailableError(f"{server} refuses writes because it cannot persist them (is its disk full?).")
    if isinstance(error, MovedError):
        return BrokerError(
            f"{server} is a cluster node that does not hold this queue; connect to the node {error.host}:{error.port}."
        )
    if isinstance(error, (ClusterDownError, MasterDownError, TryAgainError)) or reason.startswith("NOREPLICAS"):
        return BrokerUnavailableError(f"{server} cannot take writes at the moment: {reason}.")
    if isinstance(error, TimeoutError):
        return BrokerUnavailableError(f"{server} did not answer in time: {reason}.")
    if isinstance(error, (ConnectionError, OSError)):
        return BrokerUnavailableError(f"{server} cannot be reached: {reason}.")
    if isinstance(error, DataError):
        return BrokerError(f"A value could not be sent to {server}: {reason}.")
    return BrokerError(f"{server} answered with an error: {reason}.")


@contextmanager
def broker_errors(url: str = "") -> Iterator[None]:
    """Raise redis-py's errors as `BrokerError`s that name `url`, masked; other errors pass unchanged."""
    try:
        yield
    except RedisError as error:
        raise translate(error, url) from error


def _server(url: str) -> str:
    return f"Redis at {mask_url(url)}" if url else "Redis"


def _reason(error: BaseException) -> str:
    if isinstance(error, MasterNotFoundError):
        return str(error).partition(" : ")[0]  # what follows lists every sentinel client, credentials included
    # redis-py wraps the operating system's words in its own; the innermost ones say it best.
    cause = error.__cause__ or error.__context__
    if isinstance(error, ConnectionError) and isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
