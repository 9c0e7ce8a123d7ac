"""Fixtures every test may use. Each test that asks for `server` runs once against Valkey and once against Redis."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis
from embedq_broker.connect import connect
from s3_server import Bucket, S3Server, use
from servers import KINDS, Kind, Server, ServerMissingError

# Tests share few cores; libraries that start a thread per core would fight over them.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")


def _server(kind: Kind, *, args: tuple[str, ...] = (), tcp: bool = False) -> Server:
    try:
        return Server(kind, args=args, tcp=tcp)
    except ServerMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session", params=KINDS)
def session_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with _server(request.param) as server:
        yield server


@pytest.fixture
def server(session_server: Server) -> Server:
    """An empty server. A test may kill, restart or pause it; settings it changes with CONFIG SET it sets back."""
    if not session_server.alive:
        session_server.start()
    with session_server.client() as client:
        client.flushall()
        client.script_flush()
    return session_server


@pytest.fixture
def redis_url(server: Server) -> str:
    return server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url, role="test") as client:
        yield client


@pytest.fixture(params=KINDS)
def start_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Start servers of the test's own: `start_server(args=("--maxmemory", "64mb"), tcp=True)`. Stopped afterwards."""
    with ExitStack() as stack:

        def start(*, args: tuple[str, ...] = (), tcp: bool = False) -> Server:
            return stack.enter_context(_server(request.param, args=args, tcp=tcp))

        yield start


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, which this process and those it starts have the credentials for."""
    bucket = s3_server.bucket()
    yield from (bucket for _ in use(bucket.environment, monkeypatch))
