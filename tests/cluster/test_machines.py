"""A cluster as on several machines: its links are encrypted, a front end joins it over a cable, and replicas have
adapters' files from the router alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.cluster.adapter_files import adapter_digest
from manylora.config.cluster import TlsFiles
from tests.cluster.cable import Cable, cable_to
from tests.cluster.certificates import authority, certificate, options
from tests.cluster.process import (
    ADAPTERS,
    Cluster,
    ask_all,
    long_bodies,
    mixed_bodies,
    send,
)
from tests.cluster.rounding import assert_equal
from tests.cluster.test_bad_input import refused
from tests.cluster.test_joining import joins
from tests.cluster.test_joining import refused as refused_to_join
from tests.e2e.process import Server, free_port, wait_until

MIXED = mixed_bodies(20)
LONG = long_bodies(8, 300)
LATE = sorted(folder.name for folder in ADAPTERS.iterdir())[-1]
"""An adapter that no request of these names: loaded later."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return certificate(authority(tmp_path_factory.mktemp("tls") / "ours"))


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, port: int, files: TlsFiles) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    shutil.copytree(ADAPTERS, folder / "adapters", ignore=lambda where, names: [LATE])
    places = ("--adapter-dir", str(folder / "adapters"), "--adapter-cache", str(folder / "cache"))
    args = ("--replicas", "2", "--lease", "15", "--cluster-port", str(port), *places, *options(files))
    with Cluster(*args, folder=folder) as started:
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


def test_replicas_have_the_files_from_the_router(cluster: Cluster) -> None:
    """Those that start when the files have gone from where they were loaded serve what the cache has."""
    source, cache = cluster.folder / "adapters", cluster.folder / "cache"
    shutil.copytree(ADAPTERS / LATE, source / LATE)
    body = {"lora_name": LATE, "lora_path": str(source / LATE)}
    assert cluster.post("/v1/load_lora_adapter", body).status_code == 200
    held = {each.name for each in cache.iterdir()} - {"lock"}
    assert held == {adapter_digest(each) for each in source.iterdir()}
    assert all(each.stat().st_mode & 0o777 == 0o700 for each in (cache, *map(cache.joinpath, held)))
    bodies = [*MIXED, {**MIXED[0], "model": LATE}]
    before = ask_all(cluster.url, bodies)
    shutil.rmtree(source)
    pids = [each["pid"] for each in cluster.replicas()]
    for pid in pids:
        send(pid, signal.SIGKILL)
    wait_until(lambda: not {each["pid"] for each in cluster.replicas()} & {*pids}, "the next replicas")
    cluster.wait_replicas(2)
    assert_equal(before, ask_all(cluster.url, bodies))
    source.mkdir()


@pytest.mark.long
def test_a_replica_dies(cluster: Cluster, joined: Server) -> None:
    before = ask_all(joined.url, LONG)
    assert_equal(before, ask_all(joined.url, LONG, cluster.kill_busiest))
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
        with contextlib.suppress(ConnectionError):
            assert sock.recv(4096) == b""
    assert_equal(*(ask_all(cluster.url, MIXED[:2]) for _ in range(2)))


def test_a_start_with_a_certificate_that_is_no_good(files: TlsFiles, tmp_path: Path) -> None:
    other = certificate(authority(tmp_path / "theirs"), "127.0.0.9")
    assert "is not valid for '127.0.0.1'" in refused("--replicas", "2", *options(other))
    Path(other.key).chmod(0o644)
    assert "can be read by others" in refused("--replicas", "2", *options(other))


@pytest.mark.long
def test_on_ray(tmp_path: Path, files: TlsFiles) -> None:
    """The same with actors."""
    ray = ("--replicas", "2", "--launcher", "ray", "--ray-address", "local")
    shutil.copytree(ADAPTERS, tmp_path / "adapters")
    places = ("--adapter-dir", str(tmp_path / "adapters"), "--adapter-cache", str(tmp_path / "cache"))
    with Cluster(*ray, *places, *options(files), folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(2)
        shutil.rmtree(tmp_path / "adapters")
        before = ask_all(cluster.url, MIXED)
        send(cluster.replicas()[0]["pid"], signal.SIGKILL)
        cluster.wait_replicas(2)
        assert_equal(before, ask_all(cluster.url, MIXED))
