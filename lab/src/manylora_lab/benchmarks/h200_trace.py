"""Where the device's time goes in a step: its kernels by name, beside the step's wall clock.

Llama-2-7B shape, dummy weights, bfloat16. Steps as the offline, prefill and one-request workloads have them; each
runs a few times one after another, then under the profiler. From the repository's root:

    python -m manylora_lab.benchmarks.h200_trace --out trace.json
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import json
import logging
import pstats
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from manylora.executor.build import build_worker
from manylora.flags import build_settings
from manylora.models.config import read_model_config
from manylora.protocol import RunStep, SequenceStart, StepRow
from manylora.types import BASE
from manylora.warmup.random_adapters import write_random_adapters
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.benchmarks.h200 import SHAPES, write_model
from manylora_lab.benchmarks.h200_steps import GREEDY, PAGE_TOKENS, RANK, StepBench

SHAPE = "llama-2-7b"
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode 1": [(300, 1)],
    "decode 32": [(300, 1)] * 32,
    "decode 128": [(300, 1)] * 128,
    "32 decoding, a prompt of 220": [(300, 1)] * 31 + [(0, 220)],
    "32 decoding, a prompt of 600": [(300, 1)] * 31 + [(0, 600)],
    "prompt of 64": [(0, 64)],
    "8 prompts of 2000": [(0, 2000)] * 8,
}
"""A step's rows: computed tokens, and tokens to compute."""

MOST_GAP_US = 50.0
"""Between two kernels of one step; longer ones lie between steps."""


class TraceSteps(StepBench):
    """Runs steps of sequences that begin with the step, on pages that no other step reads."""

    def issue_rows(self, rows: list[tuple[int, int]], is_adapted: bool) -> tuple[float, RunStep]:
        """Issue a step; the seconds that took."""
        starts, step_rows, first_page = [], [], 0
        for adapter, (computed, count) in enumerate(rows, 1):
            self._num_steps += 1
            tokens = tuple(range(5, 5 + computed + count))
            num_pages = -(-(len(tokens) + 1) // PAGE_TOKENS)
            pages = tuple(self._free[first_page : first_page + num_pages])
            first_page += num_pages
            starts.append(
                SequenceStart(
                    self._num_steps, 0, adapter if is_adapted else BASE, tokens, len(tokens), computed, pages,
                    GREEDY, (),
                )
            )  # fmt: skip
            step_rows.append(StepRow(self._num_steps, computed, count, 1))
        step = RunStep(self._num_steps, tuple(starts), tuple(step_rows))
        began = time.perf_counter()
        self.direct.issue_step(step)
        seconds = time.perf_counter() - began
        for start in starts:
            self.direct.end_sequence(start.sequence)
        return seconds, step

    def run(self, rows: list[tuple[int, int]], is_adapted: bool, repeats: int) -> dict[str, float]:
        """Medians in ms: to issue a step, and until its tokens are there."""
        issues, walls = [], []
        for _ in range(repeats):
            began = time.perf_counter()
            seconds, step = self.issue_rows(rows, is_adapted)
            done = self.direct.wait_step(step).done
            walls.append(time.perf_counter() - began)
            issues.append(seconds)
            assert done.ok, done.error
        return {"issue_ms": 1e3 * statistics.median(issues), "wall_ms": 1e3 * statistics.median(walls)}


def short(name: str) -> str:
    """A kernel's name without its namespaces and template arguments."""
    name = re.sub(r"^void ", "", name)
    return re.sub(r"(at::native::|<.*|\(.*)", "", name)[:60]


def kernels_of(
    steps: TraceSteps, rows: list[tuple[int, int]], is_adapted: bool, repeats: int
) -> dict[str, Any]:
    """What one step's kernels took on the device, by name: [us, how many], the longest first."""
    steps.run(rows, is_adapted, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps.run(rows, is_adapted, repeats)
        torch.cuda.synchronize()
    took: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    spans = []
    for event in profiler.events():
        begin, end = event.time_range.start, event.time_range.end
        if event.name.startswith(("Activity Buffer", "cuda", "cu")):
            continue
        spans.append((begin, end))
        took[short(event.name)][0] += (end - begin) / repeats
        took[short(event.name)][1] += 1 / repeats
    busy, gaps, last = 0.0, 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, last))
        if 0.0 < begin - last < MOST_GAP_US:
            gaps += begin - last
        last = max(last, end)
    longest = sorted(took.items(), key=lambda item: -item[1][0])[:16]
    return {
        "busy_us": round(busy / repeats, 1), "gaps_us": round(gaps / repeats, 1),
        "kernels": sum(count for _, count in took.values()),
        "by_name": {name: [round(us, 1), round(count, 2)] for name, (us, count) in longest},
    }  # fmt: skip


def host_of(
    steps: TraceSteps, rows: list[tuple[int, int]], is_adapted: bool, repeats: int
) -> dict[str, float]:
    """Where issuing a step takes the host's time: us of functions and what they call, under the profiler."""
    profiler = cProfile.Profile()
    for _ in range(repeats):
        profiler.enable()
        _, step = steps.issue_rows(rows, is_adapted)
        profiler.disable()
        assert steps.direct.wait_step(step).done.ok
    found = {name: row[3] for (_, _, name), row in pstats.Stats(profiler).stats.items()}  # type: ignore[attr-defined]
    longest = sorted(found.items(), key=lambda item: -item[1])[:24]
    return {name: round(1e6 * seconds / repeats, 1) for name, seconds in longest}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    add_flags(parser)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, a setting of the engine")
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    recording = Provenance.of(args, "none: weights and prompts do not depend on one")
    report: dict[str, Any] = {
        "command": recording.command, "commit": recording.commit,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", SHAPES[SHAPE])
        config = read_model_config(folder / "model")
        paths = write_random_adapters(folder / "adapters", config, "bfloat16", [RANK], 128)
        engine = {
            "model": str(folder / "model"), "device": "cuda", "dtype": "bfloat16", "load_format": "dummy",
            "max_num_seqs": 128, "max_batch_tokens": 16384, "device_pool": "48GiB", "host_pool": 0,
        } | dict(one.split("=", 1) for one in args.set)  # fmt: skip
        worker, policy, _ = build_worker(build_settings(engine)[0], registry_path=folder / "registry.sqlite")
        steps = TraceSteps(worker, policy.num_pages)
        steps.load([str(path) for path in paths])
        for name, rows in STEPS.items():
            for is_adapted in (False, True):
                steps.run(rows, is_adapted, 3)
                found = steps.run(rows, is_adapted, args.repeats)
                row = {"step": name, "adapters": is_adapted, **{k: round(v, 3) for k, v in found.items()}}
                row |= kernels_of(steps, rows, is_adapted, min(args.repeats, 4))
                row["host_us"] = host_of(steps, rows, is_adapted, args.repeats)
                report["steps"].append(row)
                print(json.dumps(row), flush=True)
                report["provenance"] = recording.provenance()
                Path(args.out).write_text(json.dumps(report, indent=1))
        worker.close()


if __name__ == "__main__":
    main()
