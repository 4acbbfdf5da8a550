"""Replicas of several ranks each: what clients see is what a single server of one rank says, whatever is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.process import ADAPTERS, Answer, Cluster, ask_all, long_bodies, mixed_bodies, send
from tests.cluster.rounding import assert_equal, assert_undisturbed
from tests.e2e.process import TIMEOUT_S, Server
from tests.e2e.test_ranks import ranks_of

MIXED = mixed_bodies(12)
LONG = long_bodies(6)
RANKS = ("--replicas", "2", "--tensor-parallel-size", "2", "--device", "cpu", "--lease", "3")


@pytest.fixture(scope="module")
def single() -> dict[str, list[Answer]]:
    args = ("--max-adapter-rank", "64", "--device-pool", "48MiB", "--host-pool", "16MiB", "--device", "cpu")
    with Server("--adapter-dir", str(ADAPTERS), *args) as server:
        server.wait_ready()
        return {"mixed": ask_all(server.url, MIXED), "long": ask_all(server.url, LONG)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(*RANKS, folder=folder) as started:
        started.wait_ready()
        started.wait_replicas(2)
        yield started


def ranks_of_all(cluster: Cluster) -> dict[int, list[int]]:
    """By replica."""
    return {each["id"]: ranks_of(each["pid"]) for each in cluster.replicas()}


def test_answers_are_a_single_servers(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    assert_equal(single["mixed"], cluster.ask_all(MIXED))
    assert_equal(single["long"], cluster.ask_all(LONG))
    assert [len(ranks) for ranks in ranks_of_all(cluster).values()] == [2, 2]


def test_metrics_have_every_rank_of_every_replica(cluster: Cluster) -> None:
    found = cluster.metrics()
    for replica in ("0", "1"):
        for rank in ("0", "1"):
            labels = f'rank="{rank}",replica="{replica}"'
            assert found[f'manylora:collectives_total{{kind="base",{labels}}}'] > 0
            assert found[f"manylora:rank_weight_bytes{{{labels}}}"] > 0
            assert found[f'manylora:rank_pool_bytes{{{labels},tier="device"}}'] == 24 * 2**20


def test_a_rank_dies_under_open_streams(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    """Its replica dies of it, with the other rank; its requests go on elsewhere, and another takes its place."""
    before = {each["id"]: each["epoch"] for each in cluster.wait_replicas(2)}
    lost: list[int] = []
    killed: list[int] = []

    def kill() -> None:
        victim = cluster.busiest()
        killed.append(victim["id"])
        ranks = ranks_of(victim["pid"])
        assert len(ranks) == 2
        lost.extend([victim["pid"], *ranks])
        send(ranks[1], signal.SIGKILL)

    assert_undisturbed(cluster, single["long"], kill, "lost", lambda: cluster.wait_replicas(2))
    cluster.wait_gone(lost, TIMEOUT_S)
    after = {each["id"]: each["epoch"] for each in cluster.wait_replicas(2)}
    assert after.keys() == before.keys()
    assert all(after[replica] > before[replica] for replica in killed)
    assert [len(ranks) for ranks in ranks_of_all(cluster).values()] == [2, 2]


@pytest.mark.long
def test_a_replica_is_fenced_with_its_ranks(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(cluster.busiest()["pid"])
        stopped.extend(ranks_of(stopped[0]))
        send(stopped[0], signal.SIGSTOP)

    assert_equal(single["long"], cluster.ask_all(LONG, stop))
    cluster.wait_gone(stopped, TIMEOUT_S)
    cluster.wait_replicas(2)


def test_no_rank_is_left(cluster: Cluster) -> None:
    """Of a replica that is stopped, as are its ranks, which cannot end by themselves; then of all. The last that
    uses this cluster."""
    replica, *others = [[each["pid"], *ranks_of(each["pid"])] for each in cluster.replicas()]
    for pid in replica:
        send(pid, signal.SIGSTOP)
    cluster.wait_gone(replica, TIMEOUT_S)
    pids = [*cluster.pids(), *others[0]]
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    cluster.wait_gone(pids, TIMEOUT_S)


@pytest.mark.long
def test_no_rank_outlives_the_supervisor(tmp_path: Path) -> None:
    with Cluster(*RANKS, folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(2)
        pids = [*cluster.pids(), *(rank for ranks in ranks_of_all(cluster).values() for rank in ranks)]
        cluster.process.send_signal(signal.SIGKILL)
        cluster.process.wait()
        cluster.wait_gone(pids, TIMEOUT_S)


@pytest.mark.long
def test_replicas_on_ray(tmp_path: Path, single: dict[str, list[Answer]]) -> None:
    """An actor that is killed takes its ranks with it; so does the end of all."""
    with Cluster(*RANKS, "--launcher", "ray", "--ray-address", "local", folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(2)
        before = ranks_of_all(cluster)
        assert [len(ranks) for ranks in before.values()] == [2, 2]
        killed: list[int] = []

        def kill() -> None:
            killed.append(cluster.kill_busiest()["id"])

        assert_undisturbed(cluster, single["long"], kill, "lost", lambda: cluster.wait_replicas(2))
        cluster.wait_gone([rank for replica in killed for rank in before.get(replica, [])], TIMEOUT_S)
        cluster.wait_replicas(2)
        after = [rank for ranks in ranks_of_all(cluster).values() for rank in ranks]
        assert len(after) == 4
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.wait_exit() == 0
        cluster.wait_gone(after, TIMEOUT_S)
