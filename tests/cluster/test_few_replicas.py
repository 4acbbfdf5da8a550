"""Too few replicas: the only one dies, comes back or does not; and their number, which follows the load."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.cluster.command import ask
from tests.cluster.process import Answer, Cluster, long_bodies, mixed_bodies, send
from tests.cluster.replays import replay_all
from tests.cluster.rounding import assert_equal, assert_undisturbed
from tests.e2e.process import MODEL, assert_error, wait_until

LONG = long_bodies(8, 300)
LONGER = long_bodies(8, 900)
"""None has ended before something is done to all of them."""
MIXED = mixed_bodies(8)
QUEUE_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's, where it can be taken away."""
    folder = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    args = ("--replicas", "1", "--queue-timeout", str(QUEUE_TIMEOUT_S), "--journal", str(folder / "journal"))
    with Cluster(*args, folder=folder, model=str(model)) as started:
        started.wait_ready()
        started.wait_replicas(1)
        yield started


@pytest.mark.long
def test_the_only_replica_dies_and_comes_back(tmp_path: Path) -> None:
    """As long as nothing runs, requests wait: with the usual time limit a start takes less."""
    with Cluster("--replicas", "1", folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(1)
        before = cluster.ask_all(LONG)
        for _ in range(2):
            after = cluster.ask_all(LONG, cluster.kill_busiest)
            assert_equal(before, after)
            cluster.wait_replicas(1)


def test_the_only_replica_dies_and_stays_away(cluster: Cluster, model: Path) -> None:
    """Streams end with an error, requests with 503, nothing hangs; then it comes back, and serves."""
    before = cluster.ask_all(MIXED)
    away = model.with_name("away")
    dead: list[int] = []

    def kill() -> None:
        os.rename(model, away)
        dead.append(cluster.busiest()["pid"])
        send(dead[0], signal.SIGKILL)

    began_s = time.monotonic()
    found = cluster.ask_all(LONGER, kill)
    assert all(answer.error["code"] == 503 for answer in found), found
    assert all("no replica" in answer.error["message"] for answer in found)
    assert_error(cluster.complete(), 503, "no replica")
    assert time.monotonic() - began_s < 35.0
    wait_until(
        lambda: "starting" in states(cluster) or "waiting" in states(cluster), "a replica that is away"
    )
    assert cluster.status()["router"]["waiting"] == 0
    os.rename(away, model)
    cluster.wait_replicas(1)
    assert_equal(before, cluster.ask_all(MIXED))


def test_journals_replay(cluster: Cluster) -> None:
    """The last that uses this cluster."""
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    assert sum(replay_all(cluster.folder).values()) > 100


def states(cluster: Cluster) -> list[str]:
    return [each["state"] for each in cluster.replicas()]


@pytest.mark.long
@pytest.mark.parametrize("autoscale", ["on", "hint"])
def test_the_number_of_replicas_follows_the_load(autoscale: str, tmp_path: Path) -> None:
    args = ("--replicas", "1", "--max-replicas", "2", "--autoscale", autoscale, "--max-num-seqs", "4")
    bodies = [{**body, "n": 1, "max_tokens": 900} for body in long_bodies(16)]
    with Cluster(*args, folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(1)

        def has_grown() -> bool:
            if autoscale == "on":
                return [each["state"] for each in cluster.replicas()] == ["running"] * 2
            return bool(cluster.metrics()["manylora:scale_hint"] == 1)

        found: list[Answer] = []
        while not found or not has_grown():  # a fast machine needs more than these for a hint
            wave = cluster.ask_all(bodies)
            assert not any(answer.error for answer in wave)
            assert_equal(found, wave[: len(found)])
            found = wave[:4]
        if autoscale == "on":
            cluster.wait_replicas(1)
        else:
            assert len(cluster.replicas()) == 1
        assert_equal(found, cluster.ask_all(bodies[:4]))
        wait_until(lambda: cluster.status()["scale_hint"]["delta"] <= 0, "no hint to grow")


@pytest.mark.long
def test_handing_over_without_waiting(tmp_path: Path) -> None:
    """Punica's way: the next replica begins at once, what the last one still says is dropped."""
    args = ("--replicas", "2", "--router", "punica")
    with Cluster(*args, folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(2)
        before = cluster.ask_all(LONG)

        def move() -> None:
            # By the socket itself: a command's process may come when the streams have ended.
            question = {"do": "drain", "replica": cluster.busiest()["id"], "migrate": True}
            (said,) = ask(tmp_path / "cluster", question)
            assert "is empty" in said

        def again() -> None:
            cluster.manage("restart")
            cluster.wait_replicas(2)

        assert_undisturbed(cluster, before, move, "drain", again)
