"""Replicas that cannot have an adapter which is listed: others serve it, and they do as soon as they can."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.link import Hello, Link, bind, credentials_of, dial
from manylora.cluster.members import status_of
from manylora.cluster.registry import AdapterLog
from manylora.cluster.switchboard import Switchboard
from manylora.config.cluster import ClusterOptions
from manylora.config.sections import HttpSettings
from manylora.flags import build_settings
from manylora.protocol.routing import Asked, ReplicaFacts, StepPlane
from manylora.types import AdapterCard, RequestError
from tests.cluster.process import ADAPTERS, Cluster, ask_all, mixed_bodies, send
from tests.cluster.replays import replay_all
from tests.cluster.rounding import assert_equal
from tests.e2e.process import BASE, MODEL, wait_until

EXTRA, UNLOADED = "extra", "unloaded"
OF_EXTRA = [{**body, "model": EXTRA} for body in mixed_bodies(10)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "adapters").mkdir()
    places = ("--adapter-dir", str(folder / "adapters"), "--journal", str(folder / "journal"))
    args = ("--replicas", "2", "--queue-timeout", "2", "--lease", "20", *places)
    with Cluster(*args, folder=folder) as started:
        started.wait_ready()
        started.wait_replicas(2)
        yield started


def lacking(cluster: Cluster) -> dict[int, list[str]]:
    return {each["id"]: each["adapters_lacking"] for each in cluster.replicas() if each["adapters_lacking"]}


def test_others_serve_what_a_replica_lacks(cluster: Cluster) -> None:
    source, away = cluster.folder / "adapters" / "files", cluster.folder / "away"
    shutil.copytree(sorted(ADAPTERS.iterdir())[0], source)
    for name in (EXTRA, UNLOADED):
        assert cluster.load(name, source).status_code == 200
    before = ask_all(cluster.url, OF_EXTRA)
    assert not lacking(cluster)
    source.rename(away)
    first, second = cluster.replicas()
    send(second["pid"], signal.SIGKILL)
    wait_until(lambda: cluster.replicas()[1]["epoch"] > second["epoch"], "the next replica")
    cluster.wait_replicas(2)
    assert lacking(cluster) == {second["id"]: [EXTRA, UNLOADED]}
    assert f"without {EXTRA}, {UNLOADED}" in cluster.manage("status")
    assert f"replica {second['id']} is without adapter {EXTRA!r}" in cluster.log
    assert_equal(before, ask_all(cluster.url, OF_EXTRA))
    assert cluster.unload(UNLOADED).status_code == 200
    assert lacking(cluster) == {second["id"]: [EXTRA]}
    assert cluster.complete(model=UNLOADED).status_code == 404

    cluster.manage("drain", str(first["id"]))
    answer = cluster.complete(model=EXTRA)
    assert answer.status_code == 503
    assert "has its adapter" in answer.json()["error"]["message"]
    assert cluster.complete(model=BASE).status_code == 200
    away.rename(source)
    wait_until(lambda: not lacking(cluster), f"the adapter\n{cluster.log}", 90.0)
    assert_equal(before, ask_all(cluster.url, OF_EXTRA))  # by the second one alone


def test_journals_replay(cluster: Cluster) -> None:
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    found = replay_all(cluster.folder)
    assert any(path.name == "journal.router" and events > 50 for path, events in found.items())
    assert '"Lacks"' in (cluster.folder / "journal.router").read_text()


# ---------------------------------------------------------------- adapters that none has served before

FACTS = ReplicaFacts(1000, 16, 1024, 8, (StepPlane(0.01),), 1e-4, 1e-4, 1e-3)
SECRET = b"s" * 32


class Router:
    """A router's process but for its end, with links that say what is to be said over them. A context."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        sock = bind()
        settings = build_settings({"model": MODEL})[0]
        self.launch = children.Launch(
            messages.ROUTER, 0, 1, settings, HttpSettings(), ClusterOptions(replicas=2), str(folder), SECRET,
            sock.getsockname(), "model", descriptor=os.dup(sock.fileno()),
        )  # fmt: skip
        sock.close()
        self.log = AdapterLog(folder / "registry.sqlite")
        self.board = Switchboard(self.launch, self.log, [(name, f"/{name}") for name in names])

    async def link(self, role: str, number: int, told: Any, epoch: int = 1) -> Link:
        hello = Hello(role, number, epoch, 0, VERSION, "model")
        return await dial(
            self.launch.router,
            credentials_of(SECRET, None, "127.0.0.1"),
            hello,
            told,
        )

    async def begin(self) -> None:
        await self.board.start()
        supervisor = await self.link(messages.SUPERVISOR, 0, messages.ToSupervisorFromRouter)
        slots = [messages.Slot(number, 1, 0, "starting") for number in range(2)]
        supervisor.send(messages.ProcessTable(slots, {}, 0, "local"))
        await until(lambda: self.board.table.slots)

    async def replica(self, number: int, lacks: set[str], epoch: int = 1) -> Link:
        """One that is up, without these adapters."""
        link = await self.link(messages.REPLICA, number, messages.ToReplicaFromRouter, epoch)
        link.send(messages.Up(FACTS, "127.0.0.1", 1))
        left = len(self.log.current)
        while left:
            message = await link.receive()
            if isinstance(message, messages.AddAdapter):
                left -= 1
                link.send(answer(message.listing, message.listing.name in lacks))
        await until(lambda: number in self.board.router.fleet.up)
        return link

    def names(self) -> list[str]:
        return sorted(each.name for each in self.log.current.values())


def answer(listing: messages.Listing, is_lacking: bool) -> messages.AdapterReady:
    if is_lacking:
        return messages.AdapterReady(listing.id, None, RequestError(404, "no such files"))
    return messages.AdapterReady(listing.id, AdapterCard(listing.name, listing.path, listing.id, 8, 4, 0))


async def until(is_so: Any) -> None:
    async with asyncio.timeout(30.0):
        while not is_so():
            await asyncio.sleep(0.005)


def lacks_of(router: Router) -> dict[int, list[str]]:
    return {
        each["id"]: each["adapters_lacking"]
        for each in status_of(router.board)["replicas"]
        if each["adapters_lacking"]
    }


def test_an_adapter_of_the_start_that_only_a_later_replica_has(tmp_path: Path) -> None:
    async def run() -> None:
        router = Router(tmp_path, ["both", "late", "none"])
        await router.begin()
        first = await router.replica(0, {"late", "none"})
        frontend = await router.link(messages.FRONTEND, 0, messages.ToFrontendFromRouter)
        told = await frontend.receive()
        assert isinstance(told, messages.Revisions)
        assert {each.name: each.rank for each in told.listings} == {"both": 8, "late": 0, "none": 0}
        second = await router.replica(1, {"none"})
        # What none of them has is given up; the first one is still to get the other.
        assert router.names() == ["both", "late"]
        assert lacks_of(router) == {0: ["late"]}
        (late,) = [each for each in router.log.current.values() if each.name == "late"]
        assert late.rank == 8
        frontend.send(messages.Note(asked=[Asked(f"r{number}", late.id, 10, 10) for number in range(4)]))
        await until(lambda: len(router.board.router.requests) == 4)
        assert len(router.board.router.fleet.up[1].requests) == 4
        # It is asked again, says no, is asked once more, and has it.
        for is_lacking in (True, False):
            async with asyncio.timeout(30.0):
                while not isinstance(message := await first.receive(), messages.AddAdapter):
                    pass
            assert message.listing.name == "late"
            first.send(answer(late, is_lacking))
        await until(lambda: not lacks_of(router))
        assert router.board.router.fleet.lacking(late.id) == frozenset()
        for link in (first, second, frontend):
            link.abort()
        router.board.close()

    asyncio.run(run())


def test_what_no_replica_has_is_skipped(tmp_path: Path) -> None:
    async def run() -> None:
        router = Router(tmp_path, ["both", "none"])
        await router.begin()
        links = [await router.replica(number, {"none"}) for number in (1, 0)]
        assert router.names() == ["both"]
        assert lacks_of(router) == {}
        for link in links:
            link.abort()
        router.board.close()

    asyncio.run(run())
