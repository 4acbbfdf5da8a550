"""At full size what other files here ask of a few streams: three deaths within 200 streams, long stops, churn of
adapters and replicas at once, full disks, few descriptors, clocks that differ, strangers at every port."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from manylora.config.routing import ROUTERS
from tests.cluster.process import (
    ADAPTERS,
    NAMES,
    Answer,
    Cluster,
    ask_all,
    long_bodies,
    mixed_bodies,
    send,
)
from tests.cluster.replays import replay_all
from tests.cluster.rounding import assert_equal
from tests.e2e.process import BASE, TIMEOUT_S, Server, assert_error, children_of, is_running, wait_until
from tests.router.rig import CARASERVE

pytestmark = pytest.mark.long

MIXED = mixed_bodies(500)
LONG = long_bodies(200, 200)
SOME = long_bodies(40, 300)

LAUNCHERS = {"local": (), "ray": ("--launcher", "ray", "--ray-address", "local")}
on_both = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
BODIES = {"mixed": MIXED, "long": LONG, "some": SOME}


@functools.cache
def undisturbed(which: str) -> list[Answer]:
    """What a single server answers."""
    args = ("--adapter-dir", str(ADAPTERS), "--max-adapter-rank", "64", "--device-pool", "48MiB")
    with Server(*args, "--host-pool", "16MiB") as server:
        server.wait_ready()
        return ask_all(server.url, BODIES[which])


def assert_same(which: str, found: list[Answer], numbers: Sequence[int] | None = None) -> None:
    """The answers to the first requests, or to these, are the single server's, up to rounding."""
    if numbers is None:
        numbers = range(len(found))
    wanted = undisturbed(which)
    parted = assert_equal([wanted[number] for number in numbers], found)
    print(f"{len(found)} answers, {parted} choices parted by rounding")


@contextlib.contextmanager
def running(
    folder: Path, *args: str, replicas: int = 3, journal: bool = True, python_path: str = ""
) -> Iterator[Cluster]:
    """A cluster under ``folder``; whatever was done to it, its end is in order, nothing is left of it, and its
    journals replay."""
    given = ("--replicas", str(replicas), "--lease", "3", *args)
    if journal:
        given = (*given, "--journal", str(folder / "journal"))
    with Cluster(*given, folder=folder, python_path=python_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(replicas)
        yield cluster
        pids = cluster.pids()
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.wait_exit() == 0
        cluster.wait_gone(pids, 10.0)
    if journal:
        assert sum(replay_all(folder).values()) > 100


@pytest.mark.timeout(900)
@on_both
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_gives_a_single_servers_answers(
    router: str, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    pairs = CARASERVE.items() if router == "caraserve" else ()
    settings = [word for key, value in pairs for word in ("--router-set", f"caraserve.{key}={value}")]
    with running(tmp_path, *launcher, "--router", router, *settings, replicas=2) as cluster:
        assert_same("mixed", cluster.ask_all(MIXED))


@on_both
def test_three_replicas_die_within_200_streams(launcher: tuple[str, ...], tmp_path: Path) -> None:
    with running(tmp_path, *launcher) as cluster:
        dead: list[int] = []

        def kill() -> None:
            for _ in range(3):
                dead.append(cluster.busiest()["pid"])
                send(dead[-1], signal.SIGKILL)
                time.sleep(1.0)

        found = cluster.ask_all(LONG, kill)
        assert_same("long", found)
        assert len(set(dead)) == 3
        print("longest gap", max(answer.longest_gap_s for answer in found))
        cluster.wait_gone(dead, 10.0)
        cluster.wait_replicas(3)


@on_both
def test_a_replica_is_stopped_for_20_seconds(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """It is given up, and killed as it stands; what a signal would have woken is no more."""
    with running(tmp_path, *launcher, replicas=2) as cluster:
        pids: list[int] = []

        def stop() -> None:
            pids.append(cluster.busiest()["pid"])
            send(pids[0], signal.SIGSTOP)
            time.sleep(20.0)
            with contextlib.suppress(ProcessLookupError):
                send(pids[0], signal.SIGCONT)

        found = cluster.ask_all(LONG, stop)
        assert_same("long", found)
        cluster.wait_gone(pids, 10.0)
        cluster.wait_replicas(2)


@on_both
def test_the_router_dies_and_new_requests_wait(launcher: tuple[str, ...], tmp_path: Path) -> None:
    with running(tmp_path, *launcher, replicas=2) as cluster:
        later: list[Answer] = []

        def kill() -> None:
            cluster.busiest()
            send(cluster.status()["router"]["pid"], signal.SIGKILL)
            later.extend(cluster.ask_all(MIXED[:40]))

        found = cluster.ask_all(LONG, kill)
        assert_same("long", found)
        assert_same("mixed", later)
        assert cluster.status()["router"]["epoch"] > 1


@on_both
def test_a_front_end_dies_alone(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Its own clients' connections end; the other's streams are untouched, replicas have no more than these."""
    with running(tmp_path, *launcher, "--frontends", "2", replicas=2) as cluster:
        for _ in range(5):  # the system may give one of the two all connections, or none
            ends = _ends_as_a_front_end_dies(cluster)
            kept = {number: answer for number, answer in ends.items() if answer is not None}
            if kept:
                assert_same("some", list(kept.values()), list(kept))
            cluster.wait_idle()
            if 0 < len(kept) < len(ends):
                return
            wait_until(lambda: len(cluster.status()["frontends"]) == 2, "two front ends")
        raise AssertionError("no two front ends had streams")


def _ends_as_a_front_end_dies(cluster: Cluster) -> dict[int, Answer | None]:
    """Of streams by number; None: its connection has ended."""
    ends: dict[int, Answer | None] = {}

    def one(number: int) -> None:
        try:
            (ends[number],) = cluster.ask_all([SOME[number]])
        except httpx.HTTPError:
            ends[number] = None

    with concurrent.futures.ThreadPoolExecutor(len(SOME)) as threads:
        doing = [threads.submit(one, number) for number in range(len(SOME))]
        wait_until(lambda: all(each["requests"] for each in cluster.replicas()), "requests")
        send(cluster.status()["frontends"][0]["pid"], signal.SIGKILL)
        for each in doing:
            each.result()
    return ends


@pytest.mark.timeout(900)
@on_both
def test_everything_changes_at_once(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """200 loads, replacements and unloads from two front ends, beside scaling, drains and a rolling restart."""
    root = tmp_path / "adapters"
    shutil.copytree(ADAPTERS, root)
    args = ("--frontends", "2", "--adapter-dir", str(root), "--max-replicas", "4", "--min-replicas", "1")
    with running(tmp_path, *launcher, *args, replicas=2) as cluster:
        texts = {cluster.text(model=name, max_tokens=24): name for name in NAMES[:2]}
        assert len(texts) == 2
        has_ended = threading.Event()
        counted: list[int] = []
        counting = threading.Lock()

        def change(worker: int) -> None:
            """Each on connections of its own, so that both front ends get some."""
            name, number = f"shifting-{worker}", 0
            while len(counted) < 200:
                number += 1
                with httpx.Client(base_url=cluster.url, timeout=60.0, verify=False) as client:
                    if number % 5 == 0:
                        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                    else:
                        body = {"lora_name": name, "lora_path": str(root / NAMES[number % 2])}
                        answer = client.post("/v1/load_lora_adapter", json={**body, "load_inplace": True})
                assert answer.status_code == 200, answer.text
                with counting:
                    counted.append(worker)

        def serve(worker: int) -> None:
            while not has_ended.is_set():
                with httpx.Client(base_url=cluster.url, timeout=60.0, verify=False) as client:
                    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
                    answer = client.post("/v1/completions", json={**body, "model": f"shifting-{worker % 3}"})
                assert answer.status_code in (200, 404), answer.text
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["text"] in texts

        def operate() -> None:
            for action in ("scale 4", "drain 1 --migrate", "restart", "scale 1", "scale 2"):
                cluster.manage(*action.split())

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            serving = [threads.submit(serve, worker) for worker in range(4)]
            changing = [threads.submit(change, worker) for worker in range(3)]
            found = cluster.ask_all(SOME, operate)
            for each in changing:
                each.result()
            has_ended.set()
            for each in serving:
                each.result()
        assert_same("some", found)
        for worker in range(3):
            cluster.unload(f"shifting-{worker}")
        lists = set()
        for _ in range(20):
            with httpx.Client(base_url=cluster.url, timeout=60.0, verify=False) as client:
                lists.add(tuple(sorted(each["id"] for each in client.get("/v1/models").json()["data"])))
        assert lists == {tuple(sorted([BASE, *(each.name for each in ADAPTERS.iterdir())]))}
        cluster.wait_replicas(2)
        wait_until(lambda: not held_pages(cluster), "no page held")


def held_pages(cluster: Cluster) -> float:
    """Of running requests, on all replicas."""
    return sum(
        value
        for name, value in cluster.metrics().items()
        if name.startswith("manylora:pages{") and 'use="running"' in name
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@on_both
def test_the_clusters_disk_is_full(launcher: tuple[str, ...], small_disk: Path, tmp_path: Path) -> None:
    """Requests are served, replicas and routers come back; only adapters cannot be loaded, which is said."""
    root = tmp_path / "adapters"
    shutil.copytree(ADAPTERS, root)
    with running(small_disk, *launcher, "--adapter-dir", str(root), replicas=2, journal=False) as cluster:
        assert cluster.load("before", root / NAMES[0]).status_code == 200
        fill(small_disk)
        assert_error(cluster.load("full", root / NAMES[0]), 503, "registry")
        found = cluster.ask_all(SOME, cluster.kill_busiest)
        assert_same("some", found)
        cluster.wait_replicas(2)
        send(cluster.status()["router"]["pid"], signal.SIGKILL)
        assert_same("some", cluster.ask_all(SOME[:8]))
        assert_same("mixed", cluster.ask_all(MIXED[:8]))
        assert_error(cluster.load("full", root / NAMES[0]), 503, "registry")
        assert cluster.complete(model="before").status_code == 200
        (small_disk / "filler").unlink()
        wait_until(lambda: cluster.load("after", root / NAMES[0]).status_code == 200, "room again")
        assert cluster.complete(model="after").status_code == 200


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_few_descriptors(tmp_path: Path) -> None:
    """As after ``ulimit -n 256``: what is over the limit is told so, what is served is right."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        made = running(tmp_path, replicas=2)
        cluster = made.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with contextlib.ExitStack() as stack:
        stack.push(made.__exit__)
        with contextlib.ExitStack() as idle:
            address = cluster.url.removeprefix("http://").split(":")
            for _ in range(300):  # connections that say nothing
                with contextlib.suppress(OSError):
                    sock = socket.create_connection((address[0], int(address[1])), timeout=5.0)
                    idle.enter_context(contextlib.closing(sock))
            time.sleep(1.0)
        found = []
        for first in range(0, 120, 40):
            found += cluster.ask_all(LONG[first : first + 40])
        assert_same("long", found)
        found = cluster.ask_all(LONG[:40], cluster.kill_busiest)
        assert_same("long", found)
        cluster.wait_replicas(2)


CLOCKS = """
import os, random, time
_shift = random.Random(os.getpid()).uniform(0.0, 1e6)
def _shifted(clock, by):
    return lambda: clock() + by
time.monotonic = _shifted(time.monotonic, _shift)
time.perf_counter = _shifted(time.perf_counter, _shift / 3)
time.time = _shifted(time.time, -_shift)
"""


def test_clocks_that_differ(tmp_path: Path) -> None:
    """As on several machines: no process's clock is another's."""
    shifting = tmp_path / "clocks"
    shifting.mkdir()
    (shifting / "sitecustomize.py").write_text(CLOCKS)
    with running(tmp_path, replicas=2, python_path=str(shifting)) as cluster:
        assert_same("some", cluster.ask_all(SOME, cluster.kill_busiest))
        cluster.wait_replicas(2)
        assert_same("some", cluster.ask_all(SOME, lambda: send(cluster.busiest()["pid"], signal.SIGSTOP)))
        cluster.wait_replicas(2)
        send(cluster.status()["router"]["pid"], signal.SIGKILL)
        assert_same("some", cluster.ask_all(SOME))


def listeners(pids: list[int]) -> list[int]:
    """The ports that processes listen on."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(link)
                if name.startswith("socket:["):
                    inodes.add(name[8:-1])
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            assert address == "0100007F", "everything listens on 127.0.0.1"
            ports.append(int(port, 16))
    return ports


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_strangers_at_every_port(tmp_path: Path) -> None:
    """Random bytes, huge lengths, half frames, halves of a handshake, slow peers and floods, at every listener."""
    with running(tmp_path, "--frontends", "2", replicas=2) as cluster:
        pids = cluster.pids()[1:]
        http = int(cluster.url.rpartition(":")[2])
        ports = [port for port in listeners(pids) if port != http]
        assert len(ports) == 3, ports  # the router's, and each replica's
        before = {pid: resident(pid) for pid in pids}
        has_ended = threading.Event()
        met: list[int] = []

        def annoy(seed: int) -> None:
            rng = random.Random(seed)
            slow: list[socket.socket] = []
            while not has_ended.is_set():
                with contextlib.suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", rng.choice(ports)), timeout=1.0)
                    kind = rng.randrange(5)
                    if kind == 0:
                        sock.sendall(rng.randbytes(rng.randrange(1, 4096)))
                    elif kind == 1:
                        sock.sendall(struct.pack("<I", rng.choice((2**32 - 1, 2**31, 65 << 20))) + b"x" * 64)
                    elif kind == 2:
                        sock.sendall(struct.pack("<I", 100) + rng.randbytes(99))
                    elif kind == 3:
                        said = json.dumps({"role": "supervisor", "nonce": "x"}).encode()
                        sock.sendall(struct.pack("<I", len(said)) + said)
                    met.append(kind)
                    if kind == 4 or rng.random() < 0.1:
                        slow.append(sock)
                        if len(slow) > 20:
                            slow.pop(0).close()
                    else:
                        sock.close()
                time.sleep(0.002)
            for each in slow:
                each.close()

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            annoying = [threads.submit(annoy, seed) for seed in range(4)]
            found = cluster.ask_all(SOME, cluster.kill_busiest)
            has_ended.set()
            for each in annoying:
                each.result()
        assert_same("some", found)
        assert len(met) > 200
        for pid, bytes_before in before.items():
            if is_running(pid):
                assert resident(pid) - bytes_before < 100 << 20
        cluster.wait_replicas(2)


def test_a_replica_that_hangs_when_the_router_dies(tmp_path: Path) -> None:
    """The next router knows of it by the supervisor's word alone."""
    with Cluster("--replicas", "2", folder=tmp_path) as cluster:
        cluster.wait_ready()
        before = cluster.wait_replicas(2)
        expected = cluster.ask_all(SOME[:4])
        hung = before[0]["pid"]
        send(hung, signal.SIGSTOP)
        send(cluster.status()["router"]["pid"], signal.SIGKILL)
        assert_equal(expected, cluster.ask_all(SOME[:4]))
        cluster.wait_gone([hung], TIMEOUT_S)
        after = cluster.wait_replicas(2)
        assert [each["epoch"] for each in after] == [2, 1], "the other one has come back"


def test_a_supervisor_that_dies(tmp_path: Path) -> None:
    """As documented: all end soon, the front ends after their requests have had some seconds."""
    with Cluster("--replicas", "2", folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(2)
        pids = children_of(cluster.process.pid)

        def kill() -> None:
            cluster.busiest()
            send(cluster.process.pid, signal.SIGKILL)

        with contextlib.suppress(httpx.HTTPError):
            cluster.ask_all(SOME[:4], kill)
        cluster.wait_gone(pids, 15.0)
