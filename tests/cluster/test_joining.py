"""A front end that joins by hand: it serves, and what it had open goes with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.process import Cluster, ask_all, long_bodies, mixed_bodies, send
from tests.cluster.rounding import assert_equal
from tests.e2e.process import BASE, MODEL, Server, events, free_port, lines_of, run_cli, wait_until

MIXED = mixed_bodies(20)
LONG = long_bodies(8, 300)


class Joined(Server):
    """``manylora frontend``."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        super().__init__(*joins(cluster, port), words=("frontend",))


def joins(cluster: Cluster, port: int, secret: Path | None = None) -> tuple[str, ...]:
    path = secret or cluster.folder / "cluster" / "secret"
    return ("--connect", f"127.0.0.1:{port}", "--secret-file", str(path))


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Cluster]:
    args = ("--replicas", "2", "--cluster-port", str(port))
    with Cluster(*args, folder=tmp_path_factory.mktemp("cluster")) as started:
        started.wait_ready()
        started.wait_replicas(2)
        yield started


@pytest.fixture(scope="module")
def joined(cluster: Cluster, port: int) -> Iterator[Server]:
    with Joined(cluster, port) as started:
        started.wait_ready()
        yield started


def test_it_serves_what_the_cluster_serves(cluster: Cluster, joined: Server) -> None:
    assert_equal(ask_all(cluster.url, MIXED), ask_all(joined.url, MIXED))
    names, others = (
        [each["id"] for each in server.http.get("/v1/models").json()["data"]] for server in (cluster, joined)
    )
    assert names == others
    frontends = cluster.status()["frontends"]
    assert [each["state"] for each in frontends] == ["running", "running"]
    assert joined.process.pid in {each["pid"] for each in frontends}


def test_salted_prompts_are_reused_whichever_front_end_they_come_through(
    cluster: Cluster, joined: Server
) -> None:
    """None of them comes through the second one twice."""

    def cached_tokens(server: Server, number: int) -> int:
        body = {"model": BASE, "prompt": f"{number} " * 40, "cache_salt": "tenant", "max_tokens": 1}
        usage = server.http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert not any(cached_tokens(cluster, number) for number in range(8))
    assert any(cached_tokens(joined, number) for number in range(8))


def test_the_router_dies_under_its_streams(cluster: Cluster, joined: Server) -> None:
    before = ask_all(joined.url, LONG)

    def kill() -> None:
        cluster.busiest()
        send(cluster.status()["router"]["pid"], signal.SIGKILL)

    assert_equal(before, ask_all(joined.url, LONG, kill))
    cluster.wait_replicas(2)


def test_when_it_dies_its_requests_are_dropped(cluster: Cluster, joined: Server) -> None:
    before = tokens(cluster)
    body = {**LONG[1], "max_tokens": 900, "n": 16}  # which takes seconds
    with joined.http.stream("POST", "/v1/completions", json=body) as response:
        next(events(response))
        send(joined.process.pid, signal.SIGKILL)
    cluster.wait_idle()
    assert tokens(cluster) - before < 16 * 900
    wait_until(lambda: len(cluster.status()["frontends"]) == 1, "the front end's end")
    assert_equal(ask_all(cluster.url, MIXED[:4]), ask_all(cluster.url, MIXED[:4]))


def tokens(cluster: Cluster) -> float:
    """All that replicas have generated."""
    found: list[float] = []

    def have_all_said() -> bool:
        metrics = cluster.metrics()  # without a replica that does not answer within a second
        found[:] = [
            value for name, value in metrics.items() if name.startswith("vllm:generation_tokens_total")
        ]
        return len(found) == 2

    wait_until(have_all_said, "both replicas' metrics")
    return sum(found)


def refused(*args: str) -> str:
    result: subprocess.CompletedProcess[str] = run_cli("frontend", "--port", "0", *args)
    assert result.returncode == 2, result.stderr
    (line,) = lines_of(result.stderr)
    return line


def test_what_is_refused(cluster: Cluster, port: int, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 64)
    secret.chmod(0o644)
    assert "can be read by others" in refused(*joins(cluster, port, secret))
    secret.chmod(0o600)
    assert "does not know the cluster's secret" in refused(*joins(cluster, port, secret))
    assert "cannot read the cluster's secret" in refused(*joins(cluster, port, tmp_path / "none"))
    assert "cannot join the cluster" in refused(*joins(cluster, free_port()))
    assert "must be HOST:PORT" in refused("--connect", "here", "--secret-file", str(secret))
    other = tmp_path / "model"
    other.mkdir()
    for path in Path(MODEL).iterdir():
        os.symlink(path, other / path.name)
    (other / "more.json").write_text("{}")
    assert "is not the cluster's: its files differ" in refused(str(other), *joins(cluster, port))
