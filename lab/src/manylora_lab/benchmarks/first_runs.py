"""One request at a time: how soon its first token comes, and where the time goes; adapters that come and go."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import statistics
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch

from manylora.executor import graphs
from manylora_lab.bench.targets import EngineTarget, TargetRequest
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.offline_runs import MIXED_RANKS, MIXED_ROWS, RANK, adapters_of, again
from manylora_lab.benchmarks.run_report import RunReport
from manylora_lab.pricing.shapes import ALL_MODULES

NONE, WARM, HOST, NEVER = "no adapter", "warm adapter", "adapter in host memory", "adapter never read"
FIRST_RUNS = {NONE: (None, None), WARM: (10.6, 5), HOST: (21.2, 7), NEVER: (113.7, 50)}
"""Milliseconds: vLLM's, and what is aimed at."""
CHURNING = 8


async def first_token(target: EngineTarget, call: TargetRequest) -> tuple[float, float]:
    """When it was asked for and when its first token came, by ``time.monotonic``. Raises RuntimeError where it
    failed."""
    began_s = time.monotonic()
    answer = await target.generate(call)
    if answer.error is not None or answer.first_s is None:
        raise RuntimeError(answer.error)
    return began_s, answer.first_s


def pages_of(rig: EngineRig, rank: int) -> int:
    """Pages of an adapter of this rank on all projections, and one."""
    return rig.shape.adapter_pages(rank, rig.policy.page_tokens, ALL_MODULES) + 1


def pool_of_two(rig: EngineRig, rank: int, prompt: int) -> int:
    """Pages for two such adapters and two prompts of so many tokens, and some."""
    room = 2 * -(-2 * prompt // rig.policy.page_tokens) + 8
    return min(2 * pages_of(rig, rank) + room, rig.policy.num_pages)


def few_captures(tokens: tuple[int, ...], rows: int) -> AbstractContextManager[object]:
    """Within it steps are captured at these sizes alone: with prompts of so many tokens, decoding with one row,
    ``rows`` and as many as there may be."""
    return mock.patch.multiple(graphs, MIXED_TOKENS=tokens, bucket_sizes=lambda most: sorted({1, rows, most}))


async def first(rig: EngineRig, report: RunReport) -> None:
    """One request at a time, of 64 tokens with one token out: the median time to it, in ms, and when, on the way,
    the worker was asked for what and had done it."""
    for repeat in range(report.repeats):
        if report.has(15.0, f"first{again(repeat)}"):
            await _first(rig, report, repeat)


async def _first(rig: EngineRig, report: RunReport, repeat: int) -> None:
    adapters = list(adapters_of(rig))[:40]
    # Room for 8 adapters, so that those not used for long are in host memory only.
    target = rig.open(adapters_of(rig), num_pages=8 * pages_of(rig, RANK) + 16, max_model_len=128)
    taken: dict[str, list[float]] = {}
    parts: dict[str, dict[str, list[float]]] = {}

    async def ask(adapter: str | None, kind: str) -> None:
        call = rig.call(64, 1, adapter)
        rig.noted.moments.clear()
        began_s, first_s = await first_token(target, call)
        for what, moment_s in (*rig.noted.moments, ("delivered", first_s)):
            parts.setdefault(kind, {}).setdefault(what, []).append(1e3 * (moment_s - began_s))
        taken.setdefault(kind, []).append(1e3 * (first_s - began_s))
        await asyncio.sleep(0.02)

    for number in range(20):
        await ask(None, NONE if number > 1 else "at the start")
    for adapter in adapters:
        await ask(adapter, NEVER)
    await asyncio.sleep(0.5)
    for adapter in adapters:
        await ask(adapter, HOST)
    for adapter in adapters[-4:]:
        for number in range(6):
            await ask(adapter, WARM if number else "to warm it")
    stats = await target.counters()
    await target.close()
    for kind, (vllm, aim) in FIRST_RUNS.items():
        moments = {what: round(statistics.median(each), 3) for what, each in parts[kind].items()}
        middle, most = statistics.median(taken[kind]), max(taken[kind])
        row = {"kind": kind, "repeat": repeat, "ms": middle, "most_ms": most, "vllm_ms": vllm, "aim_ms": aim}
        report.note("first", {**row, "moments_ms": moments})
    report.values["first_steps"] = rig.noted.by_tokens()
    report.values["first_counters"] = {name: stats[name] for name in ("adapter_reads", "adapter_evictions")}


async def churn(rig: EngineRig, report: RunReport) -> None:
    """Load, use and unload adapters at random, under a pool that holds a third of them; then every page and byte
    must be back."""
    seconds, sample_s = (1.0, 0.2) if rig.is_toy else (report.args.churn_s, 10.0)
    if not report.has(seconds, "churn"):
        return
    adapters = rig.adapters("mixed", MIXED_RANKS, MIXED_ROWS)
    held = sum(rig.shape.adapter_bytes(rank, ALL_MODULES) for rank in MIXED_RANKS) * MIXED_ROWS // 4 // 3
    room = 2**19 if rig.is_toy else 2 * 2**30
    target = rig.open(adapters, **rig.limits(held + room, rig.policy.max_num_seqs))
    driver, counts = target.driver, Counter[str]()
    longest = 40 if rig.is_toy else 200

    async def work(worker: int) -> None:
        """Works on adapters of its own, so that unloading one never surprises another's request."""
        chosen, mine = random.Random(worker), sorted(adapters)[worker::CHURNING]
        while time.monotonic() < ends_s:
            name = chosen.choice(mine)
            calls = [
                rig.call(chosen.randrange(8, longest), 24, one) for one in (name, None, chosen.choice(mine))
            ]
            for answer in await asyncio.gather(*(target.generate(call) for call in calls)):
                if answer.error is not None:
                    raise RuntimeError(answer.error)
            counts["requests"] += len(calls)
            if chosen.random() < 0.3:
                await asyncio.wrap_future(driver.remove_adapter(name))
                await asyncio.to_thread(driver.add_adapter, name, adapters[name])
                counts.update(("loads", "unloads"))

    gc.collect()
    device_before, before = device_bytes(rig), await target.counters()
    ends_s = time.monotonic() + seconds
    workers = asyncio.gather(*(work(number) for number in range(CHURNING)))
    samples = []
    while not workers.done():
        samples.append((device_bytes(rig) - device_before, private_bytes()))
        await asyncio.wait([workers], timeout=sample_s)
    await workers
    after = await target.counters()
    for name in adapters:
        await asyncio.wrap_future(driver.remove_adapter(name))
    end = await target.counters()
    await target.close()
    gc.collect()
    passed = {
        name: after[name] - before[name]
        for name in (
            "adapter_reads",
            "adapter_evictions",
            "history_evictions",
            "preemptions",
            "adapter_read_s",
        )
    }
    row = {
        "shape": rig.shape.name, "seconds": seconds, **counts, **passed,
        "mean_read_ms": 1e3 * passed["adapter_read_s"] / max(1, passed["adapter_reads"]),
        "pages_leaked": end["pages_total"] - end["pages_free"] - end["pages_history"],
        "adapter_pages_left": end["pages_adapters"], "running_pages_left": end["pages_running"],
        "device_bytes_grown": device_bytes(rig) - device_before, "sample_s": sample_s,
        "device_bytes_grown_samples": [device for device, _ in samples],
        "host_private_bytes_samples": [host for _, host in samples],
    }  # fmt: skip
    report.note("churn", row)
    left = [row[name] for name in ("pages_leaked", "adapter_pages_left", "running_pages_left")]
    if any(left):
        raise RuntimeError(f"pages are left: {left}")


def device_bytes(rig: EngineRig) -> int:
    return torch.cuda.memory_allocated() if rig.device == "cuda" else 0


def private_bytes() -> int:
    """The memory of this process, without shared memory: the host's pool is that, and fills while it is used."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()
