"""Clusters of real processes over real HTTP: whatever dies, clients see what a single server says."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.cluster.process import Answer, Cluster, ask_all, long_bodies, mixed_bodies, send
from tests.cluster.replays import replay_all
from tests.cluster.rounding import assert_equal, assert_undisturbed
from tests.e2e.process import TIMEOUT_S, Server, events, wait_until

LEASE_S = 3.0
MIXED = mixed_bodies(60)
LONG = long_bodies(16, 300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    args = (
        "--replicas",
        "2",
        "--lease",
        str(LEASE_S),
        "--frontends",
        "2",
        "--journal",
        str(folder / "journal"),
    )
    with Cluster(*args, folder=folder) as started:
        started.wait_ready()
        started.wait_replicas(2)
        yield started


@pytest.fixture(scope="module")
def single() -> Iterator[dict[str, list[Answer]]]:
    """What a single server answers."""
    from tests.cluster.process import ADAPTERS

    args = (
        "--adapter-dir",
        str(ADAPTERS),
        "--max-adapter-rank",
        "64",
        "--device-pool",
        "48MiB",
        "--host-pool",
    )
    with Server(*args, "16MiB") as server:
        server.wait_ready()
        yield {"mixed": ask_all(server.url, MIXED), "long": ask_all(server.url, LONG)}


def test_answers_are_a_single_servers(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    assert_equal(single["mixed"], ask_all(cluster.url, MIXED))
    assert_equal(single["long"], ask_all(cluster.url, LONG))


def test_a_replica_dies_under_open_streams(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    before = {each["id"]: each["epoch"] for each in cluster.wait_replicas(2)}
    killed: list[int] = []

    def kill() -> None:
        killed.append(cluster.kill_busiest()["id"])

    assert_undisturbed(cluster, single["long"], kill, "lost", lambda: cluster.wait_replicas(2))
    after = {each["id"]: each["epoch"] for each in cluster.wait_replicas(2)}
    assert after.keys() == before.keys()
    assert all(after[replica] > before[replica] for replica in killed)


def test_a_stopped_replica_is_fenced(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    """Its requests go on elsewhere; what it would say later is never heard, since it is killed as it stands."""
    cluster.wait_replicas(2)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(cluster.busiest()["pid"])
        send(stopped[0], signal.SIGSTOP)

    found = ask_all(cluster.url, LONG, stop)
    assert_equal(single["long"], found)
    cluster.wait_gone(stopped, TIMEOUT_S)
    cluster.wait_replicas(2)


def test_the_router_dies_under_open_streams(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    cluster.wait_replicas(2)
    before = cluster.status()["router"]

    def kill() -> None:
        cluster.busiest()
        send(before["pid"], signal.SIGKILL)

    assert_equal(single["long"], ask_all(cluster.url, LONG, kill))
    # Requests that come while there is none wait for the next.
    send(cluster.status()["router"]["pid"], signal.SIGKILL)
    assert_equal(single["mixed"][:8], ask_all(cluster.url, MIXED[:8]))
    after = cluster.status()["router"]
    assert after["epoch"] >= before["epoch"] + 2
    cluster.wait_replicas(2)


def test_a_client_that_leaves_frees_its_request(cluster: Cluster) -> None:
    body = {**LONG[0], "max_tokens": 900, "n": 1}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        next(events(response))
    cluster.wait_idle()


def test_a_front_end_dies(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    """Its streams end with it; replicas drop them, and the other front end's go on."""
    first = cluster.status()["frontends"][0]
    send(first["pid"], signal.SIGKILL)

    def is_replaced() -> bool:
        states = {each["pid"]: each["state"] for each in cluster.status()["frontends"]}
        return first["pid"] not in states and list(states.values()) == ["running", "running"]

    wait_until(is_replaced, "another front end")
    assert_equal(single["mixed"][:8], ask_all(cluster.url, MIXED[:8]))
    cluster.wait_idle()


def test_metrics_have_every_replica(cluster: Cluster) -> None:
    cluster.wait_replicas(2)
    metrics: dict[str, float] = {}

    def has_loaded(replica: str) -> bool:
        # For routers of others: which adapters are there, in use or not.
        loaded = [name for name in metrics if name.startswith("vllm:lora_adapter_loaded{adapter_name=")]
        return any('level="gpu"' in name and f'replica="{replica}"' in name for name in loaded)

    def have_both_loaded() -> bool:
        metrics.update(cluster.metrics())
        if not all(map(has_loaded, ("0", "1"))):
            ask_all(cluster.url, MIXED[:16])  # one may have served nothing yet
            return False
        return True

    wait_until(have_both_loaded, "adapters on both replicas")
    for replica in ("0", "1"):
        assert metrics[f'manylora:replica_state{{replica="{replica}",state="running"}}'] == 1
        assert f'vllm:num_requests_running{{model_name="demo",replica="{replica}"}}' in metrics
        assert f'vllm:num_gpu_loaded_lora_adapters{{model_name="demo",replica="{replica}"}}' in metrics
    for name in (
        "stale_tokens_total",
        "recomputed_tokens_total",
        "scale_hint",
        "router_decision_seconds_count",
    ):
        assert f"manylora:{name}" in metrics


def test_its_end_is_in_order(cluster: Cluster) -> None:
    """The last of this file: all processes go, and what journals hold replays."""
    cluster.wait_replicas(2)
    pids = cluster.pids()
    assert len(pids) == 6
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    cluster.wait_gone(pids, TIMEOUT_S)
    assert not (cluster.folder / "cluster" / "admin.sock").exists()
    replayed = replay_all(cluster.folder)
    assert {path.name for path in replayed} >= {"journal.router", "journal.r0.e1", "journal.r1.e1"}
    assert sum(replayed.values()) > 1000
