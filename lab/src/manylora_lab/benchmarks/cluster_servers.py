"""Servers of a model with dummy weights, each engine on a GPU of its own, with adapters: what they are made of."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora.models.config import read_model_config
from manylora.pricing.shapes import ModelShape
from manylora.warmup.random_adapters import write_random_adapters
from manylora_lab.bench.dummies import write_model
from manylora_lab.bench.http_target import Access
from manylora_lab.benchmarks.cluster_pairs import serving
from manylora_lab.benchmarks.cluster_rig import running, status_of
from manylora_lab.benchmarks.engine_rig import ON_CPU, ON_GPU
from manylora_lab.benchmarks.run_report import Row

RANK, BASE = 16, "served"
_FIRST_ID = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """``engine``: settings of each server by name. ``streams``: at once, for each replica. ``processes``: of
    clients, for each replica. Times in seconds."""

    engine: Mapping[str, Any]
    adapters: int
    streams: int
    prompt: int
    output: int
    rehearse_s: float
    """Of the first server, where kernels may be compiled; of others a fifth."""
    warm_s: float
    window_s: float
    lone: int
    contexts: tuple[int, ...]
    moves: int
    drained: int
    longest: int
    """Tokens of a stream that is moved, unless it is ended before."""
    processes: int
    start_s: float


REAL = Scale(
    engine={**ON_GPU, "max_model_len": 20_480, "device_pool": "40GiB", "host_pool": "4GiB"},
    adapters=8, streams=64, prompt=128, output=128, rehearse_s=25.0, warm_s=5.0, window_s=12.0, lone=150,
    contexts=(1024, 4096, 16_384), moves=5, drained=16, longest=2048, processes=6, start_s=240.0,
)  # fmt: skip
TOY = Scale(
    engine={**ON_CPU, "max_model_len": 1024, "device_pool": "48MiB"},
    adapters=3, streams=4, prompt=16, output=16, rehearse_s=1.0, warm_s=0.5, window_s=1.5, lone=6,
    contexts=(64, 256), moves=1, drained=4, longest=700, processes=1, start_s=120.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A server: ``replicas`` of None is ``manylora serve`` alone."""

    name: str
    replicas: int | None
    frontends: int = 1

    @property
    def engines(self) -> int:
        return self.replicas or 1


CASES = {
    "server": Case("server", None),
    "one": Case("one replica", 1),
    "two": Case("two replicas", 2),
    "two-2": Case("two replicas, two front ends", 2, 2),
    "two-4": Case("two replicas, four front ends", 2, 4),
}


class Servers:
    """Their files and words. A context."""

    def __init__(self, shape: ModelShape, scale: Scale) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self._scratch.name)
        self.scale = scale
        self.model = write_model(self.folder / "model", shape, scale.engine["max_model_len"])
        config = read_model_config(self.model)
        self.adapters = self.folder / "adapters"
        write_random_adapters(
            self.folder / "files", config, str(scale.engine["dtype"]), (RANK,), scale.adapters
        )
        self.adapters.mkdir()
        for number in range(scale.adapters):
            (self.adapters / f"adapter-{number}").symlink_to(self.folder / "files" / f"adapter-{number}")
        self.names = [None, *(f"adapter-{number}" for number in range(scale.adapters))]
        self._num_started = 0

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    @contextlib.contextmanager
    def started(self, case: Case, environment: Mapping[str, str]) -> Iterator[Server]:
        """The case's, when all its replicas run. Raises SystemExit."""
        self._num_started += 1
        folder = self.folder / f"server-{self._num_started}"
        folder.mkdir()
        words = [str(self.model), "--served-model-name", BASE, "--adapter-dir", str(self.adapters)]
        for name, value in self.scale.engine.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        if case.replicas is not None:
            words += ["--replicas", str(case.replicas), "--launcher", "local"]
            words += ["--frontends", str(case.frontends), "--cluster-dir", str(folder / "cluster")]
        began_s = time.monotonic()
        with serving(folder, *words, start_s=self.scale.start_s, **environment) as url:
            if case.replicas is not None:
                running(url, case.replicas, self.scale.start_s)
            yield Server(url, case, folder / "cluster", time.monotonic() - began_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """One that answers. ``folder``: the cluster's."""

    url: str
    case: Case
    folder: Path
    start_s: float

    @property
    def access(self) -> Access:
        return Access(self.url, None, BASE, {"ignore_eos": True})


def prompt_of(seed: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids that no other prompt has."""
    return tuple(random.Random(seed).choices(range(_FIRST_ID, vocab_size), k=length))


def busy_cores(server: Server, begin_s: float, window_s: float) -> dict[str, float]:
    """How many cores each process of a cluster kept busy within the window, in the mean; waits for its end."""
    if server.case.replicas is None:
        return {}
    status = asyncio.run(status_of(server.url))
    pids = {"router": status["router"]["pid"]}
    for name, processes in (("front end", status["frontends"]), ("replica", status["replicas"])):
        pids |= {f"{name} {each['id']}": each["pid"] for each in processes}
    time.sleep(max(0.0, begin_s - time.monotonic()))
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    time.sleep(window_s)
    return {name: round((cpu_seconds(pid) - before[name]) / window_s, 2) for name, pid in pids.items()}


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def times_ms(name: str, seconds: Sequence[float]) -> Row:
    """Median, 99th percentile and mean, in milliseconds."""
    if not seconds:
        return {f"{name}_{each}_ms": None for each in ("p50", "p99", "mean")}
    ordered = sorted(seconds)
    return {
        f"{name}_p50_ms": 1e3 * statistics.median(ordered),
        f"{name}_p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        f"{name}_mean_ms": 1e3 * statistics.fmean(ordered),
    }
