"""Operators, load balancers and the supervisor are told of replicas that cannot serve, by a router's process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from manylora._version import VERSION
from manylora.cluster import client as cluster_client
from manylora.cluster import messages, operations
from manylora.cluster.client import ClusterClient
from manylora.cluster.link import Hello, Link, credentials_of
from manylora.cluster.operations import Operations, Refusal
from manylora.protocol.routing import Drain
from tests.cluster.test_lacking import SECRET, Router, until
from tests.engine.test_engine import INFO


class Cluster:
    """A router with two replicas that are up, and a supervisor that says what it is told to. A context."""

    def __init__(self, folder: Path) -> None:
        self.router = Router(folder, [])
        self.operations = Operations(self.router.board, self.router.launch.cluster)
        self.links: list[Link] = []

    async def __aenter__(self) -> Cluster:
        await self.router.begin()
        self.supervisor = await self.router.link(messages.SUPERVISOR, 0, messages.ToSupervisorFromRouter)
        self.say(self.slot(0), self.slot(1))
        self.links = [await self.router.replica(number, set()) for number in range(2)]
        self.watching = asyncio.ensure_future(self.operations.watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.watching.cancel()
        for link in (*self.links, self.supervisor):
            link.abort()
        self.router.board.close()

    def slot(self, number: int, state: str = "running", epoch: int = 1, why: str = "") -> messages.Slot:
        return messages.Slot(number, epoch, 0, state, why=why)

    def say(self, *slots: messages.Slot) -> None:
        """By the supervisor."""
        self.supervisor.send(messages.ProcessTable(list(slots), {}, 0, "local"))

    async def hear(self, kind: type[Any]) -> Any:
        """The next of this kind that the supervisor is told."""
        async with asyncio.timeout(30.0):
            while not isinstance(message := await self.supervisor.receive(), kind):
                assert message is not None
        return message

    async def client(self) -> ClusterClient:
        """A front end that is linked."""
        hello = Hello(messages.FRONTEND, 0, 1, os.getpid(), VERSION, "model")
        credentials = credentials_of(SECRET, None, "127.0.0.1")
        found = ClusterClient(INFO, self.router.launch.router, credentials, hello, 8, 30.0)
        assert "router" in str(found.why_unready())
        found.start()
        await asyncio.wait_for(found.wait_ready(), 30.0)
        return found


def test_scaling_says_which_replica_does_not_come_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with Cluster(tmp_path) as cluster:
            asked = asyncio.ensure_future(cluster.operations.in_time(cluster.operations.scale(3)))
            assert (await cluster.hear(messages.StartReplicas)).replicas == [2]
            cluster.say(cluster.slot(0), cluster.slot(1), cluster.slot(2, "starting"))
            await asyncio.sleep(0.2)
            assert not asked.done()
            cluster.say(cluster.slot(0), cluster.slot(1), cluster.slot(2, "waiting", why="no memory"))
            with pytest.raises(Refusal, match="replica 2 does not come up, and is tried again: no memory"):
                await asyncio.wait_for(asked, 30.0)
            # Asked again, it waits for the next start, which succeeds.
            asked = asyncio.ensure_future(cluster.operations.in_time(cluster.operations.scale(3)))
            await asyncio.sleep(0.2)
            assert not asked.done()
            cluster.say(cluster.slot(0), cluster.slot(1), cluster.slot(2, "starting", 2, "no memory"))
            cluster.links.append(await cluster.router.replica(2, set(), 2))
            await asyncio.wait_for(asked, 30.0)

    asyncio.run(run())


def test_a_restart_stops_where_a_replica_does_not_come_up_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with Cluster(tmp_path) as cluster:
            asked = asyncio.ensure_future(cluster.operations.in_time(cluster.operations.restart()))
            assert (await cluster.hear(messages.EndReplica)).replica == 0
            cluster.say(cluster.slot(0, "waiting", 2, "no memory"), cluster.slot(1))
            with pytest.raises(Refusal, match=r"replica 0 does not come up.*no memory"):
                await asyncio.wait_for(asked, 30.0)

    asyncio.run(run())


def test_what_takes_long_is_answered_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "ANSWER_S", 0.3)

    async def run() -> None:
        async with Cluster(tmp_path) as cluster:
            done = asyncio.Event()

            async def work() -> None:
                await done.wait()
                done.clear()

            with pytest.raises(Refusal, match=r"not done within 0\.3 s, and going on: replica 0 is running"):
                await cluster.operations.in_time(work())
            done.set()
            await until(lambda: not done.is_set())

    asyncio.run(run())


def test_front_ends_know_whether_anything_can_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_client, "SILENT_S", 0.5)

    async def run() -> None:
        async with Cluster(tmp_path) as cluster:
            client = await cluster.client()
            await until(lambda: client.why_unready() is None)
            for replica in range(2):
                assert client.why_unready() is None
                cluster.router.board.handle(Drain(replica, False))
                await asyncio.sleep(0.3)
            await until(lambda: client.why_unready() == "no replica takes requests")
            cluster.router.board.members.frontends[0].link.abort()
            await until(lambda: "no replica" in str(client.why_unready()))  # linked again
            await client.close()

    asyncio.run(run())


def test_the_supervisor_keeps_what_the_registry_has(tmp_path: Path) -> None:
    async def run() -> None:
        async with Cluster(tmp_path) as cluster:
            assert (await cluster.hear(messages.Revisions)).is_whole
            loading = asyncio.ensure_future(
                cluster.router.board.registry.load("a", "/nothing", replaces=False)
            )
            told = await cluster.hear(messages.Revisions)
            assert [(each.name, each.state) for each in told.listings] == [("a", "loading")]
            loading.cancel()

    asyncio.run(run())
