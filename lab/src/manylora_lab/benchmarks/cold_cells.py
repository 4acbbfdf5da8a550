"""Which way of beginning answers a cold request first, really run: cells between the points of ``cold-start-map``.

For each link, which ``--copy-limit`` paces (0: as it is), a worker of Llama-2-7B's shape with dummy weights and
CPU workers; for each rank and prompt length an engine of each mode, in turns. Each asks for adapters in host
memory, one at a time, none of which is on the device; of each turn the first requests do not count, from which
the policy learns what copies and cores take. Then for one that is there. A row of a cell and mode has the median
time to the first token, cold and warm, and how requests began; a row of a cell has ``auto`` over the best single
mode, and over ``wait``, cold and warm. From the repository's root:

    python -m manylora_lab.benchmarks.cold_cells --out cells.json

``--toy`` does it at the demo model's size on a CPU. What does not fit into ``--time-budget`` seconds is left out
and named.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from manylora.config import COLD_START_MODES
from manylora_lab.bench.targets import EngineTarget
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.first_runs import first_token, pages_of, pool_of_two
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser, spread

LINKS, TOY_LINKS = (6, 30, 0), (0,)
"""GB/s; 0: as the machine has it."""
RANKS, TOY_RANKS = (32, 128), (8,)
PROMPTS, TOY_PROMPTS = (32, 200), (24,)
AUTO, WAIT = "auto", "wait"
TURNS = 3
NUM_ADAPTERS, TOY_ADAPTERS, LEFT_OUT = 10, 6, 3
WARM = 4
PAUSE_S = 0.06
"""Between requests, besides what a whole adapter takes on the link: what was begun has landed by then."""
RIG_S, CELL_S = 30.0, 40.0


class ColdCell(NamedTuple):
    """``link``: GB/s, 0: the machine's."""

    link: float
    rank: int
    prompt: int


class Found:
    """Milliseconds to the first token by mode, and how requests began."""

    def __init__(self) -> None:
        self.cold: dict[str, list[float]] = collections.defaultdict(list)
        self.warm: dict[str, list[float]] = collections.defaultdict(list)
        self.began: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def summary(self) -> Row:
        """``auto`` beside the others."""
        cold = {mode: statistics.median(each) for mode, each in self.cold.items()}
        warm = {mode: statistics.median(each) for mode, each in self.warm.items()}
        best = min((mode for mode in cold if mode != AUTO), key=cold.__getitem__)
        return {
            "best": best, "best_ms": cold[best], "auto_ms": cold[AUTO], "auto_over_best": cold[AUTO] / cold[best],
            "auto_over_wait": cold[AUTO] / cold[WAIT], "auto_over_wait_warm": warm[AUTO] / warm[WAIT],
        }  # fmt: skip


async def run_cell(rig: EngineRig, cell: ColdCell, modes: Sequence[str], turns: int) -> Found:
    """Every mode in turn; another one is the first in the next turn."""
    found = Found()
    names = rig.adapters(f"rank-{cell.rank}", (cell.rank,), TOY_ADAPTERS if rig.is_toy else NUM_ADAPTERS)
    adapter_bytes = pages_of(rig, cell.rank) * rig.policy.page_bytes
    adapter_s = adapter_bytes / (1e9 * cell.link) if cell.link else 0.0

    async def ask(target: EngineTarget, name: str | None) -> float:
        began_s, first_s = await first_token(target, rig.call(cell.prompt, 1, name))
        await asyncio.sleep(PAUSE_S + adapter_s)
        return 1e3 * (first_s - began_s)

    for turn in range(turns):
        begin = 2 * turn % len(modes)
        for mode in (*modes[begin:], *modes[:begin]):
            target = rig.open(
                names,
                num_pages=pool_of_two(rig, cell.rank, cell.prompt),
                cold_start=dataclasses.replace(rig.policy.cold_start, mode=mode),
            )
            await ask(target, None)
            for name in names:  # into the host pool
                await ask(target, name)
            before = await target.counters()
            for number, name in enumerate(names):
                taken_ms = await ask(target, name)
                if number >= LEFT_OUT:
                    found.cold[mode].append(taken_ms)
            after = await target.counters()
            for way in sorted(after):
                if way.startswith("cold_starts."):
                    found.began[mode][way.removeprefix("cold_starts.")] += int(
                        after[way] - before.get(way, 0)
                    )
            last = [*names][-1]
            found.warm[mode] += [await ask(target, last) for _ in range(WARM)]
            await target.close()
    return found


def run_link(link: float, modes: Sequence[str], report: RunReport) -> None:
    """All cells of it, on a worker of its own."""
    is_toy = report.args.toy
    cells = [
        ColdCell(link, rank, prompt)
        for rank in (TOY_RANKS if is_toy else RANKS)
        for prompt in (TOY_PROMPTS if is_toy else PROMPTS)
    ]
    if not report.has(RIG_S + CELL_S, f"{link:g} GB/s"):
        return
    sizes = {"host_pool": "16GiB", "device_pool": "24GiB", "max_num_seqs": 8, "max_model_len": 1024}
    options = {"cold_start": AUTO, "cpu_lora_workers": report.args.cpu_lora_workers}
    if link:
        options["copy_limit"] = f"{link:g}GB"
    with EngineRig.of("llama-2-7b", is_toy, sizes, **options) as rig:
        pinned_s = rig.wait_pinned()
        workers = rig.policy.cold_start.num_workers
        report.note(
            "workers", {"link_gb_s": link, "num_workers": workers, "pinned_after_s": round(pinned_s, 2)}
        )
        for cell in cells:
            place: Row = {"link_gb_s": link, "rank": cell.rank, "prompt": cell.prompt}
            if not report.has(CELL_S, str(place)):
                continue
            found = asyncio.run(run_cell(rig, cell, modes, 1 if is_toy else report.args.turns))
            for mode in modes:
                cold, warm = found.cold[mode], found.warm[mode]
                of_warm = {"warm_ms": statistics.median(warm), "warm_count": len(warm)}
                began = dict(found.began[mode])
                report.note("modes", {**place, "mode": mode, **spread(cold), **of_warm, "began": began})
            report.note("cells", {**place, **found.summary()})


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=560.0)
    parser.add_argument(
        "--links", type=float, nargs="+", metavar="GB/S", help="0: the machine's (default: all)"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(COLD_START_MODES),
        choices=COLD_START_MODES,
        help="wait, auto, others",
    )
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help="of every mode in a cell")
    parser.add_argument("--cpu-lora-workers", default="auto", metavar="N")
    args = parser.parse_args(argv)
    if missing := {WAIT, AUTO} - {*args.modes}:
        parser.error(f"--modes: {', '.join(sorted(missing))} must be there, with which others are compared")
    if args.turns < 1:
        parser.error("--turns must be at least 1")
    report = RunReport(args, "of each prompt: its number")
    for link in args.links or (TOY_LINKS if args.toy else LINKS):
        run_link(link, args.modes, report)
    report.save()
    print("CELLS " + json.dumps({name: report.values.get(name) for name in ("cells", "left_out")}))


if __name__ == "__main__":
    main()
