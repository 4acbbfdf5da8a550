"""What operators do to a cluster under load: no request fails, and answers are as if nothing had been done."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from manylora.cluster.command import ask
from tests.cluster.process import ADAPTERS, NAMES, Answer, Cluster, ask_all, long_bodies, mixed_bodies, send
from tests.cluster.replays import replay_all
from tests.cluster.rounding import assert_equal, assert_undisturbed
from tests.e2e.process import BASE, TIMEOUT_S, command, completion, environment, run_cli, wait_until

MIXED = mixed_bodies(60)
LONG = long_bodies(12, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A path longer than a socket's may be.
    folder = tmp_path_factory.mktemp("cluster") / ("long" * 30)
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    root = folder / "adapters"
    shutil.copytree(ADAPTERS, root)
    args = ("--replicas", "2", "--router", "random", "--journal", str(folder / "journal"))
    with Cluster(*args, "--adapter-dir", str(root), folder=folder) as started:
        started.wait_ready()
        started.wait_replicas(2)
        yield started


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[str, list[Answer]]:
    return {"mixed": ask_all(cluster.url, MIXED), "long": ask_all(cluster.url, LONG)}


def refused(cluster: Cluster, *args: str) -> str:
    """One line, and exit code 2."""
    action, *rest = args
    result = run_cli("cluster", action, *rest, "--cluster-dir", str(cluster.folder / "cluster"))
    assert result.returncode == 2, result.stdout
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_status_is_the_same_by_both_ways(cluster: Cluster, undisturbed: dict[str, list[Answer]]) -> None:
    said, shown = json.loads(cluster.manage("status", "--json")), cluster.status()
    assert said.keys() == shown.keys()
    for key in ("frontends", "supervisor", "adapters"):
        assert said[key] == shown[key]
    assert [each["pid"] for each in said["replicas"]] == [each["pid"] for each in shown["replicas"]]
    assert said["router"]["pid"] == shown["router"]["pid"]
    assert said["router"]["policy"] == "random"
    text = json.dumps(said)
    assert str(cluster.folder) not in text
    assert "replica 1" in cluster.manage("status")
    files = {path.name: path.stat().st_mode & 0o777 for path in (cluster.folder / "cluster").iterdir()}
    assert {"admin.sock", "registry.sqlite", "secret"} <= files.keys()
    assert set(files.values()) == {0o600}


def test_a_rolling_restart(cluster: Cluster, undisturbed: dict[str, list[Answer]]) -> None:
    before = {each["id"]: each["epoch"] for each in cluster.replicas()}
    found = ask_all(cluster.url, LONG, lambda: cluster.manage("restart"))
    assert_equal(undisturbed["long"], found)
    assert {each["id"]: each["epoch"] for each in cluster.wait_replicas(2)} == {
        replica: epoch + 1 for replica, epoch in before.items()
    }


def test_scale_up_and_down(cluster: Cluster, undisturbed: dict[str, list[Answer]]) -> None:
    def scale() -> None:
        cluster.manage("scale", "3")
        assert [each["id"] for each in cluster.wait_replicas(3)] == [0, 1, 2]
        cluster.manage("remove", "1")
        cluster.manage("drain", "0", "--migrate")
        assert "last one that serves" in refused(cluster, "remove", "2")
        cluster.manage("scale", "1")

    assert_equal(undisturbed["long"], ask_all(cluster.url, LONG, scale))
    assert [each["id"] for each in cluster.wait_replicas(1)] == [2]
    assert "last one" in refused(cluster, "remove", "2")
    assert "may be 1 to" in refused(cluster, "scale", "0")
    assert "no replica 7" in refused(cluster, "drain", "7")
    cluster.manage("drain", "2")
    cluster.manage("scale", "2")  # what was drained serves again
    assert [each["id"] for each in cluster.wait_replicas(2)] == [0, 2]
    assert cluster.replicas()[1]["epoch"] == 2


def test_a_drain_and_a_move(cluster: Cluster, undisturbed: dict[str, list[Answer]]) -> None:
    first, second = (each["id"] for each in cluster.wait_replicas(2))
    drained = first

    def move() -> None:
        nonlocal drained
        # By the socket itself: a command's process may come when the streams have ended.
        drained = cluster.busiest()["id"]
        question = {"do": "drain", "replica": drained, "migrate": True}
        (said,) = ask(cluster.folder / "cluster", question)
        assert "is empty" in said
        states = {each["id"]: each for each in cluster.replicas()}
        assert states[drained]["state"] == "drained"
        assert states[drained]["requests"] == 0
        cluster.manage("drain", str(drained))  # again
        assert "may get work" in refused(cluster, "move", "x", str(drained))

    def again() -> None:
        cluster.manage("restart")
        cluster.wait_replicas(2)

    assert_undisturbed(cluster, undisturbed["long"], move, "drain", again)
    # Another router remembers what drains.
    send(cluster.status()["router"]["pid"], signal.SIGKILL)
    cluster.manage("status")  # which waits for the other
    wait_until(lambda: state_of(cluster, drained) == "drained", "drained again")
    cluster.manage("restart")
    cluster.wait_replicas(2)
    moved = cluster.moved("asked")
    folder = cluster.folder / "cluster"

    async def moved_to_both(number: int) -> bool:
        """False where the request has ended before."""
        name = f"to-be-moved-{number}"

        def move_to(replica: int) -> dict[str, str]:
            (said,) = ask(folder, {"do": "move", "request": f"cmpl-{name}", "replica": replica})
            return dict(json.loads(said))

        body = {**LONG[0], "max_tokens": 900, "n": 8}  # one replica has room for both that are asked
        del body["stream"], body["stream_options"]
        async with httpx.AsyncClient(timeout=120.0) as client:
            # With another beside it, it lasts longer than what is done to it, however slow that is.
            asking = [
                asyncio.create_task(
                    client.post(f"{cluster.url}/v1/completions", json=body, headers={"X-Request-Id": each})
                )
                for each in (name, f"beside-{number}")
            ]
            await asyncio.to_thread(wait_until, lambda: cluster.status()["router"]["requests"] == 2, "both")
            said = [await asyncio.to_thread(move_to, replica) for replica in (first, second)]
            for task in asking:
                task.cancel()
            # An answer that has come is a whole one.
            ended = await asyncio.gather(*asking, return_exceptions=True)
            assert all(each.is_success for each in ended if isinstance(each, httpx.Response))
        cluster.wait_idle()
        expected = [{"said": f"1 requests moved to replica {replica}"} for replica in (first, second)]
        errors = " ".join(each.get("error", "") for each in said)
        assert said == expected or "there is no request" in errors or "ended before" in errors
        return said == expected

    assert any(asyncio.run(moved_to_both(number)) for number in range(5))
    assert cluster.moved("asked") > moved
    assert "no request" in refused(cluster, "move", "to-be-moved", str(first))


def state_of(cluster: Cluster, replica: int) -> str:
    return str({each["id"]: each["state"] for each in cluster.replicas()}.get(replica))


def test_adapters_come_and_go(cluster: Cluster, undisturbed: dict[str, list[Answer]]) -> None:
    """Loads, replacements and unloads beside requests: each request is of one version wholly."""
    root = cluster.folder / "adapters"
    texts = {}
    for source in NAMES[:2]:
        answer = cluster.complete(model=source, max_tokens=24)
        texts[answer.json()["choices"][0]["text"]] = source
    assert len(texts) == 2
    assert cluster.load("shifting", root / NAMES[0]).status_code == 200
    seen: set[str] = set()
    counts: collections.Counter[str] = collections.Counter()
    until_s = time.monotonic() + TIMEOUT_S

    def go_on() -> bool:
        """Until each has happened often, and both versions have been met."""
        assert time.monotonic() < until_s, counts
        return len(seen) < 2 or counts["changed"] < 20 or counts["passed"] < 10

    def ask() -> None:
        while go_on():
            found = cluster.complete(model="shifting", max_tokens=24)
            assert found.status_code == 200, found.text
            seen.add(texts[found.json()["choices"][0]["text"]])

    def change() -> None:
        number = 0
        while go_on():
            number += 1
            counts["changed"] = number
            body = {"lora_name": "shifting", "lora_path": str(root / NAMES[number % 2]), "load_inplace": True}
            assert cluster.post("/v1/load_lora_adapter", body).status_code == 200

    def come_and_go() -> None:
        number = 0
        while go_on():
            number += 1
            counts["passed"] = number
            name = f"passing-{number}"
            assert cluster.load(name, root / NAMES[2]).status_code == 200
            assert cluster.complete(model=name).status_code == 200
            assert cluster.unload(name).status_code == 200
            assert cluster.complete(model=name).status_code == 404

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for work in (ask, ask, change, come_and_go)]:
            done.result()
    assert cluster.load("shifting", root / NAMES[0]).status_code == 400
    assert cluster.load("broken", root / "nothing").status_code == 404
    # A replica that starts later, and another router, have what is listed.
    send(cluster.replicas()[0]["pid"], signal.SIGKILL)
    cluster.wait_replicas(2)
    listed = {each["id"] for each in cluster.http.get("/v1/models").json()["data"]}
    assert listed == {BASE, "shifting", *(each.name for each in ADAPTERS.iterdir())}
    assert cluster.http.get("/v1/loras").json()["loras"].keys() == listed - {BASE}
    bodies: list[Any] = [
        {**completion(model="shifting"), "seed": number, "stream": False, "prompt": f"number {number}"}
        for number in range(12)
    ]
    assert not any(answer.error for answer in ask_all(cluster.url, bodies))
    assert cluster.unload("shifting").status_code == 200
    cluster.wait_idle()


def test_a_trace_of_decisions(cluster: Cluster) -> None:
    args = command("cluster", "trace", "--cluster-dir", str(cluster.folder / "cluster"))
    with subprocess.Popen(args, env=environment(), stdout=subprocess.PIPE, text=True) as tracing:
        assert tracing.stdout is not None
        asking = threading.Event()

        def ask() -> None:
            while not asking.wait(0.1):
                cluster.complete()

        thread = threading.Thread(target=ask)
        thread.start()
        line = tracing.stdout.readline()
        asking.set()
        thread.join()
        tracing.kill()
    assert "attempt 1  to " in line


def test_journals_replay(cluster: Cluster) -> None:
    """The last of this file. A start in the same folder goes on with what was loaded."""
    root = cluster.folder / "adapters"
    assert cluster.load("kept", root / NAMES[3]).status_code == 200
    pids = cluster.pids()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.wait_exit() == 0
    cluster.wait_gone(pids, TIMEOUT_S)
    assert sum(replay_all(cluster.folder).values()) > 1000
    assert "no cluster answers" in refused(cluster, "status")
