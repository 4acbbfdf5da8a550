"""Runs of many requests at once, as data and what is computed of each: rates beside vLLM's and the byte floors."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from manylora_lab.bench.targets import EngineTarget, TargetResult
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.run_report import Row, RunReport, copy_bandwidth
from manylora_lab.benchmarks.step_rig import step_bytes
from manylora_lab.workloads.chat import TRACES

RANK = 16
NUM_ADAPTERS, TOY_ADAPTERS = 128, 8
OFFLINE = TRACES / "offline_1000.jsonl.gz"


@dataclasses.dataclass(frozen=True)
class KnownRates:
    """Tokens a second of the same run: vLLM's, what is aimed at, and what bytes and operations allow."""

    vllm: int
    aim: int
    floor: int | None = None


OFFLINE_RUNS: Mapping[tuple[int, str | None], KnownRates] = {
    (32, None): KnownRates(3298, 4300, 5081),
    (32, "identical"): KnownRates(1760, 4000, 5062),
    (32, "uniform"): KnownRates(1363, 3850, 4788),
    (32, "distinct"): KnownRates(1150, 3600, 4643),
    (128, None): KnownRates(5271, 6300, 7856),
    (128, "distinct"): KnownRates(1788, 5300, 7051),
    (32, "skewed"): KnownRates(1583, 3900, 4960),
}
"""Generated tokens by ``max_num_seqs`` and popularity."""
PREFILL_RUNS: Mapping[str | None, KnownRates] = {
    None: KnownRates(44767, 46000, 58800),
    "adapters": KnownRates(30914, 43000),
}
"""Prompt tokens of 8 prompts of 2,000."""
MIXED_RANKS = (8, 16, 32, 64)
MIXED_ROWS, MIXED_PROMPT, MIXED_REPLY = 64, 128, 256


def adapters_of(rig: EngineRig) -> dict[str, str]:
    """What the runs' requests are for: adapters of rank 16 on all projections."""
    return rig.adapters("rank-16", (RANK,), TOY_ADAPTERS if rig.is_toy else NUM_ADAPTERS)


def failed(answers: Sequence[TargetResult]) -> list[str]:
    """The first error, if any."""
    return [answer.error for answer in answers if answer.error is not None][:1]


def name_of(adapter: int | None) -> str | None:
    return None if adapter is None else f"adapter-{adapter}"


def again(repeat: int) -> str:
    """What a run's name has behind it."""
    return f", repeat {repeat}" if repeat else ""


def read_offline_rows(is_toy: bool) -> list[dict[str, int]]:
    """Lengths and adapters, by popularity, of the 1,000 requests; of a toy few and short ones."""
    with gzip.open(OFFLINE, "rt") as file:
        rows = [json.loads(line) for line in file]
    if not is_toy:
        return rows
    lengths = ("prompt_tokens", "output_tokens")
    return [{**row, **{name: row[name] // 16 + 1 for name in lengths}} for row in rows[:40]]


def offline_rows(rig: EngineRig) -> list[dict[str, int]]:
    return read_offline_rows(rig.is_toy)


async def run_offline(
    rig: EngineRig, target: EngineTarget, rows: Sequence[dict[str, int]], adapters: Sequence[int | None]
) -> Row:
    """All at once, until the last has ended."""
    calls = [
        rig.call(row["prompt_tokens"], row["output_tokens"], name_of(adapter))
        for row, adapter in zip(rows, adapters)
    ]
    before = await target.counters()
    rig.noted.steps.clear()
    began_s = time.monotonic()
    answers = await asyncio.gather(*(target.generate(call) for call in calls))
    seconds = time.monotonic() - began_s
    after = await target.counters()
    passed = {name: after[name] - before[name] for name in after if name in before}
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "tokens_per_s": num_tokens / seconds, "seconds": seconds, "tokens": num_tokens,
        "steps": passed["steps"], "busy": passed["step_s"] / seconds, "preemptions": passed["preemptions"],
        "pages_swapped_in": passed["pages_swapped_in"], "steps_by_tokens": rig.noted.by_tokens(),
        "errors": failed(answers),
    }  # fmt: skip


async def warmed(rig: EngineRig, target: EngineTarget, adapters: Sequence[int | None]) -> list[str]:
    """A short request of each at once; the first error."""
    calls = [rig.call(8, 2, name_of(adapter)) for adapter in adapters]
    return failed(await asyncio.gather(*(target.generate(call) for call in calls)))


async def offline(rig: EngineRig, report: RunReport) -> None:
    """1,000 requests given at once; the runs take turns."""
    rows, adapters = offline_rows(rig), adapters_of(rig)
    at_once, popularities = report.args.at_once.split(","), report.args.popularities.split(",")
    for repeat in range(report.repeats):
        for (num_seqs, popularity), beside in OFFLINE_RUNS.items():
            if str(num_seqs) not in at_once or (popularity or "none") not in popularities:
                continue
            if not report.has(32.0, f"offline {num_seqs} {popularity}{again(repeat)}"):
                continue
            target = rig.open(adapters, max_num_seqs=num_seqs)
            chosen = [None if popularity is None else row[popularity] % len(adapters) for row in rows]
            errors = await warmed(rig, target, [*dict.fromkeys(chosen), None])
            found = await run_offline(rig, target, rows, chosen)
            await target.close()
            row = {"max_num_seqs": num_seqs, "popularity": popularity, "repeat": repeat}
            row |= {**dataclasses.asdict(beside), **found}
            report.note("offline", {**row, "errors": errors + found["errors"]})


async def many(rig: EngineRig, report: RunReport) -> None:
    """Every one of the 1,000 requests on an adapter of its own, all of which are in host memory."""
    rows = offline_rows(rig)
    if not report.has(130.0, "many"):
        return
    target = rig.open(rig.adapters("many", (RANK,), len(rows)), max_num_seqs=32)
    everyone = list(range(len(rows)))
    began_s = time.monotonic()
    errors = await warmed(rig, target, everyone)
    read_s = time.monotonic() - began_s
    for repeat in range(report.repeats):
        if repeat and not report.has(36.0, f"many{again(repeat)}"):
            continue
        found = await run_offline(rig, target, rows, everyone)
        errors += found["errors"]
        report.note(
            "many", {"max_num_seqs": 32, "repeat": repeat, "read_s": read_s, **found, "errors": errors}
        )
    await target.close()


async def prefill(rig: EngineRig, report: RunReport) -> None:
    """8 prompts of 2,000 tokens, one token out: the median of five."""
    length = 60 if rig.is_toy else 2000
    target = rig.open(adapters_of(rig))
    for kind, beside in PREFILL_RUNS.items():
        if not report.has(8.0, f"prefill {kind}"):
            continue
        seconds, errors = [], []
        for _ in range(6):  # the first one compiles
            calls = [rig.call(length, 1, None if kind is None else name_of(number)) for number in range(8)]
            began_s = time.monotonic()
            answers = await asyncio.gather(*(target.generate(call) for call in calls))
            seconds.append(time.monotonic() - began_s)
            errors += failed(answers)
        rate = 8 * length / statistics.median(seconds[1:])
        row = {"kind": kind, "tokens_per_s": rate, **dataclasses.asdict(beside)}
        report.note("prefill", {**row, "ms": [round(1e3 * one, 2) for one in seconds], "errors": errors[:1]})
    report.values["prefill_steps"] = rig.noted.by_tokens()
    await target.close()


async def mixed(rig: EngineRig, report: RunReport) -> None:
    """64 requests on the base, then over 64 adapters of mixed ranks: the median of three, and the mean step
    beside what it must read."""
    bandwidth = copy_bandwidth(rig.device)
    rows = [{"prompt_tokens": MIXED_PROMPT, "output_tokens": MIXED_REPLY}] * MIXED_ROWS
    shape, context = rig.shape, MIXED_PROMPT + MIXED_REPLY / 2
    ranks = [MIXED_RANKS[number % len(MIXED_RANKS)] for number in range(MIXED_ROWS)]
    target = rig.open(rig.adapters("mixed", MIXED_RANKS, MIXED_ROWS))
    if rig.is_toy:
        rows = [{"prompt_tokens": 20, "output_tokens": 8}] * 8
    for kind, adapters in (("base", [None] * len(rows)), ("mixed", list(range(len(rows))))):
        num_bytes = step_bytes(shape, MIXED_ROWS, context, ranks if kind == "mixed" else ())
        floor_s = num_bytes / bandwidth
        await run_offline(rig, target, rows, adapters)  # compiles kernels, reads adapters
        for repeat in range(report.repeats):
            if not report.has(20.0, f"mixed {kind}{again(repeat)}"):
                continue
            runs = [await run_offline(rig, target, rows, adapters) for _ in range(3)]
            found = sorted(runs, key=lambda run: run["seconds"])[1]
            step_s = found["busy"] * found["seconds"] / found["steps"]
            row = {
                "shape": shape.name, "kind": kind, "repeat": repeat, **found, "mean_step_ms": 1e3 * step_s,
                "floor_step_ms": 1e3 * floor_s, "step_over_floor": step_s / floor_s,
            }  # fmt: skip
            report.note("mixed", row)
    await target.close()


def start(rig: EngineRig, report: RunReport) -> None:
    """Seconds from the start of a process to an engine that is ready, compile caches being warm. The worker of
    the rig is closed."""
    code = (
        "import json, sys; from manylora import LLM; values = json.loads(sys.argv[1]); "
        "llm = LLM(values.pop('model'), **values); print('ready', flush=True); llm.close()"
    )
    settings: dict[str, Any] = {**rig.settings, "host_pool": 0}
    began_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(settings)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError("the engine did not start")
        report.note("start", {"again_s": time.monotonic() - began_s})
