"""Decoding steps on one GPU, eager and captured, beside their byte floor, and beside copies between the tiers.

With dummy weights in bfloat16, batches of sequences of 256 tokens, on the base model and over as many adapters
of rank 16: what the kernels of a step take (captured steps replayed back to back), and what a step takes on the
wall clock when it is issued after the step before has ended and while it still runs. Then the same while pages
of the two pools are copied in, out, or both ways without a pause. The last line is JSON. From the repository's
root:

    python -m manylora_lab.benchmarks.h200_steps --out steps.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manylora.devices import staging
from manylora.executor.build import build_worker
from manylora.executor.direct import DirectExecutor
from manylora.executor.graphs import Bucket
from manylora.executor.worker import Worker
from manylora.flags import build_settings
from manylora.models.config import read_model_config
from manylora.protocol import (
    AdapterRead,
    CopyDone,
    ReadAdapter,
    RunStep,
    SequenceStart,
    StepRow,
    SwapPages,
)
from manylora.types import BASE, SamplingParams
from manylora.warmup.random_adapters import write_random_adapters
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.benchmarks.h200 import (
    SHAPES,
    adapter_bytes,
    kv_bytes,
    measured_bandwidth,
    weight_bytes,
    write_model,
)

RANK, CONTEXT, PAGE_TOKENS = 16, 256, 16
BATCHES = {"llama-2-7b": (1, 8, 32, 64, 128), "llama-3-8b": (64,)}
COPIED_BATCH, COPIED_PAGES, WAITING, ROUNDS = 32, 32, 4, 4
"""Steps beside copies: their rows; the pages of a copy, of which so many a direction are always under way."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=2000)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1, max_tokens=2000)


class StepBench:
    """A worker with adapters 1 to n on the device, and sequences that decode."""

    def __init__(self, worker: Worker, num_pages: int) -> None:
        self.worker = worker
        self.direct = DirectExecutor(worker)
        self._free = list(range(num_pages))
        self._num_steps = 0
        self.between: Callable[[], None] = lambda: None
        """Called before each step."""

    def load(self, adapters: list[str]) -> float:
        """Bring every adapter into pages of its own; seconds."""
        began = time.perf_counter()
        reads = []
        for number, path in enumerate(adapters, 1):
            count = self.direct.add_adapter(number, path).num_pages
            reads.append(ReadAdapter(number, tuple(self._free.pop() for _ in range(count))))
            self.direct.begin(reads[-1])
        for read in reads:
            answer = self.direct.wait_for(read)
            assert isinstance(answer, AdapterRead)
            assert answer.ok, answer.error
        return time.perf_counter() - began

    def starts(
        self, batch: int, adapted: bool, params: SamplingParams, room: int, context: int = CONTEXT
    ) -> list[SequenceStart]:
        """Sequences with their context computed (whatever lies in the pages) and room for more tokens."""
        count = -(-(context + room) // PAGE_TOKENS)
        pages = self._free[: batch * count]
        tokens = tuple(range(5, 5 + context + 1))
        return [
            SequenceStart(
                number, 0, number if adapted else BASE, tokens, context, context,
                tuple(pages[(number - 1) * count : number * count]), params, (),
            )
            for number in range(1, batch + 1)
        ]  # fmt: skip

    def issue(self, position: int, starts: list[SequenceStart], is_first: bool) -> RunStep:
        self._num_steps += 1
        rows = tuple(StepRow(start.sequence, position, 1, 1) for start in starts)
        step = RunStep(self._num_steps, tuple(starts) if is_first else (), rows)
        self.direct.issue_step(step)
        return step

    def decode(self, starts: list[SequenceStart], steps: int, depth: int) -> dict[str, float]:
        """Milliseconds of the later steps: between the ends of two, median and mean, and to issue one."""
        flying: list[RunStep] = []
        ends, issues = [], []
        for number in range(steps):
            self.between()
            began = time.perf_counter()
            flying.append(self.issue(CONTEXT + number, starts, number == 0))
            issues.append(time.perf_counter() - began)
            if len(flying) == depth:
                done = self.direct.wait_step(flying.pop(0)).done
                assert done.ok, done.error
                ends.append(time.perf_counter())
        for step in flying:
            assert self.direct.wait_step(step).done.ok
        for start in starts:
            self.direct.end_sequence(start.sequence)
        gaps = [after - before for before, after in itertools.pairwise(ends[5:])]
        return {
            "wall_ms": 1e3 * statistics.median(gaps), "mean_ms": 1e3 * statistics.mean(gaps),
            "issue_ms": 1e3 * statistics.median(issues[5:]),
        }  # fmt: skip

    def device_ms(self, starts: list[SequenceStart], adapted: bool, repeats: int) -> float:
        """What the captured step's kernels take, replayed back to back."""
        assert self.direct.wait_step(self.issue(starts[0].num_computed, starts, True)).done.ok
        graphs = self.worker._graphs
        assert graphs is not None
        replay = graphs._captured[Bucket(len(starts), len(starts), RANK if adapted else 0)].replay
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        replay()
        begin.record()
        for _ in range(repeats):
            replay()
        end.record()
        end.synchronize()
        for start in starts:
            self.direct.end_sequence(start.sequence)
        return begin.elapsed_time(end) / repeats

    def pages(self, count: int) -> list[int]:
        """Take pages of the device's pool, which from now on belong to the caller alone."""
        return [self._free.pop() for _ in range(count)]


class Lanes:
    """Keeps copies of pages under way, in one direction or in both."""

    def __init__(self, bench: StepBench, pages: list[int], directions: tuple[bool, ...]) -> None:
        self._direct, self._directions = bench.direct, directions
        half = len(pages) // 2
        # In: into the first half from the host's; out: from the second half into the host's other pages.
        self._pairs = {
            True: list(enumerate(pages[:half])),
            False: list(zip(pages[half:], range(half, len(pages)))),
        }
        self._waiting, self._turns = dict.fromkeys(directions, 0), dict.fromkeys(directions, 0)
        self._copies: list[SwapPages] = []
        self.num_copied = 0

    def top_up(self) -> None:
        for copy in [copy for copy in self._copies if self._direct.has_landed(copy)]:
            self._take(copy)
        for direction in self._directions:
            while self._waiting[direction] < WAITING:
                pairs = self._pairs[direction]
                at = self._turns[direction] * COPIED_PAGES % len(pairs)
                self._turns[direction] += 1
                self._waiting[direction] += 1
                number = sum(self._turns.values())
                self._copies.append(SwapPages(number, direction, tuple(pairs[at : at + COPIED_PAGES])))
                self._direct.begin(self._copies[-1])

    def drain(self) -> None:
        while self._copies:
            self._take(self._copies[0])

    def _take(self, copy: SwapPages) -> None:
        done = self._direct.wait_for(copy)
        assert isinstance(done, CopyDone)
        assert done.ok, done.error
        self._copies.remove(copy)
        self._waiting[copy.to_device] -= 1
        self.num_copied += COPIED_PAGES


def beside_copies(bench: StepBench, steps: int) -> dict[str, Any]:
    """Steps two in flight with saturated lanes against steps alone, in turns: milliseconds, and the ratio."""
    host = bench.worker._host
    deadline = time.monotonic() + 60
    while host.pinned_bytes < host.num_pages * host.shape.page_bytes and time.monotonic() < deadline:
        time.sleep(0.05)
    pages = bench.pages(16 * COPIED_PAGES)
    starts = bench.starts(COPIED_BATCH, True, GREEDY, steps + 1)
    found: dict[str, Any] = {}
    for name, directions in {"in": (True,), "out": (False,), "both": (True, False)}.items():
        alone, beside, rates = [], [], []
        for _ in range(ROUNDS):
            alone.append(bench.decode(starts, steps, 2)["mean_ms"])
            lanes = Lanes(bench, pages, directions)
            bench.between, began = lanes.top_up, time.perf_counter()
            beside.append(bench.decode(starts, steps, 2)["mean_ms"])
            rates.append(lanes.num_copied / (time.perf_counter() - began))
            bench.between = lambda: None
            lanes.drain()
        one, other = statistics.median(alone), statistics.median(beside)
        found[name] = {
            "alone_ms": one,
            "beside_ms": other,
            "slower_by": other / one - 1,
            "pages_per_s": rates[-1],
        }
        print(json.dumps({name: found[name]}), flush=True)
    return found


def measure(bench: StepBench, name: str, bandwidth: float, steps: int) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    graphs = bench.worker._graphs
    rows = []
    for adapted in (False, True):
        for batch in BATCHES[name]:
            floor = weight_bytes(shape) + batch * kv_bytes(shape, CONTEXT + 2 + steps / 2)
            floor += batch * adapter_bytes(shape, RANK) if adapted else 0
            row: dict[str, Any] = {
                "shape": name,
                "batch": batch,
                "lora": f"distinct r{RANK}" if adapted else "none",
            }
            row["floor_ms"] = 1e3 * floor / bandwidth
            starts = bench.starts(batch, adapted, GREEDY, steps + 1)
            # Of the middle one of the steps below, whose context grows.
            middle = bench.starts(batch, adapted, GREEDY, 1, CONTEXT + 2 + steps // 2)
            row["gpu_ms"] = bench.device_ms(middle, adapted, 20)
            for depth in (1, 2):
                found = bench.decode(starts, steps, depth)
                row[f"wall{depth}_ms"], row["issue_ms"] = found["wall_ms"], found["issue_ms"]
            row["idle2_us"] = 1e3 * (row["wall2_ms"] - row["gpu_ms"])
            row["over_floor"] = row["wall2_ms"] / row["floor_ms"]
            sampled = bench.starts(batch, adapted, SAMPLED, steps + 1)
            row["sampled2_ms"] = bench.decode(sampled, steps, 2)["wall_ms"]
            bench.worker._graphs = None
            row["eager1_ms"] = bench.decode(starts, steps, 1)["wall_ms"]
            row["eager2_ms"] = bench.decode(starts, steps, 2)["wall_ms"]
            bench.worker._graphs = graphs
            rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def run(name: str, folder: Path, bandwidth: float, steps: int, parts: list[str]) -> dict[str, Any]:
    """The parts of one shape."""
    batches = BATCHES[name]
    write_model(folder / "model", {**SHAPES[name], "max_position_embeddings": 1024})
    config = read_model_config(folder / "model")
    adapters = write_random_adapters(folder / "adapters", config, "bfloat16", [RANK], max(batches))
    settings, _ = build_settings(
        {
            "model": str(folder / "model"), "device": "cuda", "dtype": "bfloat16", "load_format": "dummy",
            "max_num_seqs": max(batches), "device_pool": "48GiB", "host_pool": "8GiB",
        }
    )  # fmt: skip
    began = time.perf_counter()
    worker, policy, _ = build_worker(settings, registry_path=folder / "adapters.sqlite")
    report: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 2)}
    assert worker._graphs is not None
    report["captured"] = worker._graphs.num_captured
    report["captured_mib"] = round(worker._device.captured_bytes() / 2**20)
    bench = StepBench(worker, policy.num_pages)
    report["adapters_s"] = round(bench.load([str(path) for path in adapters]), 2)
    if "steps" in parts:
        report["steps"] = measure(bench, name, bandwidth, steps)
    if "copies" in parts:
        report["beside_copies"] = beside_copies(bench, 3 * steps)
    worker.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    add_flags(parser)
    parser.add_argument(
        "--numbers-by-engine",
        action="store_true",
        help="a step's own transfers by copy engines, not by kernels",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shapes", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--parts", default="steps,copies")
    args = parser.parse_args()
    staging.NUMBERS_BY_KERNEL = not args.numbers_by_engine
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    recording = Provenance.of(args, "1 of sampled rows; weights and prompts do not depend on one")
    report: dict[str, Any] = {
        "command": recording.command, "commit": recording.commit,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "context": CONTEXT,
    }  # fmt: skip
    report["bandwidth_bytes_per_s"] = bandwidth = measured_bandwidth()
    torch.cuda.empty_cache()
    report["shapes"] = {}
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            report["shapes"][name] = run(name, Path(scratch), bandwidth, args.steps, args.parts.split(","))
        report["provenance"] = recording.provenance()
        Path(args.out).write_text(json.dumps(report, indent=1))
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
