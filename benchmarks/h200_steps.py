"""Decoding steps of the Llama-2-7B shape on one GPU, eager and captured, beside their byte floor.

First the GPU tests of captured steps. Then, with dummy weights in bfloat16, batches of 1 to 128 sequences of 256
tokens, on the base model and over as many adapters of rank 16: what the kernels of a step take (captured steps
replayed back to back), and what a step takes on the wall clock when it is issued after the step before has ended
and while it still runs. About three minutes; the last line is JSON. From the repository's root:

    python -m benchmarks.h200_steps --out steps.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200 import SHAPES, adapter_bytes, kv_bytes, measured_bandwidth, weight_bytes, write_model
from manylora.bench.random_adapters import write_random_adapters
from manylora.executor.build import build_worker
from manylora.executor.graphs import Bucket
from manylora.executor.worker import Worker
from manylora.flags import build_settings
from manylora.models.config import read_model_config
from manylora.protocol import AdapterRead, IssuedStep, ReadAdapter, RunStep, SequenceStart, StepRow
from manylora.types import BASE, SamplingParams

SHAPE, RANK, CONTEXT, PAGE_TOKENS = "llama-2-7b", 16, 256, 16
BATCHES = (1, 8, 32, 64, 128)
GREEDY = SamplingParams(temperature=0.0, max_tokens=2000)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1, max_tokens=2000)
TESTS = ("tests/gpu/test_graphs.py", "tests/executor/test_sampler.py")


class Bench:
    """A worker with adapters 1 to n on the device, and sequences that decode."""

    def __init__(self, worker: Worker, num_pages: int) -> None:
        self.worker = worker
        self._free = list(range(num_pages))
        self._num_steps = 0

    def load(self, adapters: list[str]) -> float:
        """Bring every adapter into pages of its own; seconds."""
        began = time.perf_counter()
        answers: list[AdapterRead] = []
        done = threading.Semaphore(0)

        def answer(read: AdapterRead) -> None:
            answers.append(read)
            done.release()

        for number, path in enumerate(adapters, 1):
            count, _ = self.worker.add_adapter(number, path)
            pages = tuple(self._free.pop() for _ in range(count))
            self.worker.read_adapter(ReadAdapter(number, pages), answer)
        for _ in adapters:
            done.acquire()
        assert all(read.ok for read in answers), [read.error for read in answers if not read.ok]
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

    def issue(self, position: int, starts: list[SequenceStart], is_first: bool) -> IssuedStep:
        self._num_steps += 1
        rows = tuple(StepRow(start.sequence, position, 1, 1) for start in starts)
        return self.worker.issue_step(RunStep(self._num_steps, tuple(starts) if is_first else (), rows))

    def decode(self, starts: list[SequenceStart], steps: int, depth: int) -> dict[str, float]:
        """Medians over the later steps, in milliseconds: between the ends of two steps, and to issue one."""
        flying: list[IssuedStep] = []
        ends, issues = [], []
        for number in range(steps):
            began = time.perf_counter()
            flying.append(self.issue(CONTEXT + number, starts, number == 0))
            issues.append(time.perf_counter() - began)
            if len(flying) == depth:
                done = flying.pop(0).wait().done
                assert done.ok, done.error
                ends.append(time.perf_counter())
        for step in flying:
            assert step.wait().done.ok
        for start in starts:
            self.worker.end_sequence(start.sequence)
        gaps = [after - before for before, after in itertools.pairwise(ends[5:])]
        return {"wall_ms": 1e3 * statistics.median(gaps), "issue_ms": 1e3 * statistics.median(issues[5:])}

    def device_ms(self, starts: list[SequenceStart], adapted: bool, repeats: int) -> float:
        """What the captured step's kernels take, replayed back to back."""
        assert self.issue(starts[0].num_computed, starts, True).wait().done.ok
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
            self.worker.end_sequence(start.sequence)
        return begin.elapsed_time(end) / repeats


def measure(bench: Bench, bandwidth: float, steps: int) -> list[dict[str, Any]]:
    shape = SHAPES[SHAPE]
    graphs = bench.worker._graphs
    rows = []
    for adapted in (False, True):
        for batch in BATCHES:
            floor = weight_bytes(shape) + batch * kv_bytes(shape, CONTEXT + 2 + steps / 2)
            floor += batch * adapter_bytes(shape, RANK) if adapted else 0
            row: dict[str, Any] = {"batch": batch, "lora": f"distinct r{RANK}" if adapted else "none"}
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


def check(limit_s: float) -> dict[str, Any]:
    """The GPU tests; their last lines are printed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-rA", "--no-header", *TESTS]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        said, code = ran.stdout + ran.stderr, ran.returncode
    except subprocess.TimeoutExpired as error:
        said, code = (error.stdout or b"").decode(), -1
    print(said[-5000:], flush=True)
    return {"returncode": code, "seconds": round(time.perf_counter() - began, 1), "said": said[-200:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--commit", default="unknown", help="noted in the report")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-tests", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    report: dict[str, Any] = {
        "command": "python -m " + " ".join(["benchmarks.h200_steps", *sys.argv[1:]]), "commit": args.commit,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "context": CONTEXT,
    }  # fmt: skip
    if not args.no_tests:
        report["tests"] = check(150.0)
    report["bandwidth_bytes_per_s"] = bandwidth = measured_bandwidth()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", {**SHAPES[SHAPE], "max_position_embeddings": 1024})
        config = read_model_config(folder / "model")
        adapters = write_random_adapters(folder / "adapters", config, "bfloat16", [RANK], max(BATCHES))
        settings, _ = build_settings(
            {
                "model": str(folder / "model"), "device": "cuda", "dtype": "bfloat16", "load_format": "dummy",
                "max_num_seqs": max(BATCHES), "device_pool": "48GiB", "host_pool": 0,
            }
        )  # fmt: skip
        began = time.perf_counter()
        worker, policy, _ = build_worker(settings, registry_path=folder / "adapters.sqlite")
        report["start_s"] = round(time.perf_counter() - began, 2)
        assert worker._graphs is not None
        report["captured"] = worker._graphs.num_captured
        report["captured_mib"] = round(worker._device.captured_bytes() / 2**20)
        bench = Bench(worker, policy.num_pages)
        report["adapters_s"] = round(bench.load([str(path) for path in adapters]), 2)
        report["steps"] = measure(bench, bandwidth, args.steps)
        worker.close()
    Path(args.out).write_text(json.dumps(report, indent=1))
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
