"""A cluster whose links are encrypted, a front end that joins it over a cable, and those that are not let in."""

from __future__ import annotations

import concurrent.futures
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.config.cluster import TlsFiles
from tests.cluster.cable import Cable, cable_to
from tests.cluster.certificates import authority, certificate, options
from tests.cluster.process import Cluster, ask_all, assert_equal, long_bodies, mixed_bodies, send
from tests.cluster.test_bad_input import refused
from tests.cluster.test_joining import joins
from tests.cluster.test_joining import refused as refused_to_join
from tests.e2e.process import Server, free_port, wait_until

MIXED = mixed_bodies(20)
LONG = long_bodies(8, 300)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return certificate(authority(tmp_path_factory.mktemp("tls") / "ours"))


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, port: int, files: TlsFiles) -> Iterator[Cluster]:
    args = ("--replicas", "2", "--lease", "3", "--cluster-port", str(port), *options(files))
    with Cluster(*args, folder=tmp_path_factory.mktemp("cluster")) as started:
        started.wait_ready()
        started.wait_replicas(2)
        yield started


@pytest.fixture(scope="module")
def cable(cluster: Cluster, port: int) -> Iterator[tuple[Cable, int]]:
    with cable_to(port) as made:
        yield made


@pytest.fixture(scope="module")
def joined(cluster: Cluster, cable: tuple[Cable, int], files: TlsFiles) -> Iterator[Server]:
    with Server(*joins(cluster, cable[1]), *options(files), words=("frontend",)) as started:
        started.wait_ready()
        yield started


def test_answers_are_the_same_from_both(cluster: Cluster, joined: Server) -> None:
    assert_equal(ask_all(cluster.url, MIXED), ask_all(joined.url, MIXED))


@pytest.mark.long
def test_a_replica_dies(cluster: Cluster, joined: Server) -> None:
    before = ask_all(joined.url, LONG)
    assert_equal(before, ask_all(joined.url, LONG, lambda: send(cluster.busiest()["pid"], signal.SIGKILL)))
    cluster.wait_replicas(2)


@pytest.mark.long
def test_a_front_end_that_is_cut_off_and_comes_back(
    cluster: Cluster, joined: Server, cable: tuple[Cable, int]
) -> None:
    """Both sides see it, though nobody has closed a connection; who asks meanwhile waits, and is answered."""
    (before,) = ask_all(joined.url, MIXED[:1])
    cable[0].is_cut = True
    wait_until(lambda: len(cluster.status()["frontends"]) == 1, "the router's word")
    wait_until(lambda: "the link to the router has ended" in joined.log, "the front end's own word")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, joined.url, MIXED[:1])
        cable[0].is_cut = False
        assert_equal([before], asked.result())
    assert len(cluster.status()["frontends"]) == 2


def test_who_is_not_let_in(cluster: Cluster, port: int, files: TlsFiles, tmp_path: Path) -> None:
    other = certificate(authority(tmp_path / "theirs"))
    assert "certificate" in refused_to_join(*joins(cluster, port), *options(other))
    assert "one of the two may use TLS" in refused_to_join(*joins(cluster, port))
    assert "go together" in refused_to_join(*joins(cluster, port), *options(files)[:2])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"\x40\0\0\0" + b"x" * 64)
        assert sock.recv(4096) == b""
    assert_equal(*(ask_all(cluster.url, MIXED[:2]) for _ in range(2)))


def test_a_start_with_a_certificate_that_is_no_good(files: TlsFiles, tmp_path: Path) -> None:
    other = certificate(authority(tmp_path / "theirs"), "127.0.0.9")
    assert "is not valid for '127.0.0.1'" in refused("--replicas", "2", *options(other))
    Path(other.key).chmod(0o644)
    assert "can be read by others" in refused("--replicas", "2", *options(other))
