"""Where the device's time goes in a step: its kernels by name, beside the step's wall clock.

Llama-2-7B shape, dummy weights, bfloat16. Steps as the offline, prefill and one-request workloads have them; each
runs a few times one after another, then under the profiler. ``--picture`` draws a record, whenever it was
measured. From the repository's root:

    python -m manylora_lab.benchmarks.h200_trace --out trace.json
    python -m manylora_lab.benchmarks.h200_trace --out docs/results/h200_trace.json --picture h200_trace.png
"""

from __future__ import annotations

import collections
import cProfile
import json
import pstats
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser
from manylora_lab.benchmarks.step_rig import StepRig
from manylora_lab.reproduce.drawing import StackedBars
from manylora_lab.reproduce.report import ExperimentReport

RANK = 16
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
TOY_STEPS = {"decode 4": [(40, 1)] * 4, "prompt of 64": [(0, 64)]}

MOST_GAP_US = 50.0
"""Between two kernels of one step; longer ones lie between steps."""

KINDS = {
    "products": ("nvjet", "linear_kernel", "cublas", "gemm"),
    "attention": ("decode_kernel", "attend", "combine", "flashinfer"),
    "LoRA": ("shrink", "expand"),
    "norms, rope, SiLU": ("rms_norm", "rotate", "silu", "gated_sum"),
}
"""What kernels are, by how their names begin."""
OTHERS = "gaps and others"
draw = StackedBars([(kind, kind) for kind in (*KINDS, OTHERS)], "step", "adapters", "ms on the device")


class TraceRun:
    """One kind of step on a rig, and what can be seen of it."""

    def __init__(self, steps: StepRig, rows: list[tuple[int, int]], adapted: bool, is_toy: bool) -> None:
        self._steps, self._rows, self._adapted = steps, rows, adapted
        self._activity = ProfilerActivity.CPU if is_toy else ProfilerActivity.CUDA

    def times_ms(self, repeats: int) -> dict[str, float]:
        """Medians: to issue a step, and until its tokens are there."""
        found = self._steps.run(self._steps.fresh(self._rows, self._adapted, repeats))
        return {
            "issue_ms": round(1e3 * statistics.median(one.issue_s for one in found), 3),
            "wall_ms": round(1e3 * statistics.median(one.wall_s for one in found), 3),
        }

    def kernels(self, repeats: int) -> Row:
        """What one step's kernels take on the device, by name: [us, how many], the longest first."""
        with profile(activities=[self._activity]) as profiler:
            self.times_ms(repeats)
            if self._activity is ProfilerActivity.CUDA:
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

    def host_us(self, repeats: int) -> dict[str, float]:
        """Where issuing a step takes the host's time: functions and what they call, under the profiler."""
        profiler, direct = cProfile.Profile(), self._steps.direct
        for step in self._steps.fresh(self._rows, self._adapted, repeats):
            profiler.runcall(direct.issue_step, step)
            assert direct.wait_step(step).done.ok
        found = {name: row[3] for (_, _, name), row in pstats.Stats(profiler).stats.items()}  # type: ignore[attr-defined]
        longest = sorted(found.items(), key=lambda item: -item[1])[:24]
        return {name: round(1e6 * seconds / repeats, 1) for name, seconds in longest}


def short(name: str) -> str:
    """A kernel's name without its namespaces and template arguments."""
    return re.sub(r"^void |at::native::|<.*|\(.*", "", name)[:60]


def parts_ms(step: Row) -> Row:
    """Of a step's kernels by kind, and the rest. LoRA is what is left where there are adapters: its kernels begin
    while others end, so that their own times hold waiting."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, (us, _) in step["by_name"].items():
        kind = next((kind for kind, starts in KINDS.items() if name.startswith(starts)), None)
        if kind is not None:
            found[kind] += us
    if step["adapters"]:
        found["LoRA"] += step["busy_us"] - sum(found.values())
    found[OTHERS] = step["busy_us"] + step["gaps_us"] - sum(found.values())
    return {kind: us / 1e3 for kind, us in found.items()}


def picture(record: Row, path: Path) -> None:
    """Each step's parts, on the base and with LoRA."""
    rows = [
        {"step": step["step"], "adapters": "LoRA" if step["adapters"] else "base", **parts_ms(step)}
        for step in record["steps"]
    ]
    settings = {"device": record["device"]}
    draw(ExperimentReport("h200_trace", "where a step's time goes", settings, rows, []), path)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, a setting of the engine")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--picture", type=Path, help="draw what --out has, and measure nothing")
    args = parser.parse_args(argv)
    if args.picture is not None:
        picture(json.loads(Path(args.out).read_text()), args.picture)
        return
    report = RunReport(args, "none: weights and prompts do not depend on one")
    sizes = {"max_batch_tokens": 16384, "device_pool": "48GiB", "host_pool": 0}
    settings = dict(one.split("=", 1) for one in args.set)
    with EngineRig.of("llama-2-7b", args.toy, sizes, **settings) as rig:
        steps = StepRig(rig.worker, rig.policy.num_pages)
        chosen = TOY_STEPS if args.toy else STEPS
        steps.load(rig.adapters("rank-16", (RANK,), max(map(len, chosen.values()))).values())
        for name, rows in chosen.items():
            for adapted in (False, True):
                step = TraceRun(steps, rows, adapted, args.toy)
                step.times_ms(3)
                row = {"step": name, "adapters": adapted, **step.times_ms(args.repeats)}
                row |= step.kernels(min(args.repeats, 4))
                report.note("steps", {**row, "host_us": step.host_us(args.repeats)})


if __name__ == "__main__":
    main()
