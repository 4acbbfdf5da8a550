"""Count the files whose functions run on five paths through the system, in real processes that are traced.

``python -m tools.paths [--device cuda] [--save FILE]``: prints each path's files by room. A path
is whatever runs between two moments, background work included, so the counts are upper bounds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.process import ADAPTERS, Cluster
from tests.e2e.process import BASE, MODEL, REPOSITORY, Server
from tests.executor.drive import Rig
from tests.policy import rig as rigs

DECIDING = ("policy", "protocol", "router", "engine", "cluster", "server", "config", "text", "metrics")
TICK_S = 0.02

_TRACER = '''
import atexit, json, os, sys, threading, time
if "manylora" in " ".join(sys.orig_argv):
    root, out = os.environ["PATHS_ROOT"], os.environ["PATHS_OUT"]
    seen, files, last = {}, {}, 0.0
    def name_of(code):
        path = code.co_filename
        inside = path.startswith(root) and code.co_name != "<module>"
        files[code] = path[len(root):] if inside else None
        return files[code]
    def traced(frame, event, arg):
        if event == "call":
            code = frame.f_code
            name = files[code] if code in files else name_of(code)
            if name is not None:
                seen.setdefault(int(time.time() / TICK), set()).add(name)
    def write():
        while True:
            time.sleep(0.2)
            with open(f"{out}/{os.getpid()}.part", "w") as file:
                json.dump({tick: sorted(names) for tick, names in list(seen.items())}, file)
            os.replace(f"{out}/{os.getpid()}.part", f"{out}/{os.getpid()}.json")
    threading.Thread(target=write, daemon=True).start()
    threading.setprofile(traced)
    sys.setprofile(traced)
'''


class Tracer:
    """A folder in which traced processes write which files they entered, and when."""

    def __init__(self, folder: Path) -> None:
        self._out = folder / "out"
        self._out.mkdir()
        (folder / "sitecustomize.py").write_text(_TRACER.replace("TICK", str(TICK_S)))
        self.environment = {
            "PYTHONPATH": f"{folder}:{REPOSITORY / 'src'}:{REPOSITORY / 'lab/src'}",
            "PATHS_ROOT": f"{REPOSITORY / 'src/manylora'}/",
            "PATHS_OUT": str(self._out),
        }

    @contextlib.contextmanager
    def path(self, name: str, found: dict[str, list[str]], but: Collection[int] = ()) -> Iterator[None]:
        """Note the files that are entered meanwhile, in any process but these."""
        time.sleep(2 * TICK_S)
        first = int(time.time() / TICK_S)
        yield
        last = int(time.time() / TICK_S)
        time.sleep(1.0)
        files: set[str] = set()
        for path in self._out.glob("*.json"):
            if int(path.stem) in but:
                continue
            for tick, names in json.loads(path.read_text()).items():
                if first <= int(tick) <= last:
                    files.update(names)
        found[name] = sorted(files)


def first_chunk(server: Any, **body: Any) -> None:
    """Ask for a stream and read up to its first token."""
    with server.http.stream("POST", "/v1/completions", json={"model": BASE, "stream": True, **body}) as stream:
        next(line for line in stream.iter_lines() if line.startswith("data:"))


@contextlib.contextmanager
def entered(name: str, found: dict[str, list[str]], inside: str = "") -> Iterator[None]:
    """Note the files that this process's threads enter meanwhile, but for threads that run already.

    ``inside``: only while a function of this name runs.
    """
    root, files, open_frames = f"{REPOSITORY / 'src/manylora'}/", set(), 0

    def traced(frame: Any, event: str, arg: Any) -> None:
        nonlocal open_frames
        code = frame.f_code
        if code.co_name == inside:
            open_frames += {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and code.co_filename.startswith(root) and (open_frames or not inside):
            files.add(code.co_filename.removeprefix(root))

    threading.setprofile(traced)
    sys.setprofile(traced)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        found[name] = sorted(files)


def of_request(tracer: Tracer, found: dict[str, list[str]]) -> None:
    """One server: a request from accept to first token, of an adapter that is on the device."""
    with Server("--adapter-dir", str(ADAPTERS), env=tracer.environment).wait_ready() as server:
        name = server.http.get("/v1/models").json()["data"][1]["id"]
        first_chunk(server, prompt="Another", max_tokens=2, model=name)
        with tracer.path("a request", found):
            first_chunk(server, prompt="A request", max_tokens=1, model=name)


def of_death(tracer: Tracer, folder: Path, found: dict[str, list[str]]) -> None:
    """A cluster: the death of a replica with a request, in the other processes, until another replica has the
    request. The replica stands still before, so that no token is on its way."""
    args = ("--replicas", "2", "--frontends", "1", "--router", "round-robin")
    with Cluster(*args, folder=folder, env=tracer.environment).wait_ready() as cluster:
        assert isinstance(cluster, Cluster)
        pids = {each["pid"] for each in cluster.wait_replicas(2)}
        body = {"model": BASE, "prompt": "x", "max_tokens": 450, "ignore_eos": True, "stream": True}
        with cluster.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data:"))
            for _ in range(100):  # long enough for a report that tells which replica has it
                next(lines)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            busy = next(each["pid"] for each in cluster.replicas() if each["running"])
            (other,) = pids - {busy}
            os.kill(other, signal.SIGCONT)
            time.sleep(0.2)  # what was on its way has come
            with tracer.path("a death", found, pids):
                os.kill(busy, signal.SIGKILL)
                time.sleep(0.15)  # the next start of the place follows after 0.2 s


def of_decision(found: dict[str, list[str]]) -> None:
    """A policy: the end of a step after which a sequence needs a page, so that idle KV has to leave the device."""
    rig = rigs.Rig("fastlibra")
    rig.add(1)
    rig.serve("before", 1, rigs.prompt(0, 10))
    rig.ask("grows", 1, rigs.prompt(1, 6), max_tokens=8 * rigs.PAGE)
    rig.settle_copies()
    is_found = False
    while not is_found:
        done = rig.device.finish_step(ok=True)
        with entered("a cache decision", found, inside="compose"):
            decided = rig.replica.handle(done, rig.now)
        is_found = "policy/value.py" in found["a cache decision"]
        for command in decided:
            rig.device.obey(command)
        rig.settle_copies()


def of_executor(folder: Path, device: str, found: dict[str, list[str]]) -> None:
    """A worker: an adapter's read to the host and its copy to the device; a decoding step at a captured size."""
    captures = device == "cuda"
    rig = Rig(Path(MODEL), folder, device=device, pads_steps=captures or None, num_host_pages=None)
    adapter = sorted(ADAPTERS.iterdir())[0]
    num_pages = rig.direct.add_adapter(1, str(adapter)).num_pages
    host = rig.take_host(num_pages)
    with entered("an adapter's read", found):
        rig.read(1, tuple(host), "host")
        device_pages = rig.take(num_pages)
        rig.swap(True, host, device_pages, 1)
    rig.open(1, [1, 2, 3, 4], 1)
    rig.decode(3, 1)
    with entered("a captured decode step" if captures else "a decode step", found):
        rig.decode(1, 1)
    rig.worker.close()


def main() -> None:
    """Trace and print all paths."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    found: dict[str, list[str]] = {}
    of_decision(found)
    with tempfile.TemporaryDirectory() as folder:
        of_executor(Path(folder), args.device, found)
    if args.device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            of_request(Tracer(Path(folder)), found)
        with tempfile.TemporaryDirectory() as folder:
            of_death(Tracer(Path(folder)), Path(folder), found)
    for name, files in found.items():
        rooms = collections.Counter(file.partition("/")[0].removesuffix(".py") for file in files)
        deciding = sum(rooms[room] for room in DECIDING)
        print(f"{name}: {deciding} files of the deciding rooms, {len(files) - deciding} others")
        print("   ", ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
        print("   ", " ".join(files))
    if args.save is not None:
        args.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
