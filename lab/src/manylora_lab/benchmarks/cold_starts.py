"""Cold starts on one device: how soon the first token of a prompt comes whose adapter is not there.

One worker of Llama-2-7B's shape with dummy weights serves an engine for each mode. Parts: ``ranks`` (by rank and
mode: adapter in the pool, in host memory, in the adapter store, only in its files; one request at a time, 64
prompt tokens, one token out), ``reads`` (adapters that were never read, with copies that follow reads and
without, in turns), ``brought`` (adapters in host memory, brought by a kernel and by the copy engine, with threads
of copies that begin at once and later, in turns; beside them two that are on the device, one after the other),
``room`` (adapters in host memory where the pool holds two of them, so that each has to make room first, and where
it holds 30, so that room is kept ahead, in turns), ``decode`` (32 decoding rows beside a request with a cold
adapter of rank 64 every 100 ms), ``reads_beside`` (the same where adapters were never read, with copies that
follow reads and without, in turns), ``gates`` (what gates cost steps that await nothing: captured with and
without, in turns), ``rates`` (copies to the device in layer groups and in whole pages, in turns). Only the
captures that these steps need are made. From the repository's root:

    python -m manylora_lab.benchmarks.cold_starts --out cold.json --commit "$(git rev-parse --short HEAD)"

``--toy`` does it all at the demo model's size on a CPU. What does not fit into ``--time-budget`` seconds is left
out and named.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from manylora.config import ColdStartConfig, parse_size
from manylora.executor.direct import DirectExecutor
from manylora.executor.graphs import GraphLimits
from manylora.memory import bringing
from manylora.pricing.shapes import ALL_MODULES
from manylora.protocol import SwapPages
from manylora_lab.bench.targets import EngineTarget
from manylora_lab.benchmarks.copy_runs import landed
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.first_runs import few_captures, first_token, pages_of
from manylora_lab.benchmarks.offline_runs import failed
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser, spread
from manylora_lab.benchmarks.store_reads import drop, fetch, read_raw

PROMPT = 64
ROUNDS, TOY_ROUNDS = 4, 1
WARM_ROUNDS = 4
PAUSE_S = 0.06
"""Between requests: what idle lanes bring back has landed by then, also at the largest rank."""
MIXED_TOKENS = (64, 96, 128)
"""Of the captured steps: a prompt, and one beside 32 decoding rows."""
DECODING = 32
COLD_RANK, COLD_EVERY_S = 64, 0.1
TURNS_BESIDE, NAMES_BESIDE = 5, 40
"""Of reads beside decoding rows: turns, and adapters of an engine."""
READ_TURNS = 7
BRING_TURNS = 6
BROUGHT_BY = {"copy engine": (False, True), "kernel": (True, True), "kernel, threads at once": (True, False)}
"""Whether a kernel brings adapters, and whether what no step waits for is put off until steps are launched."""
GATE_TURNS, GATE_REQUESTS = 16, 12
HELD, MANY_HELD, TOY_MANY_HELD = 2, 30, 5
"""Adapters that the pool has room for. Of many, the room that the policy keeps is more than one of them takes."""
ROOM_TURNS, ROOM_WARM = 5, 8
RATE_BYTES, RATE_ROUNDS = 320 * 2**20, 6


def adapters_of(rig: EngineRig, rank: int, held: int = HELD) -> dict[str, str]:
    """Enough that each is cold when its turn comes again, where ``held`` find room; they share a file, not
    pages."""
    count = 4 if rig.is_toy else 10 if rank <= 64 else 6
    return rig.adapters(f"rank-{rank}", (rank,), max(count, held + held // 5))


def opened(
    rig: EngineRig, rank: int, cold_start: ColdStartConfig, rows: int = 1, held: int = HELD
) -> EngineTarget:
    """An engine with room for ``held`` adapters of this rank and so many sequences."""
    room = rows * -(-2 * rig.policy.max_model_len // rig.policy.page_tokens) if rows > 1 else 16
    return rig.open(
        adapters_of(rig, rank, held),
        num_pages=min(held * pages_of(rig, rank) + room, rig.policy.num_pages),
        max_model_len=128 if rows == 1 else rig.policy.max_model_len,
        cold_start=cold_start,
    )


# ---------------------------------------------------------------- one request at a time


async def ranks(rig: EngineRig, report: RunReport) -> None:
    """Milliseconds to the first token."""
    for rank in report.args.ranks:
        if not report.has(12.0 + rank / 20, f"rank {rank}"):
            continue
        for number, mode in enumerate(("wait", *report.args.modes)):
            await _first_tokens(rig, report, rank, mode, reads_files=number == 0)


async def _first_tokens(
    rig: EngineRig, report: RunReport, rank: int, mode: str, *, reads_files: bool
) -> None:
    """``reads_files``: no engine has read these adapters, so that the first reads come from their files; the
    store has them from then on."""
    names = list(adapters_of(rig, rank))
    taken: dict[str, list[float]] = {}
    parts: dict[str, dict[str, list[float]]] = {}

    async def ask(adapter: str, kind: str) -> None:
        rig.noted.moments.clear()
        began_s, first_s = await first_token(target, rig.call(PROMPT, 1, adapter))
        taken.setdefault(kind, []).append(1e3 * (first_s - began_s))
        for what, moment_s in dict(reversed(rig.noted.moments)).items():  # of each the first
            parts.setdefault(kind, {}).setdefault(what, []).append(1e3 * (moment_s - began_s))
        await asyncio.sleep(PAUSE_S)

    async def ask_each(kind: str) -> None:
        for name in names:
            await ask(name, kind)

    target = opened(rig, rank, ColdStartConfig(mode))
    await target.generate(rig.call(PROMPT, 1, None))
    await ask_each("files, page cache" if reads_files or report.args.no_store else "store, page cache")
    for _ in range(TOY_ROUNDS if rig.is_toy else ROUNDS):
        await ask_each("host")
    for name in names[-2:]:
        for turn in range(1 + WARM_ROUNDS):
            await ask(name, "warm" if turn else "to warm it")
    counters = await target.counters()
    await target.close()
    if reads_files and not report.args.no_store:
        await _wait_kept(rig)
    elif packed := _packed(rig, rank):
        # Another engine knows nothing of what the host pool holds.
        target = opened(rig, rank, ColdStartConfig(mode))
        await target.generate(rig.call(PROMPT, 1, None))
        for name in names:
            stays = max(drop(path) for path in packed)
            await ask(name, "store, disk" if stays < 0.01 else "store, disk (page cache kept it)")
        await target.close()
        for path in packed:
            if drop(path) < 0.01:
                taken.setdefault("its bytes alone, disk", []).append(1e3 * read_raw(path))
                parts.setdefault("its bytes alone, disk", {})
            fetch(path)
    for kind, each in taken.items():
        report.note(
            "ranks",
            {
                "rank": rank, "mode": mode, "kind": kind, **spread(each),
                "moments_ms": {what: round(statistics.median(at), 3) for what, at in parts[kind].items()},
            },
        )  # fmt: skip
    report.note("counters", {"rank": rank, "mode": mode, **{
        name: counters[name] for name in ("cold_start_stall_s", "cold_start_hidden_s", "spoilt_rows")
    }})  # fmt: skip


def _packed(rig: EngineRig, rank: int) -> list[Path]:
    """The store's files of adapters of this rank."""
    pages = rig.shape.adapter_pages(rank, rig.policy.page_tokens, ALL_MODULES)
    found = sorted(rig.folder.glob("store/*.packed"))
    return [path for path in found if path.stat().st_size // rig.policy.page_bytes == pages]


async def _wait_kept(rig: EngineRig) -> None:
    """Until the store has written what was read."""
    found, until = -1, time.monotonic() + 20
    while time.monotonic() < until:
        await asyncio.sleep(0.5)
        now = sum(path.stat().st_size for path in rig.folder.glob("store/*"))
        if now == found and now:
            return
        found = now


# ---------------------------------------------------------------- reads


async def reads(rig: EngineRig, report: RunReport) -> None:
    """Milliseconds to the first token where the adapter was never read, with copies that follow reads and steps
    that await them, and without: engines in turn, each of which knows nothing of what others have read."""
    for rank in report.args.ranks:
        if not report.has(8.0 + rank / 10, f"reads of rank {rank}"):
            continue
        names = list(adapters_of(rig, rank))
        taken: dict[bool, list[float]] = {}
        stalled = {False: 0.0, True: 0.0}
        for turn in range(TOY_ROUNDS + 1 if rig.is_toy else READ_TURNS):
            for follows in (False, True) if turn % 2 else (True, False):
                cold_start = ColdStartConfig("layerwise", reads_in_groups=follows)
                target = opened(rig, rank, cold_start)
                for _ in range(3):
                    await target.generate(rig.call(PROMPT, 1, None))
                for name in names:
                    began_s, first_s = await first_token(target, rig.call(PROMPT, 1, name))
                    if turn or report.args.no_store:  # by the first turn the store has them
                        taken.setdefault(follows, []).append(1e3 * (first_s - began_s))
                    await asyncio.sleep(PAUSE_S)
                stalled[follows] += (await target.counters())["cold_start_stall_s"]
                await target.close()
            if not turn and not report.args.no_store:
                await _wait_kept(rig)
        for follows, each in sorted(taken.items()):
            apart = statistics.median(each) / statistics.median(taken[False])
            source = "files" if report.args.no_store else "store"
            report.note(
                "reads",
                {
                    "rank": rank, "source": source, "follows": follows, **spread(each),
                    "over_not_following": apart, "stall_s": stalled[follows],
                },
            )  # fmt: skip


# ---------------------------------------------------------------- what brings adapters


async def brought(rig: EngineRig, report: RunReport) -> None:
    """Milliseconds to the first token of adapters in host memory, with what brings them in turns, and of adapters
    on the device: the one of the request before, and another."""
    for rank in report.args.ranks:
        if not report.has(15.0, f"bringing at rank {rank}"):
            continue
        names = list(adapters_of(rig, rank))
        taken: dict[tuple[str, str], list[float]] = {}
        target = opened(rig, rank, ColdStartConfig("layerwise"))

        async def ask(name: str, target: EngineTarget = target) -> float:
            began_s, first_s = await first_token(target, rig.call(PROMPT, 1, name))
            await asyncio.sleep(PAUSE_S)
            return 1e3 * (first_s - began_s)

        was = bringing.BY_KERNEL, rig.worker._copier._puts_off
        for name in names:  # into the host pool
            await ask(name)
        for turn in range(TOY_ROUNDS if rig.is_toy else BRING_TURNS):
            for way in BROUGHT_BY if turn % 2 else reversed(BROUGHT_BY):
                bringing.BY_KERNEL, rig.worker._copier._puts_off = BROUGHT_BY[way]
                for name in names[:-2]:
                    taken.setdefault((way, "host"), []).append(await ask(name))
                for name in names[-2:]:
                    await ask(name)
                for name in names[-2:]:
                    taken.setdefault((way, "warm, another"), []).append(await ask(name))
                for _ in range(2):
                    taken.setdefault((way, "warm, the same"), []).append(await ask(names[-1]))
        bringing.BY_KERNEL, rig.worker._copier._puts_off = was
        counters = await target.counters()
        await target.close()
        for (way, kind), each in sorted(taken.items()):
            report.note(
                "brought",
                {
                    "rank": rank, "by": way, "kind": kind, **spread(each), "spoilt": counters["spoilt_rows"],
                },
            )  # fmt: skip


async def room(rig: EngineRig, report: RunReport) -> None:
    """Milliseconds to the first token of adapters in host memory and of one on the device, in pools of both sizes
    in turns."""
    many = TOY_MANY_HELD if rig.is_toy else MANY_HELD
    for rank in report.args.ranks:
        if not report.has(20.0 + rank / 4, f"room at rank {rank}"):
            continue
        taken: dict[tuple[int, str], list[float]] = {}
        evicted = dict.fromkeys((HELD, many), 0.0)
        for turn in range(TOY_ROUNDS if rig.is_toy else ROOM_TURNS):
            for held in (HELD, many) if turn % 2 else (many, HELD):
                names = list(adapters_of(rig, rank, held))
                target = opened(rig, rank, ColdStartConfig("layerwise"), held=held)
                for name in names:  # into the host pool
                    await target.generate(rig.call(PROMPT, 1, name))
                await asyncio.sleep(PAUSE_S)
                asked = [("host", name) for name in names[:10]] + [("warm", names[-1])] * (2 + ROOM_WARM)
                for number, (kind, name) in enumerate(asked):
                    rig.noted.moments.clear()
                    began_s, first_s = await first_token(target, rig.call(PROMPT, 1, name))
                    was_cold = any(what == "swap" for what, _ in rig.noted.moments)
                    if was_cold if kind == "host" else number >= len(asked) - ROOM_WARM:
                        taken.setdefault((held, kind), []).append(1e3 * (first_s - began_s))
                    await asyncio.sleep(PAUSE_S)
                evicted[held] += (await target.counters())["adapter_evictions"]
                await target.close()
        for (held, kind), each in sorted(taken.items()):
            place = {"rank": rank, "held": held, "kind": kind}
            report.note("room", {**place, **spread(each), "evictions": evicted[held]})


# ---------------------------------------------------------------- beside decoding rows


async def decode(rig: EngineRig, report: RunReport) -> None:
    """Milliseconds a token of decoding rows, beside nothing, beside warm requests, and beside cold ones."""
    if not report.has(25.0, "decode"):
        return
    names = list(adapters_of(rig, COLD_RANK))
    for mode, chosen in (
        ("none", []),
        ("warm", names[:1]),
        *((mode, names) for mode in ("wait", *report.args.modes)),
    ):
        cold_start = ColdStartConfig("wait" if mode in ("none", "warm") else mode)
        row = await _beside_rows(
            rig, opened(rig, COLD_RANK, cold_start, _rows(rig) + 4), chosen, are_read=True
        )
        report.note("decode", {"mode": mode, **row})


async def reads_beside(rig: EngineRig, report: RunReport) -> None:
    """The same beside adapters that were never read, with copies that follow reads and without, in turns; the
    first turn, by which the store has them, does not count."""
    for rank in report.args.ranks:
        if not report.has(90.0, f"reads of rank {rank} beside decoding rows"):
            continue
        names = list(adapters_of(rig, rank, NAMES_BESIDE))
        for turn in range(TOY_ROUNDS + 1 if rig.is_toy else 1 + TURNS_BESIDE):
            for follows in (False, True) if turn % 2 else (True, False):
                cold_start = ColdStartConfig("auto", reads_in_groups=follows)
                target = opened(rig, rank, cold_start, _rows(rig) + 4, NAMES_BESIDE)
                row = await _beside_rows(rig, target, names, are_read=False)
                if turn:
                    report.note("reads_beside", {"rank": rank, "follows": follows, "turn": turn, **row})
                else:
                    await _wait_kept(rig)


def _rows(rig: EngineRig) -> int:
    return 4 if rig.is_toy else DECODING


async def _beside_rows(rig: EngineRig, target: EngineTarget, chosen: list[str], *, are_read: bool) -> Row:
    """What decoding rows take beside requests for these adapters in turn, and what these take; closes the engine.
    ``are_read``: to the host pool, before."""
    rows = _rows(rig)
    for name in chosen if are_read else ():
        await target.generate(rig.call(PROMPT, 1, name))
    length = 64 if rig.is_toy else 500
    running = [asyncio.create_task(target.generate(rig.call(PROMPT, length, None))) for _ in range(rows)]
    await asyncio.sleep(0.03 if rig.is_toy else 0.3)
    first_ms: list[float] = []
    asked: list[asyncio.Task[None]] = []

    async def ask(name: str) -> None:
        began_s, first_s = await first_token(target, rig.call(PROMPT, 1, name))
        first_ms.append(1e3 * (first_s - began_s))

    for name in itertools.cycle(chosen) if are_read else chosen:
        if any(task.done() for task in running):
            break
        asked.append(asyncio.create_task(ask(name)))
        await asyncio.sleep(COLD_EVERY_S)
    answers = await asyncio.gather(*running)
    await asyncio.gather(*asked)
    if failed(answers):
        raise RuntimeError(failed(answers)[0])
    counters = await target.counters()
    await target.close()
    tpot = [1e3 * (a.last_s - a.first_s) / (a.num_tokens - 1) for a in answers if a.first_s is not None]
    steps = sorted(1e3 * gap for answer in answers for gap in answer.itls_s)
    return {
        "rows": rows, "tpot_ms": statistics.fmean(tpot), "requests": len(first_ms),
        "p99_step_ms": steps[int(0.99 * len(steps))], "ttft_ms": statistics.fmean(first_ms or [0.0]),
        "stall_s": counters["cold_start_stall_s"], "spoilt": counters["spoilt_rows"],
    }  # fmt: skip


# ---------------------------------------------------------------- what gates cost


async def gates(rig: EngineRig, report: RunReport) -> None:
    """A prompt alone over a warm adapter, by captures with gates and by others without."""
    if rig.is_toy or not report.has(20.0, "gates"):
        return
    policy, captured = rig.policy, {}
    for has_gates in (True, False):
        limits = GraphLimits(
            policy.max_num_seqs, policy.max_batch_tokens, policy.max_model_len, None, False, 8 * has_gates
        )
        rig.worker.use_graphs(limits, policy.num_pages)
        captured[has_gates] = rig.worker._graphs
    target = opened(rig, 16, ColdStartConfig())
    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(1 + GATE_TURNS):
        for has_gates in (True, False) if turn % 2 else (False, True):
            rig.worker._graphs = captured[has_gates]
            for number in range(2 + GATE_REQUESTS):
                began_s = time.monotonic()
                answer = await target.generate(rig.call(PROMPT, 1, "adapter-0"))
                if turn and number >= 2 and answer.first_s is not None:
                    taken[has_gates].append(1e3 * (answer.first_s - began_s))
                await asyncio.sleep(0.01)
    await target.close()
    rig.worker._graphs = captured[True]
    for has_gates, each in taken.items():
        report.note("gates", {"gates": has_gates, **spread(each)})


# ---------------------------------------------------------------- rates


async def rates(rig: EngineRig, report: RunReport) -> None:
    """GB/s of copies to the device, from the command to the answer and by ``copy_s``, by layer groups."""
    if not report.has(5.0, "rates"):
        return
    direct = DirectExecutor(rig.worker)
    count = max(1, min(RATE_BYTES // rig.policy.page_bytes, rig.policy.num_pages, rig.policy.num_host_pages))
    pairs = tuple((page, count - 1 - page) for page in range(count))
    beside = tuple((page, page) for page in range(count))
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    numbers = itertools.count(1)
    for _ in range(RATE_ROUNDS):
        for (name, pages), groups in itertools.product(
            (("scattered", pairs), ("neighbours", beside)), (0, 1, 4, 8)
        ):
            command = SwapPages(next(numbers), True, pages, None, groups)
            began_s = time.perf_counter()
            direct.begin(command)
            done = landed(direct, command)
            taken_s = time.perf_counter() - began_s
            found.setdefault((name, groups), []).append((taken_s, done.copy_s))
    for _ in range(2):
        rig.worker._coming.step_ended()
    num_bytes = count * rig.policy.page_bytes
    for (name, groups), each in found.items():
        whole, own = (statistics.median(column) for column in zip(*each[1:]))
        row: Row = {"pages": name, "groups": groups, "gb_per_s": num_bytes / whole / 1e9}
        report.note("rates", {**row, "gb_per_s_by_copy_s": num_bytes / own / 1e9 if own else 0.0})


# ---------------------------------------------------------------- the command

PARTS: dict[str, Callable[[EngineRig, RunReport], Coroutine[Any, Any, None]]] = {
    part.__name__: part for part in (rates, ranks, reads, brought, room, decode, reads_beside, gates)
}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=160.0)
    parser.add_argument("--parts", default="rates,ranks,decode,gates")
    parser.add_argument("--ranks", default="16,64,128,256")
    parser.add_argument("--modes", default="layerwise", help="beside wait")
    parser.add_argument(
        "--no-store",
        action="store_true",
        help="for large ranks: while packed files are written, all is slower",
    )
    parser.add_argument(
        "--kernel-up-to",
        type=parse_size,
        default=bringing.MOST_BYTES,
        metavar="SIZE",
        help="the largest copy that a kernel brings (default: the engine's)",
    )
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--host-pool", default="16GiB")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    args.ranks, args.modes = [int(rank) for rank in args.ranks.split(",")], args.modes.split(",")
    if args.toy:
        args.ranks = [rank for rank in args.ranks if rank <= 16]
    report = RunReport(args, "of each prompt: its number")
    brings = mock.patch.object(bringing, "MOST_BYTES", args.kernel_up_to)
    with tempfile.TemporaryDirectory() as store, few_captures(MIXED_TOKENS, DECODING), brings:
        sizes = {"host_pool": args.host_pool, "device_pool": "24GiB"}
        limits = {"max_num_seqs": 48, "max_batch_tokens": 2048, "max_model_len": 1024}
        more: dict[str, Any] = {} if args.toy else limits
        if not args.no_store:
            more["adapter_store"] = store
        with EngineRig.of(args.shape, args.toy, sizes, cold_start="layerwise", **more) as rig:
            (rig.folder / "store").symlink_to(Path(store))
            report.values |= {"build_s": rig.build_s, "policy": dataclasses.asdict(rig.policy)}
            report.values["pinned_after_s"] = round(rig.wait_pinned(), 2)
            for part in parts:
                asyncio.run(PARTS[part](rig, report))
    report.save()
    print("COLD " + json.dumps({name: report.values.get(name) for name in (*PARTS, "left_out")}))


if __name__ == "__main__":
    main()
