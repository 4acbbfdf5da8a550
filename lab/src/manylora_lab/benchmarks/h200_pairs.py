"""This code beside another tree of it on GPUs of one machine, in turns.

    git archive COMMIT src lab demo/model/config.json | tar x -C TREE
    python -m manylora_lab.benchmarks.h200_pairs --before TREE --before-commit COMMIT --out pairs.json

Each turn is a process of its own. It runs this file over the packages of its tree, with the Llama-2-7B shape,
dummy weights and bfloat16. Parts: ``steps``, milliseconds of captured decode steps of 1 and 32 rows, on the
base and over as many adapters of rank 16 (``gpu``: replayed back to back; ``wall1``, ``wall2``: on the clock,
one and two in flight; ``sampled2``: with top-p); ``first``, milliseconds to the first token of a prompt of
64, by adapter rank and by where the adapter is; ``large``, the same for ranks 128 and 256, and the seconds of
a merge switch; ``offline``, seconds for the first requests of the offline workload at once; ``chat``, TTFT
and TPOT of the traces of 10 and 20 requests a second; ``cpu``, first tokens under ``--cold-start cpu``;
``ranks``, decode steps of two ranks on two GPUs.

``--gpus 0,1``: turns go on each of these GPUs at the same time, and begin with another tree on each. The
report has every turn, and per figure the ratio of the medians (this tree's over the other's) and the spread
of the other tree's turns (the largest over the least), which is the noise.
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
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora_lab.bench.provenance import ROOT
from manylora_lab.benchmarks.chat_runs import Chat, RateLoad, beginning
from manylora_lab.benchmarks.engine_rig import UNMERGED, EngineRig
from manylora_lab.benchmarks.first_runs import few_captures, first_token, pages_of
from manylora_lab.benchmarks.h200_steps import StepRun
from manylora_lab.benchmarks.offline_runs import name_of, offline_rows, run_offline, warmed
from manylora_lab.benchmarks.run_report import RunReport, run_parser
from manylora_lab.benchmarks.step_rig import StepRig

PARTS = ("steps", "first", "offline", "chat", "large", "cpu", "ranks")
BATCHES, TOY_BATCHES = (1, 32), (1, 4)
STEPS, REPEATS = 80, 2
RANKS = {16: 12, 64: 8}
"""Adapters of each rank whose first tokens are measured; the pool has room for half of them."""
LARGE = {128: 6, 256: 4}
TOY_RANKS = {4: 6}
ROUNDS = 4
OFFLINE_REQUESTS, OFFLINE_ADAPTERS, AT_ONCE = 240, 48, 32
SIZES = {"device_pool": "40GiB", "host_pool": "16GiB"}


class Turn:
    """The parts of one process. ``shared``: a folder of adapters, which all turns of a GPU use."""

    def __init__(self, parts: Sequence[str], shared: Path, chat_s: float, is_toy: bool) -> None:
        self._parts, self._shared, self._chat_s, self._is_toy = parts, shared, chat_s, is_toy
        self.found: dict[str, dict[str, float]] = {}

    def run(self) -> None:
        """Run all parts, with an engine for each kind of settings."""
        chosen = set(self._parts)
        if chosen & {"steps", "first", "offline", "chat"}:
            with self._rig(cold_start="layerwise") as rig:
                self._run_main(rig)
        if "large" in chosen:
            merging = type(UNMERGED)(mode="manylora")
            with few_captures((64, 128), 8), self._rig(merging=merging) as rig:
                times = rig.policy.merge.times
                self.found["switch"] = {"merge": 1e3 * times.merge_s, "restore": 1e3 * times.restore_s}
            with few_captures((64, 128), 8), self._rig(cold_start="layerwise") as rig:
                asyncio.run(self._first(rig, "large", LARGE))
        if "cpu" in chosen:
            with few_captures((64, 128), 8), self._rig(cold_start="cpu") as rig:
                asyncio.run(self._first(rig, "cpu", RANKS))
        if "ranks" in chosen:
            with few_captures((64, 128), 32), self._rig(tensor_parallel_size=2) as rig:
                self._run_ranks(rig)

    def _rig(self, **settings: Any) -> EngineRig:
        merging = settings.pop("merging", UNMERGED)
        rig = EngineRig.of("llama-2-7b", self._is_toy, SIZES, merging, **({} if self._is_toy else settings))
        rig.folder = self._shared  # the first turn writes the adapters
        return rig

    def _run_main(self, rig: EngineRig) -> None:
        if "steps" in self._parts:
            self.found["steps"] = steps(StepRun(rig, TOY_BATCHES if self._is_toy else BATCHES))
        if "first" in self._parts:
            asyncio.run(self._first(rig, "first", RANKS))
        if "offline" in self._parts:
            asyncio.run(self._offline(rig))
        for rate in ("10", "20") if "chat" in self._parts else ():
            bench = Chat(rig)
            stream = beginning(RateLoad(rate).stream(bench.scale), self._chat_s)
            summary: Any = asyncio.run(bench.serve(stream)).summary
            found = self.found.setdefault("chat", {})
            found |= {f"{rate}/s ttft {name}": summary["ttft_ms"][name] for name in ("mean", "p50", "p99")}
            found[f"{rate}/s tpot mean"] = summary["tpot_ms"]["mean"]

    async def _first(self, rig: EngineRig, part: str, ranks: dict[int, int]) -> None:
        """One request at a time. Where an adapter was, the commands on its way tell."""
        found = self.found.setdefault(part, {})
        if not self._is_toy:
            rig.wait_pinned()  # pinning beside requests delays them
        for rank, count in (TOY_RANKS if self._is_toy else ranks).items():
            adapters = rig.adapters(f"first-{rank}", (rank,), count)
            room = min(count // 2 * pages_of(rig, rank) + 16, rig.policy.num_pages)
            target = rig.open(adapters, num_pages=room, max_model_len=128, max_num_seqs=8, merge=UNMERGED)
            taken: dict[str, list[float]] = {}
            for number in range(ROUNDS):
                for adapter in (name for name in adapters for _ in range(2)):
                    rig.noted.moments.clear()
                    began_s, first_s = await first_token(
                        target, rig.call(32 if self._is_toy else 64, 1, adapter)
                    )
                    said = {what for what, _ in rig.noted.moments}
                    kind = "never read" if "read" in said else "host" if "swap" in said else "warm"
                    if number:  # the first round compiles
                        taken.setdefault(kind, []).append(1e3 * (first_s - began_s))
                    await asyncio.sleep(0.02)
            await target.close()
            for kind, each in taken.items():
                found[f"rank {rank} {kind}"] = statistics.median(each)

    async def _offline(self, rig: EngineRig) -> None:
        rows = offline_rows(rig)[:OFFLINE_REQUESTS]
        adapters = rig.adapters("offline", (16,), 4 if self._is_toy else OFFLINE_ADAPTERS)
        target = rig.open(adapters, max_num_seqs=AT_ONCE)
        distinct = [number % len(adapters) for number in range(len(rows))]
        await warmed(rig, target, [*dict.fromkeys(distinct), None])
        assert name_of(0) in adapters
        for kind, chosen in (("base", [None] * len(rows)), ("distinct", distinct)):
            row = await run_offline(rig, target, rows, chosen)
            assert not row["errors"], row["errors"]
            self.found.setdefault("offline", {})[kind] = row["seconds"]
        await target.close()

    def _run_ranks(self, rig: EngineRig) -> None:
        adapters = rig.adapters("rank-16", (16,), max(BATCHES))
        bench = StepRig(rig.executor, rig.policy.num_pages)
        bench.load(adapters.values())
        for batch in BATCHES:
            for adapted in (False, True):
                starts = bench.sequences([(256, 1)] * batch, adapted, room=STEPS)
                taken = [bench.decode_ms(starts, STEPS, 2)["pair_ms"] for _ in range(REPEATS + 1)]
                kind = "adapters" if adapted else "base"
                self.found.setdefault("ranks", {})[f"{batch} {kind}"] = statistics.median(taken)


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


def ratios(turns: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By part and figure: both medians, their ratio, and the spread of the other tree's turns."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for part, figures in turns[0]["found"].items():
        for name in figures:
            here, there = (
                [
                    one["found"][part][name]
                    for one in turns
                    if one["tree"] == tree and name in one["found"][part]
                ]
                for tree in ("this", "before")
            )
            if here and there:
                now, then = statistics.median(here), statistics.median(there)
                row = {"this": now, "before": then, "ratio": now / then, "noise": max(there) / min(there)}
                found.setdefault(part, {})[name] = {key: round(value, 4) for key, value in row.items()}
    return found


def run_turn(given: dict[str, Any], gpus: str, tree: Path) -> dict[str, Any]:
    """One turn as a process. Raises CalledProcessError where it fails."""
    path = os.pathsep.join([str(tree / "src"), str(tree / "lab" / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": gpus}
    command = [sys.executable, "-P", __file__, "--turn", json.dumps(given), "--out", given["out"]]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    found: dict[str, Any] = json.loads(Path(given["out"]).read_text())
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the turns and write the report, or run the one turn that ``--turn`` describes."""
    parser = run_parser(__doc__)
    parser.add_argument("--turn", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="the other tree")
    parser.add_argument("--before-commit", default="unknown", help="the other tree's, noted in the report")
    parser.add_argument("--parts", default="steps,first,offline,chat,large")
    parser.add_argument("--gpus", default="0", help="all of them belong to each turn of the part ranks")
    parser.add_argument("--turns", type=int, default=2, help="of each tree on each GPU")
    parser.add_argument("--chat", type=float, default=20.0, metavar="S", help="seconds of each trace")
    args = parser.parse_args(argv)
    if args.turn is not None:
        turn = Turn(args.turn["parts"], Path(args.turn["shared"]), args.turn["chat_s"], args.turn["is_toy"])
        turn.run()
        Path(args.out).write_text(json.dumps(turn.found))
        return
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    report = RunReport(args, "0 of the chat's tokens and of sampled rows; values decide no time")
    report.values |= {"before": args.before_commit, "this": report.recording.commit, "turns": []}
    trees = {"before": args.before.resolve(), "this": ROOT}
    lock = threading.Lock()

    def run_turns(gpus: str, order: Sequence[str], scratch: Path) -> None:
        for number in range(args.turns * len(order)):
            tree = order[number % len(order)]
            given = {
                "parts": args.parts.split(","), "shared": str(scratch), "chat_s": args.chat,
                "is_toy": args.toy, "out": str(scratch / f"{tree}{number}.json"),
            }  # fmt: skip
            found = run_turn(given, gpus, trees[tree])
            with lock:
                report.note("turns", {"tree": tree, "gpu": gpus, "found": found})
                report.values["ratios"] = ratios(report.values["turns"])
                report.save()

    groups = [args.gpus] if "ranks" in args.parts.split(",") else args.gpus.split(",")
    with tempfile.TemporaryDirectory() as folder:
        threads = []
        for place, gpus in enumerate(groups):
            scratch = Path(folder) / f"gpu{gpus}"
            scratch.mkdir()
            order = sorted(trees, reverse=place % 2 == 1)
            threads.append(threading.Thread(target=run_turns, args=(gpus, order, scratch)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    print(json.dumps(report.values.get("ratios")), flush=True)


if __name__ == "__main__":
    main()
