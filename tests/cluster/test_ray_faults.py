"""Two nodes of Ray, and what their ends do to clients: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.process import Answer, Cluster, ask_all, long_bodies, send
from tests.cluster.ray_node import RAY, RayNode
from tests.cluster.rounding import assert_equal
from tests.e2e.process import MODEL, TIMEOUT_S, command, environment

pytestmark = pytest.mark.long
LONG = [{**body, "temperature": 0.0} for body in long_bodies(12, 400)]
"""Greedy: of so many draws some lie at a boundary, where rounding decides."""
LEASE_S = 4.0


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder:  # Ray's sockets want a short path
        yield Path(folder)


@pytest.fixture
def head(root: Path) -> Iterator[RayNode]:
    with RayNode(root) as node:
        yield node


def start(head: RayNode, folder: Path, *args: str) -> Cluster:
    cluster = Cluster(
        "--replicas", "2", "--launcher", "ray", "--ray-address", head.address, "--lease", str(LEASE_S),
        "--router", "round-robin", *args,
        folder=folder, env=RAY,
    )  # fmt: skip
    cluster.wait_ready()
    cluster.wait_replicas(2)
    return cluster


def replicas_of(cluster: Cluster, node: RayNode) -> list[int]:
    return [each["pid"] for each in cluster.replicas() if each["pid"] in node.pids()]


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:  # it has ended
        return {}


def undisturbed(cluster: Cluster) -> list[Answer]:
    return ask_all(cluster.url, LONG)


def test_a_node_is_killed(root: Path, head: RayNode, tmp_path: Path) -> None:
    """Replicas are spread over both nodes; all of the second one ends at once."""
    with RayNode(root, head) as second, start(head, tmp_path) as cluster:
        assert len(replicas_of(cluster, head)) == len(replicas_of(cluster, second)) == 1
        before = undisturbed(cluster)

        def kill() -> None:
            cluster.busiest()
            second.kill()

        found = ask_all(cluster.url, LONG, kill)
        assert_equal(before, found)
        assert cluster.moved("lost") > 0
        cluster.wait_replicas(2)
        assert len(replicas_of(cluster, head)) == 2


def test_a_node_is_stopped_and_goes_on(root: Path, head: RayNode, tmp_path: Path) -> None:
    """What the stopped node would say later is never heard: its replica's epoch is over."""
    with RayNode(root, head) as second, start(head, tmp_path) as cluster:
        before = undisturbed(cluster)
        (zombie,) = replicas_of(cluster, second)

        def stop() -> None:
            cluster.busiest()
            for pid in second.pids():
                send(pid, signal.SIGSTOP)

        assert_equal(before, ask_all(cluster.url, LONG, stop))
        for pid in second.pids():
            send(pid, signal.SIGCONT)
        cluster.wait_gone([zombie], 10.0)
        cluster.wait_replicas(2)
        assert_equal(before, undisturbed(cluster))


def test_the_head_is_killed(root: Path, head: RayNode, tmp_path: Path) -> None:
    """That is the end of all replicas, on other nodes too; requests wait for replicas of the next head."""
    with (
        contextlib.ExitStack() as heads,
        RayNode(root, head),
        start(head, tmp_path, "--queue-timeout", "100") as cluster,
    ):
        before = undisturbed(cluster)
        lost = [each["pid"] for each in cluster.replicas()]

        def kill() -> None:
            cluster.busiest()
            head.kill()
            heads.enter_context(RayNode(root, port=int(head.address.rpartition(":")[2])))

        assert_equal(before, ask_all(cluster.url, LONG, kill))
        assert cluster.moved("lost") > 0
        cluster.wait_gone(lost, TIMEOUT_S)
        cluster.wait_replicas(2)
        assert_equal(before, undisturbed(cluster))


def test_the_end_without_a_head(root: Path, head: RayNode, tmp_path: Path) -> None:
    """The end of a cluster is in order where Ray's head is lost, and leaves nothing."""
    with RayNode(root, head) as second, start(head, tmp_path) as cluster:
        (left,) = replicas_of(cluster, second)
        pids = cluster.pids()
        head.kill()
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.wait_exit() == 0
        cluster.wait_gone([*pids, left], TIMEOUT_S)


def test_what_speaks_to_ray_dies(head: RayNode, tmp_path: Path) -> None:
    """That is the end of its replicas: others take their places, and their requests go on there."""
    with start(head, tmp_path) as cluster:
        before = undisturbed(cluster)
        pids = [each["pid"] for each in cluster.replicas()]
        (driver,) = (
            each
            for each in psutil.Process(cluster.process.pid).children()
            if "RAY_DEDUP_LOGS" in environment_of(each)
        )

        def kill() -> None:
            cluster.busiest()
            driver.kill()

        assert_equal(before, ask_all(cluster.url, LONG, kill))
        assert cluster.moved("lost") > 0
        cluster.wait_gone(pids, TIMEOUT_S)
        cluster.wait_replicas(2)


def test_models_that_differ(root: Path, tmp_path: Path) -> None:
    """The second node has another model under the same name."""
    os.symlink(MODEL, tmp_path / "model")
    other = tmp_path / "other"
    (other / "model").mkdir(parents=True)
    for path in Path(MODEL).iterdir():
        os.symlink(path, other / "model" / path.name)
    (other / "model" / "generation_config.json").unlink(missing_ok=True)
    (other / "model" / "generation_config.json").write_text('{"eos_token_id": 1}')
    with RayNode(root, HOME=str(tmp_path)) as head, RayNode(root, head, HOME=str(other)):
        result = subprocess.run(
            command("serve", "~/model", "--port", "0", "--replicas", "2", "--launcher", "ray", "--ray-address",
                    head.address, "--cluster-dir", str(tmp_path / "cluster")),
            env=environment(**RAY, HOME=str(tmp_path)), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert "is another one: its files differ" in line
