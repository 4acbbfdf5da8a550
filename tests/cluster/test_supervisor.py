"""The supervisor dies and is started again: nothing hangs, nothing is left, and the next one serves as before."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.process import ADAPTERS, NAMES, Cluster, ask_all, asking, long_bodies, mixed_bodies, send
from tests.cluster.ray_node import ray_folders
from tests.cluster.rounding import assert_equal
from tests.e2e.process import completion, free_port, is_running, post, wait_until

MIXED = mixed_bodies(8)
LONG = long_bodies(8, 600)
RAY = ("--launcher", "ray", "--ray-address", "local")


@pytest.mark.parametrize("launcher", [(), pytest.param(RAY, marks=pytest.mark.long)], ids=["local", "ray"])
def test_the_supervisor_dies_and_comes_back(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    port = free_port()
    args = ("--replicas", "2", "--port", str(port), "--cluster-port", str(port + 1), *launcher)
    with Cluster(*args, folder=tmp_path) as first:
        first.wait_ready()
        first.wait_replicas(2)
        assert first.load("late", ADAPTERS / NAMES[0]).status_code == 200
        before = ask_all(first.url, MIXED)
        old = psutil.Process(first.process.pid).children(recursive=True)
        folders = {folder for each in old for folder in ray_folders(each.pid)}

        async def die() -> None:
            """Each stream ends: as it should, or with its connection, or with an error."""
            async with asking(first.url, LONG, {}) as tasks:
                await asyncio.to_thread(first.busiest)
                first.process.send_signal(signal.SIGKILL)
                await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60.0)

        asyncio.run(die())
        first.process.wait()
        # At once, and at the same ports: what is left of the first ends by itself.
        with Cluster(*args, folder=tmp_path) as second:
            second.wait_ready()
            second.wait_replicas(2)
            assert_equal(before, ask_all(second.url, MIXED))
            served = {each["id"] for each in second.http.get("/v1/models").json()["data"]}
            assert {"late", *NAMES} <= served
            wait_until(lambda: not any(is_running(each.pid) for each in old), "the end of what was left")
            assert not any(Path(folder).exists() for folder in folders)
            second.process.send_signal(signal.SIGTERM)
            assert second.wait_exit() == 0


def test_what_is_stopped_or_swept_away(tmp_path: Path) -> None:
    """One cluster: its front end stops; its folder and its adapters' vanish, and its router dies; then its
    supervisor, while others stand still."""
    root, folder = tmp_path / "adapters", tmp_path / "cluster"
    shutil.copytree(ADAPTERS, root)
    args = ("--replicas", "1", "--adapter-dir", str(root))
    with Cluster(*args, folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(1)
        assert cluster.load("late", root / NAMES[0]).status_code == 200
        expected = {name: cluster.text(model=name) for name in ("demo", "late", NAMES[1])}

        send(cluster.status()["frontends"][0]["pid"], signal.SIGSTOP)
        assert post(f"{cluster.url}/v1/completions", json=completion()).status_code == 200

        secret = (folder / "secret").read_text()
        root.rename(tmp_path / "away")
        shutil.rmtree(folder)
        send(cluster.status()["router"]["pid"], signal.SIGKILL)
        assert {name: cluster.text(model=name) for name in expected} == expected
        wait_until(lambda: (folder / "admin.sock").exists(), "the folder")
        assert "replica 0" in cluster.manage("status")
        assert (folder / "secret").read_text() == secret
        shutil.rmtree(folder)
        wait_until(lambda: (folder / "admin.sock").exists(), "the folder again")

        found = cluster.status()
        pids = cluster.pids()
        for each in (*found["replicas"], *found["frontends"], found["router"]):
            send(each["pid"], signal.SIGSTOP)
        send(cluster.process.pid, signal.SIGKILL)
        cluster.wait_gone(pids, 60.0)
