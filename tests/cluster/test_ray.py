"""Replicas as actors of Ray: what clients see is what they see of the local launcher, and nothing is left."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.process import ADAPTERS, Answer, Cluster, ask_all, long_bodies, mixed_bodies
from tests.cluster.ray_node import ray_folders
from tests.cluster.rounding import assert_equal, assert_undisturbed
from tests.e2e.process import Server, is_running, shared_files, wait_until

MIXED = mixed_bodies(20)
LONG = long_bodies(12, 300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    args = ("--replicas", "2", "--launcher", "ray", "--ray-address", "local", "--router", "round-robin")
    with Cluster(*args, folder=folder) as started:
        started.wait_ready()
        started.wait_replicas(2)
        yield started


@pytest.fixture(scope="module")
def single() -> Iterator[dict[str, list[Answer]]]:
    """What a single server answers."""
    args = ("--max-adapter-rank", "64", "--device-pool", "48MiB", "--host-pool", "16MiB")
    with Server("--adapter-dir", str(ADAPTERS), *args) as server:
        server.wait_ready()
        yield {"mixed": ask_all(server.url, MIXED), "long": ask_all(server.url, LONG)}


def test_answers_are_a_single_servers(single: dict[str, list[Answer]], cluster: Cluster) -> None:
    assert_equal(single["mixed"], ask_all(cluster.url, MIXED))
    assert cluster.status()["supervisor"]["launcher"] == "ray"


def test_every_listener_is_on_the_loopback(cluster: Cluster) -> None:
    listening = []
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # Ray ends some by itself
            found = process.net_connections("tcp")
            listening += [each.laddr.ip for each in found if each.status == "LISTEN"]
    assert len(listening) > 8
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_an_actor_dies_under_open_streams(single: dict[str, list[Answer]], cluster: Cluster) -> None:
    before = sum(each["epoch"] for each in cluster.replicas())

    def kill() -> None:
        cluster.kill_busiest()

    assert_undisturbed(cluster, single["long"], kill, "lost", lambda: cluster.wait_replicas(2))
    assert sum(each["epoch"] for each in cluster.wait_replicas(2)) > before


def test_nothing_is_left(cluster: Cluster) -> None:
    """The last of this file."""
    pids = [each.pid for each in psutil.Process(cluster.process.pid).children(recursive=True)]
    folders = {Path(folder) for pid in pids for folder in ray_folders(pid)}
    assert len(folders) == 1
    shared = shared_files(pids)
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    wait_until(lambda: not any(map(is_running, pids)), f"the end of {pids}\n{cluster.log}")
    assert not folders.pop().exists()
    assert not [path for path in shared if path.exists()]
