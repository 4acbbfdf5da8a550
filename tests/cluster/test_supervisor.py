"""The supervisor dies and is started again: nothing hangs, nothing is left, and the next one serves as before."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.process import ADAPTERS, NAMES, Cluster, ask_all, asking, long_bodies, mixed_bodies
from tests.cluster.ray_node import ray_folders
from tests.cluster.rounding import assert_equal
from tests.e2e.process import free_port, is_running, wait_until

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
