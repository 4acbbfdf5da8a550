"""Replicas as actors of Ray: what clients see is what they see of the local launcher, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.process import (
    ADAPTERS,
    Answer,
    Cluster,
    ask_all,
    assert_equal,
    long_bodies,
    mixed_bodies,
    send,
)
from tests.e2e.process import Server, is_running, wait_until

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
        listening += [each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"]
    assert len(listening) > 8
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_an_actor_dies_under_open_streams(single: dict[str, list[Answer]], cluster: Cluster) -> None:
    found = ask_all(cluster.url, LONG, lambda: send(cluster.busiest()["pid"], signal.SIGKILL))
    assert_equal(single["long"], found)
    assert cluster.status()["router"]["moved"]["lost"] > 0
    assert sorted(each["epoch"] for each in cluster.wait_replicas(2)) == [1, 2]


def test_nothing_is_left(cluster: Cluster) -> None:
    """The last of this file."""
    pids = [each.pid for each in psutil.Process(cluster.process.pid).children(recursive=True)]
    folders = {Path(folder) for pid in pids for folder in _ray_folders(pid)}
    assert len(folders) == 1
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    wait_until(lambda: not any(map(is_running, pids)), f"the end of {pids}\n{cluster.log}", 10.0)
    assert not folders.pop().exists()
    assert not [name for name in os.listdir("/dev/shm") if "plasma" in name or "ray" in name]


def _ray_folders(pid: int) -> list[str]:
    found = psutil.Process(pid).environ().get("RAY_TMPDIR")
    return [found] if found else []
