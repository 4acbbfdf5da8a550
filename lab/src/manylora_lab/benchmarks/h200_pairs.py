"""This code beside another tree of it on one GPU, in turns: decode steps, first tokens, a chat.

    git archive COMMIT src lab demo/model/config.json | tar x -C TREE
    python -m manylora_lab.benchmarks.h200_pairs --before TREE --before-commit COMMIT --out pairs.json

Each turn is a process of its own, of either tree, which asks that tree's ``h200_pairs.turn``: Llama-2-7B shape,
dummy weights, bfloat16. ``steps``: milliseconds of captured decode steps of 1 and 32 rows, on the base and over
as many adapters of rank 16 (``gpu``: replayed back to back; ``wall1``, ``wall2``: on the clock, one and two in
flight; ``sampled2``: with top-p). ``first``: milliseconds to the first token of a prompt of 64. ``chat``: TTFT of
the trace of 10 requests a second, its first ``--chat`` seconds. The report has every turn, and per figure the
ratio of the medians, this tree's over the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora_lab.bench.provenance import ROOT
from manylora_lab.benchmarks.chat_runs import Chat, RateLoad, beginning
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.first_runs import first
from manylora_lab.benchmarks.h200_steps import StepRun
from manylora_lab.benchmarks.run_report import RunReport, run_parser

BATCHES, TOY_BATCHES = (1, 32), (1, 4)
STEPS, REPEATS = 120, 3
TURN = """
import json, pathlib, sys
from manylora_lab.benchmarks import h200_pairs
work, out, chat_s, *toy = sys.argv[1:]
found = h200_pairs.turn(pathlib.Path(work), float(chat_s), *map(bool, toy))
pathlib.Path(out).write_text(json.dumps(found))
"""


def turn(work: Path, chat_s: float, is_toy: bool = False) -> dict[str, Any]:
    """What this process' tree takes. ``work``: a folder for its files."""
    args = argparse.Namespace(
        toy=is_toy, time_budget=1e9, out=str(work / "turn.json"), commit="", others=None
    )
    report = RunReport(args, 0)
    with EngineRig.of("llama-2-7b", is_toy) as rig:
        found: dict[str, Any] = {"steps": steps(StepRun(rig, TOY_BATCHES if is_toy else BATCHES))}
        for _ in range(2):  # the first one compiles
            asyncio.run(first(rig, report))
        rows = report.values["first"]
        found["first"] = {row["kind"]: row["ms"] for row in rows[len(rows) // 2 :]}
        if chat_s:
            bench = Chat(rig)
            stream = beginning(RateLoad("10").stream(bench.scale), chat_s)
            summary: Any = asyncio.run(bench.serve(stream)).summary
            found["chat"] = {f"ttft {name}": summary["ttft_ms"][name] for name in ("mean", "p50", "p99")}
            found["chat"]["tpot mean"] = summary["tpot_ms"]["mean"]
    return found


def steps(bench: StepRun) -> dict[str, float]:
    """Medians of repeats, by batch and figure."""
    found: dict[str, float] = {}
    for adapted, kind in ((False, "base"), (True, "adapters")):
        for batch in bench.batches:
            taken = [bench.times(batch, adapted, STEPS) for _ in range(REPEATS)]
            for name in ("gpu", "wall1", "wall2", "sampled2"):
                if f"{name}_ms" in taken[0]:
                    found[f"{batch} {kind} {name}"] = statistics.median(row[f"{name}_ms"] for row in taken)
    bench.steps.forget(max(bench.batches))
    return found


def ratios(turns: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each figure, this tree's median over the other's."""
    found: dict[str, dict[str, float]] = {}
    for part in ("steps", "first", "chat"):
        for name in turns[0]["found"].get(part, {}):
            here, there = (
                statistics.median(one["found"][part][name] for one in turns if one["tree"] == tree)
                for tree in ("this", "before")
            )
            found.setdefault(part, {})[name] = round(here / there, 4)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other tree")
    parser.add_argument("--before-commit", default="unknown", help="the other tree's, noted in the report")
    parser.add_argument("--turns", type=int, default=2, help="of each tree")
    parser.add_argument("--chat", type=float, default=20.0, help="seconds of the chat; 0: none")
    args = parser.parse_args(argv)
    report = RunReport(args, "0 of the chat's tokens and of sampled rows; values decide no time")
    report.values |= {"before": args.before_commit, "this": report.recording.commit, "turns": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.turns):
            for tree, place in (("before", args.before.resolve()), ("this", ROOT)):
                work, out = Path(scratch) / tree, Path(scratch) / f"{tree}{number}.json"
                work.mkdir(exist_ok=True)
                words = [str(work), str(out), str(args.chat), *(["toy"] if args.toy else [])]
                path = os.pathsep.join([str(place / "src"), str(place / "lab" / "src")])
                environment = {**os.environ, "PYTHONPATH": path}
                subprocess.run([sys.executable, "-c", TURN, *words], cwd=place, env=environment, check=True)
                report.note("turns", {"tree": tree, "found": json.loads(out.read_text())})
            report.values["ratios"] = ratios(report.values["turns"])
            report.save()
    print(json.dumps(report.values["ratios"]), flush=True)


if __name__ == "__main__":
    main()
