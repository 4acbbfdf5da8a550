"""Copies between the host pool and the device pool on one GPU: their rate, and what they cost the steps.

Three questions. How near do the copier's pages of 8 MiB (Llama-2-7B) and 2 MiB (Llama-3-8B) come to one large
copy of pinned memory? How much slower are decode-like steps, which read tens of GiB each, while copies run in
one or both directions? And what do steps notice of the host pool being pinned in the background? Writes JSON
and ends with it in one line; run from the repository's root:

    python -m manylora_lab.benchmarks.h200_copies --commit $(git rev-parse HEAD) --out copies.json
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import argparse
import gc
import json
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from manylora.devices.cpu import CpuDevice
from manylora.devices.cuda import CudaDevice
from manylora.kernels.shapes import PageShape
from manylora.memory import host as host_module
from manylora.memory.arena import Arena
from manylora.memory.copier import TRANSFER_BYTES, Copier
from manylora.memory.host import HostPool
from manylora.protocol import CopyDone, SwapPages
from manylora_lab.bench.provenance import Provenance, add_flags

SHAPES = {
    "8MiB": PageShape(layers=32, page_tokens=16, kv_heads=32, head_dim=128, itemsize=2),
    "2MiB": PageShape(layers=32, page_tokens=16, kv_heads=8, head_dim=128, itemsize=2),
}
DTYPE = torch.bfloat16
GIB = 2**30
COMMAND_BYTES = 256 * 2**20
"""Copied by one command, about what an adapter of rank 64 and its history take."""

DIRECTIONS = {"in": True, "out": False}


class Pools:
    """Both pools, a copier, and commands over random or neighbouring pages."""

    def __init__(self, shape: PageShape, num_bytes: int) -> None:
        self.device = CudaDevice()
        self.shape = shape
        self.num_pages = num_bytes // shape.page_bytes
        self.arena = Arena(self.num_pages, shape, DTYPE, self.device)
        self.host = HostPool(self.num_pages, shape, DTYPE, self.device)
        self.copier = Copier(self.arena, self.host, self.device)
        self.answers: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
        self.num_copies = 0
        self.shuffle = random.Random(0)

    def wait_pinned(self) -> None:
        deadline = time.monotonic() + 300
        while self.host.pinned_bytes < self.num_pages * self.shape.page_bytes:
            if time.monotonic() > deadline:
                raise RuntimeError("the host pool was not pinned: see the log")
            time.sleep(0.05)

    def commands(self, to_device: bool, scattered: bool, halves: bool) -> list[SwapPages]:
        """Commands that copy every page once. ``halves``: sources in the lower half of their pool,
        destinations in the upper one, so that the two directions never touch one page."""
        count = self.num_pages // 2 if halves else self.num_pages
        sources, destinations = list(range(count)), list(range(self.num_pages - count, self.num_pages))
        if scattered:
            self.shuffle.shuffle(sources)
            self.shuffle.shuffle(destinations)
        pairs = list(zip(sources, destinations, strict=True))
        size = max(1, COMMAND_BYTES // self.shape.page_bytes)
        made = []
        for at in range(0, count, size):
            self.num_copies += 1
            made.append(SwapPages(self.num_copies, to_device, tuple(pairs[at : at + size])))
        return made

    def start(self, command: SwapPages) -> None:
        self.copier.start(command, _nothing, self.answers.put)

    def answer(self) -> CopyDone:
        answer = self.answers.get(timeout=120)
        if not answer.ok:
            raise RuntimeError(f"a copy failed: {answer.error}")
        return answer


@contextmanager
def open_pools(shape: PageShape, num_bytes: int) -> Iterator[Pools]:
    pools = Pools(shape, num_bytes)
    try:
        pools.wait_pinned()
        yield pools
    finally:
        pools.copier.close()
        torch.cuda.synchronize()
        pools.arena.close()
        pools.host.close()
        gc.collect()
        torch.cuda.empty_cache()


def _nothing() -> None:
    return


# ---------------------------------------------------------------- rates


def raw_rates(num_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s of one large copy of memory that CUDA itself has pinned: in, out, and each with both at once."""
    device = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(into: bool, out: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if into:
            with torch.cuda.stream(streams[0]):
                device[0].copy_(host[0], non_blocking=True)
        if out:
            with torch.cuda.stream(streams[1]):
                host[1].copy_(device[1], non_blocking=True)
        torch.cuda.synchronize()
        return (into + out) * num_bytes / (time.perf_counter() - began) / 1e9

    rates = {}
    for name, directions in {"in": (True, False), "out": (False, True), "both": (True, True)}.items():
        copy(*directions)
        rates[name] = statistics.median(copy(*directions) for _ in range(rounds))
    return rates


def copier_rates(pools: Pools, rounds: int) -> dict[str, Any]:
    """GB/s from the first command to the last answer, commands given at once; and by the sum of ``copy_s``."""
    result: dict[str, Any] = {}
    for pattern, scattered in (("neighbours", False), ("scattered", True)):
        for name, directions in {"in": (True,), "out": (False,), "both": (True, False)}.items():
            rates, own_rates = [], []
            for turn in range(rounds + 1):
                commands = [c for d in directions for c in pools.commands(d, scattered, len(directions) == 2)]
                num_bytes = sum(len(c.pairs) for c in commands) * pools.shape.page_bytes
                torch.cuda.synchronize()
                began = time.perf_counter()
                for command in commands:
                    pools.start(command)
                copy_s = sum(pools.answer().copy_s for _ in commands)
                if turn:
                    rates.append(num_bytes / (time.perf_counter() - began) / 1e9)
                    own_rates.append(num_bytes / copy_s / 1e9)
            result[f"{pattern}_{name}"] = {
                "gb_per_s": statistics.median(rates),
                "gb_per_s_all": rates,
                "gb_per_s_by_copy_s": statistics.median(own_rates),
            }
    return result


# ---------------------------------------------------------------- what steps notice


class DecodeSteps:
    """Decode-like steps: the linear layers of a 7B model on 64 rows, and reads of keys, layer by layer.

    Each begins with a small upload and ends with a small download, like a step of the engine.
    """

    def __init__(self, layers: int = 32, context: int = 4096) -> None:
        sizes = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))
        self.layers = [
            [torch.randn(i, o, dtype=DTYPE, device="cuda") * 0.01 for i, o in sizes] for _ in range(layers)
        ]
        self.keys = [torch.randn(512, 128, context, dtype=DTYPE, device="cuda") for _ in range(layers)]
        self.query = torch.randn(512, 1, 128, dtype=DTYPE, device="cuda")
        self.embeddings = torch.randn(32000, 4096, dtype=DTYPE, device="cuda")
        self.scores = torch.empty(512, 1, context, dtype=DTYPE, device="cuda")

    def run(self) -> float:
        """One step; its seconds."""
        began = time.perf_counter()
        ids = torch.arange(64).pin_memory().to("cuda", non_blocking=True)
        hidden = self.embeddings[ids]
        for (qkv, out, up, down), keys in zip(self.layers, self.keys, strict=True):
            torch.bmm(self.query, keys, out=self.scores)
            hidden = (hidden @ qkv)[:, :4096] @ out
            hidden = (hidden @ up)[:, :11008] @ down
        hidden[:, :32000].argmax(-1).tolist()
        return time.perf_counter() - began

    def timed(self, count: int, between: Callable[[], None] = _nothing) -> list[float]:
        seconds = []
        for _ in range(count):
            between()
            seconds.append(self.run())
        return seconds


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "mean_ms": statistics.mean(seconds) * 1e3,
        "median_ms": statistics.median(seconds) * 1e3,
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


def interference(steps: DecodeSteps, pools: Pools, count: int) -> dict[str, Any]:
    """Steps without copies and beside a lane or two that never run dry, in turns of ``count`` steps."""
    result: dict[str, Any] = {}
    for name, directions in {"in": (True,), "out": (False,), "both": (True, False)}.items():
        alone: list[float] = []
        beside: list[float] = []
        rates = []
        for _ in range(3):
            alone += steps.timed(count)
            feed = _Feed(pools, directions)
            feed.top_up()
            feed.num_bytes, began = 0, time.perf_counter()
            beside += steps.timed(count, feed.top_up)
            feed.take()
            rates.append(feed.num_bytes / (time.perf_counter() - began) / 1e9)
            feed.drain()
        slower = statistics.mean(beside) / statistics.mean(alone) - 1
        result[name] = {
            "alone": _summary(alone), "beside_copies": _summary(beside),
            "slower_by": slower, "slower_by_median": statistics.median(beside) / statistics.median(alone) - 1,
            "copied_gb_per_s": statistics.median(rates),
        }  # fmt: skip
    return result


class _Feed:
    """Keeps four commands a direction waiting; scattered pages, so that each is many transfers."""

    def __init__(self, pools: Pools, directions: tuple[bool, ...]) -> None:
        self.pools = pools
        self.ready = {d: pools.commands(d, True, True) for d in directions}
        self.turns = dict.fromkeys(directions, 0)
        self.waiting = dict.fromkeys(directions, 0)
        self.started: dict[int, SwapPages] = {}
        self.num_bytes = 0

    def top_up(self) -> None:
        self.take()
        for direction, commands in self.ready.items():
            while self.waiting[direction] < 4:
                command = commands[self.turns[direction] % len(commands)]
                self.turns[direction] += 1
                self.pools.num_copies += 1
                again = SwapPages(self.pools.num_copies, direction, command.pairs)
                self.started[again.copy] = again
                self.pools.start(again)
                self.waiting[direction] += 1

    def take(self) -> None:
        while not self.pools.answers.empty():
            self._note(self.pools.answer())

    def drain(self) -> None:
        while self.started:
            self._note(self.pools.answer())

    def _note(self, answer: CopyDone) -> None:
        command = self.started.pop(answer.copy)
        self.waiting[command.to_device] -= 1
        self.num_bytes += len(command.pairs) * self.pools.shape.page_bytes


def pinning(steps: DecodeSteps, num_bytes: int, count: int) -> list[dict[str, Any]]:
    """How long the pool is being pinned beside steps, how long alone, and what the steps notice."""
    shape = SHAPES["2MiB"]
    num_pages = num_bytes // shape.page_bytes
    rows = []
    for chunk_bytes in sorted({64 * 2**20, host_module.CHUNK_BYTES, GIB}):
        alone = steps.timed(count)
        for beside_steps in (True, False):
            began = time.perf_counter()
            host = HostPool(num_pages, shape, DTYPE, CudaDevice(), chunk_bytes)
            opened_s = time.perf_counter() - began
            beside: list[float] = []
            while host.pinned_bytes < num_pages * shape.page_bytes:
                if time.perf_counter() - began > 300:
                    raise RuntimeError("the host pool was not pinned: see the log")
                if beside_steps:
                    beside.append(steps.run())
                else:
                    time.sleep(0.005)
            pinned_s = time.perf_counter() - began
            began = time.perf_counter()
            host.close()
            row: dict[str, Any] = {
                "pool_gib": num_bytes / GIB, "chunk_mib": chunk_bytes / 2**20, "beside_steps": beside_steps,
                "open_ms": opened_s * 1e3, "pin_s": pinned_s, "pin_s_per_gib": pinned_s / (num_bytes / GIB),
                "close_s": time.perf_counter() - began,
            }  # fmt: skip
            if beside:
                row |= {"steps_alone": _summary(alone), "steps_beside": _summary(beside)}
                row["slower_by"] = statistics.mean(beside) / statistics.mean(alone) - 1
            rows.append(row)
            gc.collect()
    return rows


# ---------------------------------------------------------------- all of it


def measure(args: argparse.Namespace, report: dict[str, Any]) -> None:
    pool_bytes = int(args.pool_gib * GIB)
    if 1.2 * max(2 * pool_bytes, args.pin_gib * GIB) > CpuDevice().free_bytes():
        raise SystemExit("not enough host memory: lower --pool-gib and --pin-gib")
    raw = raw_rates(min(pool_bytes, 4 * GIB), args.rounds)
    report["raw_pinned_gb_per_s"] = raw
    gc.collect()
    getattr(torch._C, "_host_emptyCache", _nothing)()  # pinned memory that torch keeps for later
    torch.cuda.empty_cache()
    report["copier"] = {}
    for name, shape in SHAPES.items():
        with open_pools(shape, pool_bytes) as pools:
            rates = copier_rates(pools, args.rounds)
        for key, row in rates.items():
            row["of_raw"] = row["gb_per_s"] / raw[key.rpartition("_")[2]]
        report["copier"][name] = rates
        print(json.dumps({name: rates}), flush=True)
    steps = DecodeSteps()
    steps.timed(20)
    report["steps_beside_copies"] = {}
    for name, shape in SHAPES.items():
        with open_pools(shape, pool_bytes) as pools:
            report["steps_beside_copies"][name] = interference(steps, pools, args.steps)
        print(json.dumps({name: report["steps_beside_copies"][name]}), flush=True)
    report["pinning"] = pinning(steps, int(args.pin_gib * GIB), args.steps)


def compact(report: dict[str, Any]) -> dict[str, Any]:
    """The numbers that one looks at first."""
    return {
        "commit": report["commit"],
        "raw_gb_per_s": {k: round(v, 1) for k, v in report["raw_pinned_gb_per_s"].items()},
        "of_raw": {
            size: {key: round(row["of_raw"], 3) for key, row in rates.items()}
            for size, rates in report["copier"].items()
        },
        "steps_slower_by": {
            size: {key: round(row["slower_by"], 4) for key, row in rows.items()}
            for size, rows in report["steps_beside_copies"].items()
        },
        "pinning": [
            {
                key: round(row[key], 4)
                for key in ("chunk_mib", "pin_s_per_gib", "close_s", "slower_by")
                if key in row
            }
            for row in report["pinning"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="a JSON file")
    add_flags(parser)
    parser.add_argument("--pool-gib", type=float, default=8.0, help="of each pool (default: 8)")
    parser.add_argument("--pin-gib", type=float, default=32.0, help="pinned beside steps (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="of each rate, the median is given")
    parser.add_argument("--steps", type=int, default=100, help="a turn, three turns of each kind")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a CUDA device, and there is none")
    recording = Provenance.of(args, 0)
    report: dict[str, Any] = {
        "command": recording.command, "commit": recording.commit,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "command_bytes": COMMAND_BYTES, "transfer_bytes": TRANSFER_BYTES,
    }  # fmt: skip
    measure(args, report)
    report["provenance"] = recording.provenance()
    Path(args.out).write_text(json.dumps(report, indent=1))
    print(json.dumps(compact(report), separators=(",", ":")))


if __name__ == "__main__":
    main()
