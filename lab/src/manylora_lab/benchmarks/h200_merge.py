"""What merging takes and gives on one GPU: switches, steps, many requests at once, and the rounding of weights.

Llama-2-7B shape, dummy weights, bfloat16, adapters of rank 16 and 64 on all projections. ``switches``: seconds
by copy of the pristine weights, beside what their bytes allow; a restore from the host alone and beside copies
of pages, with the share of their rate that these keep. ``steps``: decoding and prompts of the base, of one
adapter unmerged and merged, and of another one beside it. ``offline``: 32 requests at a time, all of one
adapter, by ``--merge`` and without adapters, at one total of memory. ``rounding``: the demo model in bfloat16
against float32. From the repository's root:

    python -m manylora_lab.benchmarks.h200_merge --time-budget 540 --out merge.json
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manylora.config import MergeConfig
from manylora.protocol import SetMerged, SwitchDone
from manylora.types import BASE
from manylora_lab.bench.dummies import DEMO
from manylora_lab.benchmarks.copy_runs import Lanes
from manylora_lab.benchmarks.engine_rig import ON_CPU, ON_GPU, EngineRig
from manylora_lab.benchmarks.merge_rounding import RoundingRun
from manylora_lab.benchmarks.offline_runs import name_of, offline_rows, run_offline, warmed
from manylora_lab.benchmarks.run_report import Row, RunReport, copy_bandwidth, run_parser
from manylora_lab.benchmarks.step_rig import StepRig

PARTS = ("switches", "steps", "offline", "rounding")
RANKS = (16, 64)
BATCHES, TOY_BATCHES = (1, 8, 32, 64, 128), (1, 4)
CONTEXT, TOY_CONTEXT = 256, 40
PROMPTS, TOY_PROMPTS = [(0, 2000)] * 8, [(0, 60)]
SIZES = {"max_batch_tokens": 16384, "device_pool": "60GiB", "host_pool": "8GiB"}
ROUNDS = 5
DEMO_FOLDER = Path(__file__).resolve().parents[4] / "demo"
KINDS = {"base": (BASE, BASE, BASE), "unmerged": (BASE, 1, 1), "merged": (1, 1, 1), "one beside": (1, 1, 2),
         "others": (1, 2, 2), "base beside": (1, BASE, BASE)}  # fmt: skip
"""Of a step: what is merged, the adapter of its rows, and that of the last one. 1 and 2 have rank 16."""


class MergeRun:
    """A rig with adapters on the device, which gives its worker switches and steps."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig = rig
        self.steps = StepRig(rig.worker, rig.policy.num_pages)
        self.steps.load(list(rig.adapters("merged", (RANKS[0], RANKS[0], RANKS[1]), 3).values()))
        self._numbers = itertools.count(1)

    def switch(self, adapter: int) -> float:
        """Seconds."""
        done = self.steps.direct.set_merged(self._command(adapter))
        assert done.ok, done.error
        return done.switch_s

    def _command(self, adapter: int) -> SetMerged:
        self.steps.merged = adapter
        return SetMerged(next(self._numbers), adapter)

    # ------------------------------------------------------------ switches

    def switches(self, bandwidth: float) -> Row:
        """Median milliseconds of each way; the first of each compiles."""
        ways = {"base to r16": (BASE, 1), "r16 to r16": (1, 2), "r16 to base": (1, BASE), "base to r64": (BASE, 3),
                "r64 to base": (3, BASE)}  # fmt: skip
        found: Row = {}
        for name, (source, target) in ways.items():
            seconds = []
            for _ in range(1 + ROUNDS):
                self.switch(source)
                seconds.append(self.switch(target))
            found[name] = round(1e3 * statistics.median(seconds[1:]), 3)
        self.switch(BASE)
        num_bytes = self.rig.info.pristine_bytes
        return {"bytes": num_bytes, "floor_ms": round(2e3 * num_bytes / bandwidth, 3), **found}

    def beside_pages(self, seconds: float) -> Row:
        """Bytes a second of copies of pages to the device, alone and beside a restore from the host."""
        pages = self.steps.pages(16 * 32)
        self.rig.wait_pinned()
        began_s = time.perf_counter()
        alone, _ = self._copied(pages, lambda: time.perf_counter() - began_s > seconds)
        self.switch(1)
        command = self._command(BASE)
        self.steps.direct.begin(command)
        beside, took_s = self._copied(pages, lambda: self.steps.direct.has_landed(command))
        done = self.steps.direct.wait_for(command)
        assert isinstance(done, SwitchDone)
        assert done.ok, done.error
        return {
            "pages_gb_per_s": round(alone / 1e9, 3), "beside_gb_per_s": round(beside / 1e9, 3),
            "kept": round(beside / alone, 4), "restore_ms": round(1e3 * done.switch_s, 2),
            "wall_ms": round(1e3 * took_s, 2),
        }  # fmt: skip

    def _copied(self, pages: list[int], has_ended: Callable[[], bool]) -> tuple[float, float]:
        """Bytes a second, and seconds."""
        lanes, began_s = Lanes(self.steps.direct, pages, (True,)), time.perf_counter()
        while not has_ended():
            lanes.top_up()
            time.sleep(1e-4)
        took_s = time.perf_counter() - began_s
        rate = lanes.num_copied * self.rig.policy.page_bytes / took_s
        lanes.drain()
        return rate, took_s

    # ------------------------------------------------------------ steps

    def decoding(self, batch: int, context: int, num_steps: int) -> Row:
        """Milliseconds of a decoding step of each kind, in turns: the median of medians."""
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(3):
            for kind, (merged, most, last) in KINDS.items():
                self.switch(merged)
                starts = self.steps.sequences([(context, 1)] * batch, False, room=num_steps)
                whose = [most] * (batch - 1) + [last]
                starts = [dataclasses.replace(start, adapter=a) for start, a in zip(starts, whose)]
                found[kind].append(self.steps.decode_ms(starts, num_steps, 2)["wall_ms"])
        self.switch(BASE)
        return {"rows": batch, **{kind: round(statistics.median(ms), 4) for kind, ms in found.items()}}

    def prompts(self, rows: list[tuple[int, int]]) -> Row:
        """Milliseconds of a step of prompts of each kind."""
        found: Row = {"rows": len(rows), "tokens": sum(count for _, count in rows)}
        for kind, (merged, most, last) in KINDS.items():
            self.switch(merged)
            whose = [most] * (len(rows) - 1) + [last]
            seconds = []
            for step in self.steps.fresh(rows, False, 1 + ROUNDS):
                starts = tuple(dataclasses.replace(s, adapter=a) for s, a in zip(step.starts, whose))
                (timing,) = self.steps.run([dataclasses.replace(step, starts=starts)])
                seconds.append(timing.wall_s)
            found[kind] = round(1e3 * statistics.median(seconds[1:]), 3)
        self.switch(BASE)
        return found


async def offline(rig: EngineRig, report: RunReport) -> None:
    """All requests of one adapter, by mode, and of none. Where nothing is merged the pool has the pristine copy's
    bytes as well."""
    rows, adapters = offline_rows(rig), rig.adapters("offline", (RANKS[0],), 1)
    total = rig.policy.num_pages * rig.policy.page_bytes
    smaller, given = total - rig.info.pristine_bytes, rig.policy.merge
    modes = {
        "unmerged": MergeConfig(),
        "merged": MergeConfig(mode="merged", copy=given.copy, times=given.times),
        "manylora": dataclasses.replace(given, minority="unmerge", mixed_16bit=False),
    }
    for mode, adapter, pool in (
        ("unmerged", None, total), ("unmerged", 0, total), ("merged", 0, smaller), ("manylora", 0, smaller),
    ):  # fmt: skip
        if not report.has(35.0, f"offline {mode} {adapter}"):
            continue
        target = rig.open(adapters, merge=modes[mode], **rig.limits(pool, 32))
        errors = await warmed(rig, target, [adapter])
        found = await run_offline(rig, target, rows, [adapter] * len(rows))
        counters = await target.counters()
        await target.close()
        switches = {name: value for name, value in counters.items() if "switch" in name}
        report.note("offline", {
            "merge": mode, "adapter": name_of(adapter), "pool_bytes": pool, **found, "switches": switches,
            "errors": errors + found["errors"],
        })  # fmt: skip


def run(rig: EngineRig, copy: str, parts: Sequence[str], report: RunReport) -> None:
    """The parts that this copy is for: steps and requests do not depend on it."""
    report.values.setdefault("start_s", {})[copy] = rig.build_s
    report.values.setdefault("measured", {})[copy] = dataclasses.asdict(rig.policy.merge.times)
    merging, is_toy = MergeRun(rig), report.args.toy
    if "switches" in parts and report.has(15.0, f"switches {copy}"):
        report.note("switches", {"copy": copy, **merging.switches(report.values["bandwidth_bytes_per_s"])})
        if copy == "host":
            report.note("beside_pages", merging.beside_pages(0.1 if is_toy else 1.0))
    if copy == "device" and "steps" in parts:
        for batch in TOY_BATCHES if is_toy else BATCHES:
            if report.has(12.0, f"steps of {batch}"):
                context, num_steps = (TOY_CONTEXT, 10) if is_toy else (CONTEXT, report.args.steps)
                report.note("decoding", merging.decoding(batch, context, num_steps))
        if report.has(15.0, "prompts"):
            report.note("prompts", merging.prompts(TOY_PROMPTS if is_toy else PROMPTS))
    merging.steps.forget(3)
    if copy == "device" and "offline" in parts:
        asyncio.run(offline(rig, report))


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, 540.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    report = RunReport(args, "of dummy weights and random adapters, fixed")
    report.values["bandwidth_bytes_per_s"] = copy_bandwidth("cpu" if args.toy else "cuda")
    for copy in ("device", "host"):
        if {"switches", *(["steps", "offline"] if copy == "device" else [])} & set(parts):
            merging = MergeConfig(mode="manylora", copy=copy, minority="mixed", mixed_16bit=True)
            most = max(TOY_BATCHES if args.toy else BATCHES)
            with EngineRig.of("llama-2-7b", args.toy, SIZES, merging, max_num_seqs=most) as rig:
                run(rig, copy, parts, report)
    if "rounding" in parts and report.has(60.0, "rounding"):
        settings = ON_CPU if args.toy else {**ON_GPU, "device_pool": "2GiB", "host_pool": 0}
        found = RoundingRun(DEMO, settings, DEMO_FOLDER, 4 if args.toy else 40)
        for row in found.rows():
            report.note("rounding", row)
    report.save()
    print(json.dumps(report.values), flush=True)


if __name__ == "__main__":
    main()
