"""Clusters of real processes over real HTTP: whatever dies, clients see what a single server says."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.cluster.process import Answer, Cluster, ask_all, assert_equal, long_bodies, mixed_bodies, send
from tests.cluster.replays import replay_all
from tests.e2e.process import Server, events

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
    cluster.wait_replicas(2)
    found = ask_all(cluster.url, LONG, lambda: send(cluster.busiest()["pid"], signal.SIGKILL))
    assert_equal(single["long"], found)
    assert cluster.status()["router"]["moved"]["lost"] > 0
    epochs = {each["id"]: each["epoch"] for each in cluster.wait_replicas(2)}
    assert sorted(epochs.values()) == [1, 2]


def test_a_stopped_replica_is_fenced(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    """Its requests go on elsewhere; what it would say later is never heard, since it is killed as it stands."""
    cluster.wait_replicas(2)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(cluster.busiest()["pid"])
        send(stopped[0], signal.SIGSTOP)

    found = ask_all(cluster.url, LONG, stop)
    assert_equal(single["long"], found)
    cluster.wait_gone(stopped, 10.0)
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
    assert after["epoch"] == before["epoch"] + 2
    assert [each["state"] for each in cluster.replicas()] == ["running", "running"]


def test_a_client_that_leaves_frees_its_request(cluster: Cluster) -> None:
    body = {**LONG[0], "max_tokens": 900, "n": 1}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        next(events(response))
    until_s = time.monotonic() + 30.0
    while any(each["requests"] or each["running"] for each in cluster.replicas()):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_front_end_dies(cluster: Cluster, single: dict[str, list[Answer]]) -> None:
    """Its streams end with it; replicas drop them, and the other front end's go on."""
    first = cluster.status()["frontends"][0]
    send(first["pid"], signal.SIGKILL)
    until_s = time.monotonic() + 30.0
    while True:
        states = {each["pid"]: each["state"] for each in cluster.status()["frontends"]}
        if first["pid"] not in states and list(states.values()) == ["running", "running"]:
            break
        assert time.monotonic() < until_s, states
        time.sleep(0.1)
    assert_equal(single["mixed"][:8], ask_all(cluster.url, MIXED[:8]))
    assert not any(each["requests"] for each in cluster.replicas())


def test_metrics_have_every_replica(cluster: Cluster) -> None:
    metrics = cluster.metrics()
    for replica in ("0", "1"):
        assert metrics[f'manylora:replica_state{{replica="{replica}",state="running"}}'] == 1
        assert f'vllm:num_requests_running{{model_name="demo",replica="{replica}"}}' in metrics
        # For routers of others: which adapters are there, in use or not.
        assert f'vllm:num_gpu_loaded_lora_adapters{{model_name="demo",replica="{replica}"}}' in metrics
        loaded = [name for name in metrics if name.startswith("vllm:lora_adapter_loaded{adapter_name=")]
        assert any('level="gpu"' in name and f'replica="{replica}"' in name for name in loaded), loaded
    for name in (
        "stale_tokens_total",
        "recomputed_tokens_total",
        "scale_hint",
        "router_decision_seconds_count",
    ):
        assert f"manylora:{name}" in metrics


def test_its_end_is_in_order(cluster: Cluster) -> None:
    """The last of this file: all processes go, and what journals hold replays."""
    pids = cluster.pids()
    assert len(pids) == 6
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    cluster.wait_gone(pids, 10.0)
    assert not (cluster.folder / "cluster" / "admin.sock").exists()
    replayed = replay_all(cluster.folder)
    assert {path.name for path in replayed} >= {"journal.router", "journal.r0.e1", "journal.r1.e1"}
    assert sum(replayed.values()) > 1000
