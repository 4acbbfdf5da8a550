"""What ``--cold-start auto`` changes where nothing else is set: requests under it and under ``wait``, in turns.

One worker of Llama-2-7B's shape with dummy weights, with CPU workers. Under ``wait`` steps run by captures without
gates, as they do where it is all that there is; under ``auto`` by others with them. Parts: ``first`` (by rank, the
time to the first token of 64 prompt tokens, one request at a time: an adapter that this engine has not read, its
file in the page cache; one in host memory; one on the device) and ``chat`` (a shipped trace). Each turn has an
engine of each mode; which comes first changes from turn to turn. Two sets of captures of the same steps may
differ, as their memory lies elsewhere, so each turn of ``first`` has sets of its own, of the steps that its
requests need. From the repository's root:

    python -m manylora_lab.benchmarks.cold_default --out default.json

``--toy`` does it at the demo model's size on a CPU, which captures nothing. What does not fit into
``--time-budget`` seconds is left out and named.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from manylora.executor.graphs import GraphLimits, StepGraphs
from manylora.memory.bringing import Bringer
from manylora.memory.gates import LandedWords
from manylora_lab.bench.targets import EngineTarget
from manylora_lab.benchmarks.chat_runs import Chat, loads_from
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.first_runs import few_captures, first_token, pool_of_two
from manylora_lab.benchmarks.pairs import interval
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser

MODES = ("wait", "auto")
PROMPT, TOY_PROMPT = 64, 24
LEFT_OUT = 1
"""Requests of a turn for an adapter on the device that do not count: the one before was of another kind."""
PAUSE_S, TOY_PAUSE_S = 0.06, 0.005
MOST_CAPTURED = 16 * 2**30
"""Bytes that captures may hold: many sets of them."""
REQUEST_S, CHAT_S = 0.085, 60.0
"""What a request takes with its pause, and a run of the chat."""


class Captures(NamedTuple):
    """Of a worker's steps, with what tells their gates what has landed, if they have any."""

    steps: StepGraphs | None
    words: LandedWords | None
    bringer: Bringer | None


Sets = dict[str, Captures]
"""By mode."""


def captures_of(rig: EngineRig) -> Captures:
    """The worker's."""
    copier = rig.worker._copier
    return Captures(rig.worker._graphs, copier._words, copier._bringer)


def captured(rig: EngineRig, mode: str) -> Captures:
    """The worker's from now on, which are new where any are made: with gates under ``auto``. Raises RuntimeError
    where they are not all of them."""
    if rig.is_toy:
        return captures_of(rig)
    limits = GraphLimits.of(rig.policy, None, MOST_CAPTURED)
    if mode == "wait":
        limits = dataclasses.replace(limits, num_groups=0)
    rig.worker.use_graphs(limits, rig.policy.num_pages)
    found = captures_of(rig)
    if found.steps is not None and found.steps.is_full:
        raise RuntimeError("captures found no room")
    return found


def sets_of_turns(rig: EngineRig, turns: int) -> list[Sets]:
    """For each turn of ``first`` captures of both modes, all of which stay where they are."""
    found: list[Sets] = [{} for _ in range(turns)]
    with few_captures((PROMPT,), 1):
        for turn, mode in in_turns(turns):
            found[turn][mode] = captured(rig, mode)
    return found


def use(rig: EngineRig, sets: Sets, mode: str) -> Row:
    """Have the worker run steps so from now on; what an engine's policy is to have for it."""
    steps, words, bringer = sets[mode]
    rig.worker._graphs = steps
    if words is not None:  # under wait those of others, which nothing asks
        rig.worker._copier.tell_landed(words, bringer)
    return {"cold_start": dataclasses.replace(rig.policy.cold_start, mode=mode)}


def in_turns(turns: int) -> Iterator[tuple[int, str]]:
    """Turn and mode; every mode is as often the first one as any other."""
    for turn in range(turns):
        for mode in MODES if turn % 2 else reversed(MODES):
            yield turn, mode


Taken = dict[tuple[str, str], dict[int, list[float]]]
"""Milliseconds by kind and mode, and turn."""


async def first(rig: EngineRig, sets: list[Sets], rank: int, args: argparse.Namespace) -> Taken:
    """A turn for each of the sets; all but the first one, which compiles what is compiled on first use."""
    adapters = rig.adapters(f"rank-{rank}", (rank,), args.adapters)
    names, prompt = list(adapters), TOY_PROMPT if rig.is_toy else PROMPT
    taken: Taken = collections.defaultdict(lambda: collections.defaultdict(list))
    for turn, mode in in_turns(len(sets)):
        limits = use(rig, sets[turn], mode)
        target = rig.open(adapters, num_pages=pool_of_two(rig, rank, prompt), max_num_seqs=8, **limits)

        async def ask(name: str | None, target: EngineTarget = target) -> float:
            began_s, first_s = await first_token(target, rig.call(prompt, 1, name))
            await asyncio.sleep(TOY_PAUSE_S if rig.is_toy else PAUSE_S)
            return 1e3 * (first_s - began_s)

        await ask(None)
        asked = [("never read", name) for name in names]
        asked += [("in host memory", name) for name in names * args.host_rounds]
        for number, (kind, name) in enumerate(asked):
            taken_ms = await ask(name)
            if turn and number:
                taken[kind, mode][turn].append(taken_ms)
        for number in range(LEFT_OUT + args.warm):
            taken_ms = await ask(names[-1])
            if turn and number >= LEFT_OUT:
                taken["on the device", mode][turn].append(taken_ms)
        await target.close()
    return taken


def note_first(report: RunReport, rank: int, taken: Taken) -> None:
    """A row for each kind and mode, with the median of each turn, and one of both: the ratio of the medians, and
    beside it those of the turns, with the interval of their median."""
    for kind in dict.fromkeys(kind for kind, _ in taken):
        medians: dict[str, float] = {}
        for mode in MODES:
            ms = list(itertools.chain.from_iterable(taken[kind, mode].values()))
            medians[mode] = statistics.median(ms)
            times: Row = {"ms": medians[mode], "mean_ms": statistics.fmean(ms), "most_ms": max(ms)}
            times["turns_ms"] = [round(statistics.median(each), 4) for each in taken[kind, mode].values()]
            report.note("first", {"rank": rank, "kind": kind, "mode": mode, **times, "count": len(ms)})
        wait, auto = (taken[kind, mode] for mode in MODES)
        of_turns = [statistics.median(auto[turn]) / statistics.median(wait[turn]) for turn in wait]
        row = {"auto_over_wait": medians["auto"] / medians["wait"], "of_turns": statistics.median(of_turns)}
        bounds = [round(bound, 4) for bound in interval(of_turns)]
        report.note(
            "compared", {"rank": rank, "kind": kind, **row, "interval": bounds, "turns": len(of_turns)}
        )


async def chat(rig: EngineRig, built: Captures, report: RunReport, turns: int) -> None:
    """A row for each turn and mode, and one of the means. ``built``: with the rig, for ``auto``."""
    sets = {"wait": captured(rig, "wait"), "auto": built}
    bench = Chat(rig)
    await bench.rehearse()
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for load in loads_from(report.args.rates):
        for turn, mode in in_turns(turns):
            if not report.has(CHAT_S, f"chat {load.offered_per_s:g}, turn {turn}, {mode}"):
                continue
            served = await bench.serve(load.stream(bench.scale), **use(rig, sets, mode))
            summary = served.summary
            row = {"offered_per_s": load.offered_per_s, "turn": turn, "mode": mode, "summary": summary}
            report.note("chat", row)
            found[mode].append((summary["ttft_ms"]["mean"], summary["tpot_ms"]["mean"]))
    if all(found.values()):
        means = {mode: [statistics.fmean(column) for column in zip(*each)] for mode, each in found.items()}
        over = [auto / wait for auto, wait in zip(means["auto"], means["wait"])]
        report.note("chat_compared", {"ttft_auto_over_wait": over[0], "tpot_auto_over_wait": over[1]})


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=400.0)
    parser.add_argument("--parts", default="first,chat")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64], metavar="N")
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="of first; one does not count")
    parser.add_argument(
        "--warm",
        type=int,
        default=24,
        metavar="N",
        help="requests a turn for an adapter that is on the device",
    )
    parser.add_argument("--adapters", type=int, default=6, metavar="N", help="of each engine")
    parser.add_argument(
        "--host-rounds",
        type=int,
        default=2,
        metavar="N",
        help="how often a turn asks for each of them from host memory",
    )
    parser.add_argument("--chat-turns", type=int, default=2, metavar="N")
    parser.add_argument("--rates", default="10", help="of chat, as those of h200_aims")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - {"first", "chat"}:
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of first, chat")
    if args.turns < 2 or min(args.warm, args.adapters, args.chat_turns) < 1 or args.host_rounds < 0:
        parser.error("--turns must be at least 2, --warm, --adapters and --chat-turns 1, --host-rounds 0")
    report = RunReport(args, "0 of the chat's tokens; of each prompt its number")
    sizes = {"host_pool": "48GiB", "device_pool": "24GiB"}
    with EngineRig.of("llama-2-7b", args.toy, sizes, cold_start="auto") as rig:
        pinned_s = rig.wait_pinned()
        workers = rig.policy.cold_start.num_workers
        report.values |= {
            "build_s": rig.build_s, "num_workers": workers, "pinned_after_s": round(pinned_s, 2),
        }  # fmt: skip
        built = captures_of(rig)
        if "first" in parts:
            sets = sets_of_turns(rig, args.turns)
            for rank in args.ranks:
                requests = args.turns * 2 * (args.adapters * (1 + args.host_rounds) + args.warm)
                if report.has(requests * REQUEST_S, f"first tokens of rank {rank}"):
                    note_first(report, rank, asyncio.run(first(rig, sets, rank, args)))
        if "chat" in parts:
            asyncio.run(chat(rig, built, report, args.chat_turns))
    report.save()
    print("DEFAULT " + json.dumps({name: report.values.get(name) for name in ("compared", "chat_compared")}))


if __name__ == "__main__":
    main()
