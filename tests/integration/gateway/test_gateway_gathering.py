"""Requests that come while the embedders are busy share token batches, so that many clients cost few forward passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from embedq_broker.consume import Stage, undelivered
from embedq_broker.keys import Keys
from embedq_schemas.names import Lane
from servers import Server
from stack import Program, wait_until

from embedq import AsyncClient

KEYS = Keys("default")
REQUESTS = 30


def test_requests_gather_behind_one_waiting_batch(tmp_path: Path, served_model: Path) -> None:
    with Server() as server, server.client() as redis:
        common = ("worker", "--redis", server.url, "--model", served_model, "--device", "cpu")
        tokenizer = Program(tmp_path / "tokenizer.log", *common, "--roles", "tokenizer")
        embedder = Program(tmp_path / "embedder.log", *common, "--roles", "embedder")

        def jobs() -> int:
            return redis.xlen(KEYS.jobs(Lane.INTERACTIVE))

        def waiting() -> int:
            return undelivered(redis, KEYS, Stage.EMBED, Lane.INTERACTIVE)

        async def until(condition: Callable[[], object], what: str) -> None:
            await asyncio.to_thread(wait_until, condition, what)

        async def ask() -> list[np.ndarray]:
            async with AsyncClient(server.url, "default") as client:
                await client.embed(["the worker is up"], timeout_s=60)
                with embedder.frozen():
                    asking = []
                    while not waiting():
                        asking.append(asyncio.create_task(client.embed([f"text {len(asking)}"], timeout_s=60)))
                        await asyncio.sleep(0.2)
                        await until(lambda: waiting() or not jobs(), "the tokenizer has seen it")
                    asking += [asyncio.create_task(client.embed([f"late {i}"], timeout_s=60)) for i in range(REQUESTS)]
                    await until(lambda: jobs() >= REQUESTS, "the others gather")
                    await asyncio.sleep(0.5)
                    assert jobs() >= REQUESTS
                    assert waiting() == 1
                return await asyncio.gather(*asking)

        try:
            vectors = asyncio.run(ask())
            assert {vector.shape for vector in vectors} == {(1, 32)}
        finally:
            tokenizer.kill()
            embedder.kill()
