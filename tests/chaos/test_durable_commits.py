"""A commit whose reply was lost is sent again on another connection, and must be durable there as well."""

from __future__ import annotations

from conftest import both_servers
from embedq_broker.commit import Commit, CommitOutcome
from embedq_broker.consume import Consumer, Stage
from embedq_schemas.run import Durability
from pipeline import Pipeline
from proxy import Proxy
from servers import Server


@both_servers
def test_a_repeated_commit_writes_so_that_waiting_speaks_of_it(pipeline: Pipeline) -> None:
    consumer = Consumer(pipeline.client, pipeline.keys, Stage.EMBED, "c", lease_ms=1000)
    commit = Commit(consumer)
    commit.send(pipeline.client)
    token = pipeline.keys.token(commit.token)
    pipeline.client.pexpire(token, 1000)
    assert commit.send(pipeline.client).outcome is CommitOutcome.DUP
    assert pipeline.client.pttl(token) > 10_000


def test_a_run_whose_commits_wait_for_the_servers_disk_survives_lost_replies(
    pipeline: Pipeline, own_server: Server
) -> None:
    pipeline.durability = Durability.FSYNC
    pipeline.produce()
    with Proxy(own_server.port) as proxy:
        pipeline.start(faults="embed.forward:delay:every:0.15", once=False, url=proxy.url)
        for _ in range(4):
            proxy.lose_reply(b"WAITAOF")
            pipeline.until(lambda before=proxy.lost: proxy.lost > before or settled(pipeline), "a lost reply")  # type: ignore[misc]
        pipeline.check()
    assert proxy.lost > 0


def settled(pipeline: Pipeline) -> bool:
    return pipeline.registry.state("run").status.terminal
