"""Requests that come while the embedders are busy share token batches, so that many clients cost few forward passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from embedq_broker.consume import Stage, lane_loads, undelivered
from embedq_broker.keys import Keys
from embedq_schemas.names import LANES, Lane
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


def test_a_batch_that_was_taken_and_not_begun_lets_requests_gather_too(tmp_path: Path, served_model: Path) -> None:
    with Server() as server, server.client() as redis:
        # The second batch takes long enough for everything else to come.
        command = ("worker", "--redis", server.url, "--model", served_model, "--device", "cpu")
        worker = Program(tmp_path / "worker.log", *command, EMBEDQ_FAULTS="embed.forward:delay:2:8")

        def taken() -> int:
            return sum(lane_loads(redis, KEYS, Stage.EMBED, LANES)[Lane.INTERACTIVE].held.values())

        def made() -> int:
            added: int = redis.xinfo_stream(KEYS.batches(Lane.INTERACTIVE))["entries-added"]
            return added

        async def until(condition: Callable[[], object], what: str) -> None:
            await asyncio.to_thread(wait_until, condition, what)

        async def ask() -> int:
            async with AsyncClient(server.url, "default") as client:
                await client.embed(["the worker is up"], timeout_s=60)
                before = made()
                asking = []
                for number in (1, 2):
                    asking.append(asyncio.create_task(client.embed([f"text {number}"], timeout_s=60)))
                    await until(lambda number=number: taken() == number, f"the embedder has {number}")
                asking += [asyncio.create_task(client.embed([f"late {i}"], timeout_s=60)) for i in range(REQUESTS)]
                await until(lambda: redis.xlen(KEYS.jobs(Lane.INTERACTIVE)) >= REQUESTS, "the others gather")
                await asyncio.gather(*asking)
                return made() - before

        try:
            assert asyncio.run(ask()) == 3
        finally:
            worker.kill()
