"""S-LoRA's own baselines (§7.1) as engines beside ours, on one device, with dummy weights and adapters of rank 16.

Part ``engines``: tokens a second by the number of adapters, from a pool that not all fit into. ``s-lora-bmm``
copies the adapters of a step into contiguous memory, padded to one rank, and multiplies by ``torch.bmm``
(``bench.padded_lora``); ``s-lora-no-unify-mem`` has a part of the pages for adapters and the rest for KV
(``--cache-policy static-lru``); ``manylora, no graphs`` is for the first, whose steps cannot be captured. All
adapters have one rank, so padding costs ``s-lora-bmm`` nothing here but for runs of unlike length. While a
request waits for pages that only the end of another frees, the share of pages that are of no use is noted.

Part ``copies``: models whose adapter is merged into a copy of the weights (S-LoRA's vLLM-packed), each with an
engine and a pool of its own, beside one engine over as many adapters; so many requests at once in all.

Requests ask for each adapter as often as for any other, all given at once. From the repository's root:

    python -m manylora_lab.benchmarks.s_lora_engines --out s_lora_engines.json
    python -m manylora_lab.benchmarks.s_lora_engines --parts copies --models 1 3 5 --out copies.json

``--toy`` does it at the demo's size on a CPU. What does not fit into ``--time-budget`` seconds is left out and
named.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from manylora.policy.room import Room
from manylora_lab.bench.padded_lora import pad_adapters
from manylora_lab.bench.targets import EngineTarget, TargetRequest
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.offline_runs import RANK, failed, name_of, run_offline, warmed
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser

ADAPTERS = (5, 200, 20, 100)
MODELS = (1, 2, 3, 4, 5)


class Sizes(NamedTuple):
    """Of every run: requests, their tokens, how many are served at a time, and the pool."""

    requests: int = 128
    prompt_tokens: int = 128
    output_tokens: int = 32
    at_once: int = 32
    device_pool: str = "4GiB"


REAL = Sizes()
TOY = Sizes(16, 16, 6, 8, "8MiB")


class _System(NamedTuple):
    options: dict[str, Any]
    is_padded: bool = False


SYSTEMS = {
    "manylora": _System({}),
    "s-lora-no-unify-mem": _System({"cache_policy": "static-lru"}),
    "manylora, no graphs": _System({"cuda_graphs": "off"}),
    "s-lora-bmm": _System({"cuda_graphs": "off"}, is_padded=True),
}


class Refusals:
    """What an engine's policy could not give when it let a request wait for pages that only the end of a running
    sequence can free: the share of all pages that no running sequence and no adapter of one holds."""

    def __init__(self, target: EngineTarget) -> None:
        self.shares: list[float] = []
        machine: Any = target.driver._machine
        held = machine._held
        admit, residency = held.admit, held._residency

        def noting(sequence: Any, first_chunk: int, now: float) -> bool:
            is_admitted: bool = admit(sequence, first_chunk, now)
            if not is_admitted:
                wanted = held._reserve(sequence, first_chunk)
                held._cancel(wanted)
                if not residency.room.may_provide(wanted.kv_pages, wanted.adapter_pages):
                    self.shares.append(unused_pages(residency.room) / residency.device.num_pages)
            return is_admitted

        held.admit = noting

    def summary(self) -> Row:
        """How often, and the share: its mean and its most."""
        shares = self.shares
        if not shares:
            return {"refused": 0, "unused_share": None, "unused_share_most": None}
        return {
            "refused": len(shares), "unused_share": statistics.fmean(shares), "unused_share_most": max(shares),
        }  # fmt: skip


def unused_pages(room: Room) -> int:
    """Pages that are free, become so by themselves, or hold what none uses."""
    return room._device.num_pages - room.pages_used + room._tree.evictable_pages


async def engines(report: RunReport, sizes: Sizes) -> None:
    """Every system of ``--systems`` over every number of adapters."""
    args = report.args
    row = {"prompt_tokens": sizes.prompt_tokens, "output_tokens": sizes.output_tokens}
    for name in args.systems:
        system = SYSTEMS[name]
        if not report.has(60.0, name):
            continue
        with _rig(args, sizes.device_pool, "24GiB", **system.options) as rig:
            if system.is_padded:
                pad_adapters(rig.worker)
            for number in args.adapters:
                target = rig.open(
                    rig.adapters("rank-16", (RANK,), number), **rig.limits(sizes.device_pool, sizes.at_once)
                )
                chosen = [request % number for request in range(sizes.requests)]
                errors, refusals, runs = await warmed(rig, target, range(number)), Refusals(target), []
                refusals.shares.clear()
                for repeat in range(report.repeats):
                    if report.has(25.0, f"{name}, {number} adapters, repeat {repeat}"):
                        runs.append(await run_offline(rig, target, [row] * sizes.requests, chosen))
                await target.close()
                if runs:
                    rates = [run["tokens_per_s"] for run in runs]
                    found = {"tokens_per_s": statistics.median(rates), "all": rates, **refusals.summary()}
                    moved = {"pages_swapped_in": sum(run["pages_swapped_in"] for run in runs)}
                    errors += [error for run in runs for error in run["errors"]]
                    report.note(
                        "engines", {"system": name, "adapters": number, **found, **moved, "errors": errors}
                    )


async def copies(report: RunReport, sizes: Sizes) -> None:
    """One engine over so many adapters, then as many copies of the weights."""
    args, most = report.args, max(report.args.models)
    with _rig(args, sizes.device_pool, "1GiB") as rig:
        adapters = rig.adapters("rank-16", (RANK,), most)
        for number in args.models:
            if report.has(20.0, f"one engine, {number} models"):
                target = rig.open(adapters, max_num_seqs=sizes.at_once)
                await warmed(rig, target, range(number))
                models = [(target, name_of(each)) for each in range(number)]
                await _note_copies("manylora", rig, models, report, sizes, weights=1)
                await target.close()
    with contextlib.ExitStack() as stack:
        rigs: list[EngineRig] = []
        for number in sorted(args.models):
            if not report.has(20.0 + 15.0 * (number - len(rigs)), f"{number} merged copies"):
                continue
            while len(rigs) < number:
                rigs.append(stack.enter_context(_rig(args, sizes.device_pool, "1GiB")))
            targets = [each.open({}, max_num_seqs=-(-sizes.at_once // number)) for each in rigs]
            for each, target in zip(rigs, targets):
                await warmed(each, target, [None] * sizes.at_once)
            models = [(target, None) for target in targets]
            await _note_copies("merged copies", rigs[0], models, report, sizes, weights=number)
            for target in targets:
                await target.close()


async def _note_copies(
    system: str,
    rig: EngineRig,
    models: Sequence[tuple[EngineTarget, str | None]],
    report: RunReport,
    sizes: Sizes,
    weights: int,
) -> None:
    """Requests over the models in turn. ``weights``: how many copies of them there are."""
    rates, errors = [], []
    for _ in range(report.repeats):
        calls: list[tuple[EngineTarget, TargetRequest]] = []
        for request in range(sizes.requests):
            target, adapter = models[request % len(models)]
            calls.append((target, rig.call(sizes.prompt_tokens, sizes.output_tokens, adapter)))
        began_s = time.monotonic()
        answers = await asyncio.gather(*(target.generate(call) for target, call in calls))
        rates.append(sum(len(answer.tokens) for answer in answers) / (time.monotonic() - began_s))
        errors += failed(answers)
    found = {"tokens_per_s": statistics.median(rates), "all": rates, "errors": errors}
    weight_bytes = weights * rig.shape.weight_bytes
    report.note("copies", {"system": system, "models": len(models), "weight_bytes": weight_bytes, **found})


def _rig(args: Any, device_pool: str, host_pool: str, **options: Any) -> EngineRig:
    sizes = {
        "device_pool": device_pool, "host_pool": host_pool, "max_model_len": 1024, "max_num_seqs": REAL.at_once,
    }  # fmt: skip
    rig = EngineRig.of(args.shape, args.toy, sizes, **options)
    rig.wait_pinned()
    return rig


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=550.0)
    parser.add_argument("--parts", default="engines,copies")
    parser.add_argument("--shape", default="llama-2-7b", help="of the model")
    parser.add_argument("--adapters", type=int, nargs="+", default=list(ADAPTERS), metavar="N")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="of engines")
    parser.add_argument("--models", type=int, nargs="+", default=list(MODELS), metavar="N", help="of copies")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    args = parser.parse_args(argv)
    if unknown := set(args.parts.split(",")) - {"engines", "copies"}:
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of engines, copies")
    report = RunReport(args, "fixed: the number of the prompt")
    report.repeats, sizes = args.repeats, TOY if args.toy else REAL
    report.values["settings"] = {"shape": "demo" if args.toy else args.shape, "rank": RANK, **sizes._asdict()}
    for part in args.parts.split(","):
        asyncio.run(engines(report, sizes) if part == "engines" else copies(report, sizes))
    report.save()
    print(json.dumps({part: report.values.get(part) for part in ("engines", "copies", "left_out")}))


if __name__ == "__main__":
    main()
