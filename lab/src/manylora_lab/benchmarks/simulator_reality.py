"""The simulator against reality: chat streams served by the engine, and simulated with a profile's costs.

An engine in this process serves each stream; every step, copy and read is logged. Before, between and after the
streams the same worker is profiled as ``manylora profile`` does, unless ``--profile`` names a profile; then each
stream is simulated with the same settings.
From the repository's root:

    python -m manylora_lab.benchmarks.simulator_reality --device cpu --rates "5x2,10,20" --out reality.json
    python -m manylora_lab.benchmarks.simulator_reality --device cuda --rates "10x2,5x2,20*0.6" --out reality.json

``cuda``: Llama-2-7B's shape, dummy weights, 100 adapters of rank 32 or 64, one pool of 12.6 GiB. ``cpu``: the
demo model's shape on one thread, the traces' lengths divided. ``--cold-start`` holds for the engine, the profile
and the simulation alike. Beside ``--out`` are written its picture (.png), the
steps (.log.json.gz) and the profile (.profile.json). ``--again`` simulates an earlier report's streams anew, with
no engine. Each stream is simulated a second time 'as it was': with the speed that the engine had in every five
seconds of it, and what its reads took; that tells the simulator's error from the machine's changes of speed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from manylora.config.cold_start import COLD_START_MODES, num_cores
from manylora.config.declaring import ConfigError
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.bench.dummies import DEMO
from manylora_lab.bench.profile import Profiler, ProfileSettings, machine_name
from manylora_lab.bench.profile_report import describe
from manylora_lab.bench.replay import ReplaySettings, warm_adapters
from manylora_lab.bench.serve import measure
from manylora_lab.bench.step_log import StepLog, StepLogger
from manylora_lab.bench.summary import as_rows
from manylora_lab.benchmarks.chat_runs import Chat, RateLoad, loads_from
from manylora_lab.benchmarks.engine_rig import ON_CPU, ON_GPU, EngineRig
from manylora_lab.benchmarks.reality_runs import SCALES, RealityReport, Run, beside
from manylora_lab.benchmarks.run_report import ceilings, run_parser
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.profile import Profile, save_profile
from manylora_lab.pricing.shapes import SHAPES, shape_of
from manylora_lab.sim.shipped import find_profile
from manylora_lab.workloads.stream import Stream

ENGINES = {
    "cuda": {**ON_GPU, "device_pool": "40GiB", "host_pool": "48GiB"},
    "cpu": {
        **ON_CPU, "max_model_len": 1024, "max_batch_tokens": 1024, "device_pool": "256MiB", "host_pool": "32MiB",
    },
    "toy": {**ON_CPU, "max_num_seqs": 8, "device_pool": "16MiB", "host_pool": "8MiB"},
}  # fmt: skip
"""The worker's own settings, for the profile: what is served has the limits of the scale."""
GIVEN = ("host_pool", "cold_start", "cpu_lora_workers")
"""Settings of the worker that the command may change."""
AFTER_S = 60.0
"""About what comes after the last stream takes."""
REQUEST_FIELDS = (
    "conversation", "turn", "handed_s", "ttft_s", "tpot_s", "end_s", "prompt_tokens", "cached_tokens",
    "reply_tokens", "parts", "lag_s", "waited_s",
)  # fmt: skip


# ---------------------------------------------------------------- measured


async def serve(chat: Chat, stream: Stream, seed: int) -> tuple[Run, Run]:
    """What a stream measured, and its log. Moments count from the stream's start."""
    lent = StepLogger(chat.rig.worker, chat.rig.policy.page_bytes)
    target, settings = chat.open(lent), ReplaySettings(seed)
    adapter_pages = [card.num_pages for card in target.driver.adapters()]
    try:
        await warm_adapters(target, sorted(target.adapters), settings)
        num_steps, start_s = lent.num_steps, time.monotonic()
        found = await measure(target, stream, settings)
    finally:
        await target.close()
    if found.error is not None:
        raise ConfigError(found.error)
    run = {"adapter_pages": adapter_pages, "summary": found.summary, "counters": found.engine}
    requests = [{name: row[name] for name in REQUEST_FIELDS} for row in as_rows(found.results)]
    return run, {**_plain(lent.log(), num_steps, start_s), "requests": requests}


def _plain(log: StepLog, first: int, start_s: float) -> Run:
    """The log as rows of numbers, with the names of their columns."""
    steps = [
        [round(step.began_s - start_s, 6), round(step.took_s, 6), step.gap_s and round(step.gap_s, 6),
         step.num_rows, step.num_new, *step.work, round(step.cpu_s, 6)]
        for step in log.steps[first:]
    ]  # fmt: skip
    moved = {
        name: [
            [round(move.began_s - start_s, 6), round(move.waited_s, 6), round(move.took_s, 6), int(move.to_device),
             move.num_bytes]
            for move in moves
            if move.began_s >= start_s
        ]
        for name, moves in (("copies", log.copies), ("reads", log.reads))
    }  # fmt: skip
    return {
        "step_columns": ["began_s", "took_s", "gap_s", "num_rows", "num_new", *StepWork._fields, "cpu_s"],
        "transfer_columns": ["began_s", "waited_s", "took_s", "to_device", "num_bytes"],
        "steps": steps,
        **moved,
    }


# ---------------------------------------------------------------- the command


def compare(args: argparse.Namespace, loads: Sequence[RateLoad]) -> None:
    """Open the worker, serve, profile, simulate; say what is done and when."""
    kind = "toy" if args.toy else args.device
    settings = {**ENGINES[kind], "cache_policy": args.policy}
    settings |= {name: value for name in GIVEN if (value := getattr(args, name)) is not None}
    model = None if args.model is None else Path(args.model)
    with EngineRig(SHAPES["llama-2-7b"] if kind == "cuda" else DEMO, settings, model) as rig:
        machine = machine_name(rig.info.device)
        if args.profile:
            shape = shape_of(rig.config, rig.info.model, getattr(torch, rig.info.dtype).itemsize)
            find_profile(args.profile).expect(shape, machine)
        chat = Chat(rig, SCALES[kind])
        policy = dataclasses.asdict(rig.policy) | chat.limits
        about = {"kind": kind, "cache_policy": args.policy, "policy": policy, "cores": num_cores()}
        report = RealityReport(args, machine, **about, ceilings=ceilings(rig.device))
        asyncio.run(chat.rehearse())
        report.say("rehearsed")
        rig.wait_pinned()
        profile = serve_and_profile(chat, report, loads)
    report.simulate_all(profile, chat.scale)
    report.say("all done")


def serve_and_profile(chat: Chat, report: RealityReport, loads: Sequence[RateLoad]) -> Profile:
    """The profile is measured in parts, before, between and after the streams: machines slow down."""
    rig, args = chat.rig, report.args
    if args.profile:
        profile = find_profile(args.profile)
        for number, load in enumerate(loads):
            serve_load(chat, report, load, args.seed + number)
    else:
        settings = ProfileSettings(
            engine={}, out=beside(report.out, ".profile.json"), is_quick=args.toy,
            name="llama-2-7b" if rig.device == "cuda" else "demo", budget_s=args.profile_budget,
            commit=report.recording.commit,
        )  # fmt: skip

        def progress(what: str, done: int, total: int) -> None:
            if done == total:
                report.say(f"{what} {done}/{total}")

        with Profiler(settings, rig.worker, rig.policy, rig.info, rig.config, progress) as profiler:
            for number, load in enumerate(loads):
                profiler.watch(number, len(loads) + 1)
                serve_load(chat, report, load, args.seed + number)
            profiler.watch(len(loads), len(loads) + 1)
            profile = profiler.profile()
        save_profile(profile, settings.out)
    report.say(describe(profile, fit_profile(profile)))
    return profile


def serve_load(chat: Chat, report: RealityReport, load: RateLoad, seed: int) -> None:
    stream = load.stream(chat.scale)
    run: Run = {
        "trace_rate": load.rate, "rate_scale": load.scale, "rounds": load.rounds,
        "offered_per_s": load.offered_per_s * chat.scale.speed,
    }  # fmt: skip
    if report.has(stream.duration_s + AFTER_S, f"{load.offered_per_s:g}/s"):
        found, log = asyncio.run(serve(chat, stream, seed))
        report.add(run | found, log)
        report.say(f"{load.offered_per_s:g}/s, {len(log['steps'])} steps: {found['summary']}")


def again(args: argparse.Namespace) -> None:
    """Simulate the runs of an earlier report."""
    report = RealityReport.again(args)
    profile = find_profile(args.profile or str(beside(args.again, ".profile.json")))
    profile.expect(machine=report.values["device"])
    report.simulate_all(profile, SCALES[report.values["kind"]])


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = run_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="a folder, for its shape (default: the demo's, or Llama-2-7B's)")
    parser.add_argument(
        "--rates", default="10x2,5x2,20*0.6", help="traces, most important first; 20*0.6x2: at 12/s, twice"
    )
    parser.add_argument("--policy", default="manylora", choices=ALL_CACHE_POLICIES)
    parser.add_argument("--profile", help="a shipped profile or a file, instead of measuring one")
    parser.add_argument(
        "--again", type=Path, help="an earlier --out: simulate its runs anew (with --profile)"
    )
    parser.add_argument(
        "--profile-budget", type=float, default=60.0, metavar="S", help="for watching the engine"
    )
    parser.add_argument("--host-pool", help="size (default: 48GiB on cuda, 32MiB)")
    parser.add_argument(
        "--cold-start", choices=COLD_START_MODES, help="how cold requests begin (default: wait)"
    )
    parser.add_argument("--cpu-lora-workers", metavar="N", help="for --cold-start cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        loads = loads_from(args.rates)
        if args.again is not None:
            again(args)
            return
        if args.device == "cpu":
            torch.set_num_threads(1)
        compare(args, loads)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
