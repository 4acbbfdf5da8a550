"""The simulator against reality: chat streams served by the engine, and simulated with a profile's costs.

An engine in this process serves each stream; every step, copy and read is logged. Before, between and after the
streams the same worker is profiled as ``manylora profile`` does, unless ``--profile`` names a profile; then each
stream is simulated with the same settings.
From the repository's root:

    python -m manylora_lab.benchmarks.simulator_reality --device cpu --rates "5x2,10,20" --out reality.json
    python -m manylora_lab.benchmarks.simulator_reality --device cuda --rates "10x2,5x2,20*0.6" --out reality.json

``cuda``: Llama-2-7B's shape, dummy weights, 100 adapters of rank 32 or 64, one pool of 12.6 GiB. ``cpu``: the
shipped demo model on one thread, the traces' lengths divided. Beside ``--out`` are written its picture (.png), the
steps (.log.json.gz) and the profile (.profile.json). ``--again`` simulates an earlier report's streams anew, with
no engine. Each stream is simulated a second time 'as it was': with the speed that the engine had in every five
seconds of it, and what its reads took; that tells the simulator's error from the machine's changes of speed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from manylora.config import CACHE_POLICIES, ConfigError, PolicyConfig, parse_size
from manylora.engine.driver import Driver
from manylora.executor.build import build_worker
from manylora.executor.worker import Worker
from manylora.flags import build_settings
from manylora.models.config import ModelConfig, read_model_config
from manylora.pricing.costs import StepWork
from manylora.pricing.fit import fit_profile
from manylora.pricing.profile import Profile, save_profile
from manylora.types import EngineInfo
from manylora_lab.bench.profile import Profiler, ProfileSettings, describe, machine_name, shape_of
from manylora_lab.bench.profile_grid import GridLimits, make_batches
from manylora_lab.bench.profile_rig import ProfileRig, rounded, undisturbed
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.bench.replay import ReplaySettings, replay, warm_adapters
from manylora_lab.bench.step_log import StepLog, StepLogger
from manylora_lab.bench.summary import as_rows, difference, summarize
from manylora_lab.bench.targets import EngineTarget
from manylora_lab.benchmarks.h200 import write_model
from manylora_lab.benchmarks.h200_cache import (
    REHEARSAL_SEED,
    Scale,
    ceilings,
    ranks_of,
    stream_of,
    turns_of,
    write_adapters,
)
from manylora_lab.benchmarks.reality_runs import (
    SCALES,
    RateLoad,
    RealityReport,
    Run,
    beside,
    loads_from,
    stream_for,
)
from manylora_lab.sim.shipped import find_profile
from manylora_lab.workloads.stream import Stream

PROFILED = {
    "cuda": {"max_num_seqs": 128, "device_pool": "40GiB"},
    "cpu": {"max_num_seqs": 32, "device_pool": "256MiB"},
    "toy": {"max_num_seqs": 8, "device_pool": "16MiB"},
}
"""The worker's own limits, for the profile: what is served has those of the scale."""
HOST_POOL = {"cuda": "48GiB", "cpu": "32MiB", "toy": "8MiB"}
ADAPTER_ROOM = 0.3
ALONE_REPEATS = 4
AFTER_S = 60.0
"""About what comes after the last stream takes."""
REQUEST_FIELDS = (
    "conversation", "turn", "handed_s", "ttft_s", "tpot_s", "end_s", "prompt_tokens", "cached_tokens",
    "reply_tokens", "parts", "lag_s", "waited_s",
)  # fmt: skip
PIN_S_PER_GIB = 0.35
"""Pinning runs in the background and slows steps: it is waited for."""


# ---------------------------------------------------------------- measured


@dataclasses.dataclass(frozen=True)
class SharedWorker:
    """A worker that stays open over all runs, and the numbers its drivers get."""

    worker: Worker
    policy: PolicyConfig
    info: EngineInfo
    served: PolicyConfig
    adapters: Path
    scale: Scale

    def open(self) -> tuple[EngineTarget, StepLogger, list[int]]:
        """A new engine on the worker, and its adapters' pages."""
        lent = StepLogger(self.worker, self.served.page_bytes)
        info = dataclasses.replace(
            self.info,
            num_pages=self.served.num_pages,
            max_num_seqs=self.served.max_num_seqs,
            max_model_len=self.served.max_model_len,
        )
        driver = Driver(self.served, lent, info)
        cards = [
            driver.add_adapter(f"adapter-{number}", str(self.adapters / f"adapter-{number}"), verify=False)
            for number in range(self.scale.num_adapters)
        ]
        return EngineTarget(driver), lent, [card.num_pages for card in cards]


async def serve(bench: SharedWorker, stream: Stream, seed: int, is_warm: bool = True) -> tuple[Run, Run]:
    """What a stream measured, and its log. Moments count from the stream's start."""
    target, lent, adapter_pages = bench.open()
    settings = ReplaySettings(seed)
    try:
        if is_warm:
            await warm_adapters(target, sorted(target.adapters), settings)
        before, num_steps = await target.counters(), lent.num_steps
        start_s = time.monotonic()
        done = await replay(target, stream, settings, start_s=start_s)
        after = await target.counters()
    finally:
        await target.close()
    if done.error is not None:
        raise ConfigError(done.error)
    run = {
        "adapter_pages": adapter_pages,
        "summary": summarize(stream, done.results),
        "counters": difference(before, after),
    }
    requests = [{name: row[name] for name in REQUEST_FIELDS} for row in as_rows(done.results)]
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


def alone(bench: SharedWorker) -> list[Run]:
    """Batches run one by one with no engine around them, for what an engine adds to a step."""
    rig = ProfileRig(bench.worker, bench.policy)
    rig.serve(
        [bench.adapters / f"adapter-{number}" for number in range(bench.scale.num_adapters)], ADAPTER_ROOM
    )
    limits = GridLimits(
        max_seqs=bench.policy.max_num_seqs,
        max_tokens=bench.policy.max_batch_tokens,
        max_len=bench.policy.max_model_len,
        num_pages=rig.num_free_pages,
        page_tokens=bench.policy.page_tokens,
        num_adapters=rig.num_adapters,
    )
    batches = make_batches(limits, is_quick=True)
    for batch in batches:
        rig.rehearse(batch)
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(ALONE_REPEATS):
        for batch, found in zip(batches, times):
            found.append(rig.time(batch))
    points = [rig.point(batch, undisturbed(found)) for batch, found in zip(batches, times)]
    rig.forget_adapters()
    return [
        {**dataclasses.asdict(point), "mean_s": rounded(statistics.fmean(found))}
        for point, found in zip(points, times)
    ]


# ---------------------------------------------------------------- the command


class RealityComparison:
    """Opens the worker, serves, profiles, simulates; says what it does and when."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began_s = time.monotonic()
        self.kind = "toy" if args.toy else args.device
        self.scale = SCALES[self.kind]
        self.host_pool = args.host_pool or HOST_POOL[self.kind]
        self.recording = Provenance.of(args, args.seed)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:6.1f} s  {text}", flush=True)

    def run(self, loads: Sequence[RateLoad]) -> None:
        """Everything."""
        work = Path(self.args.work)
        model = Path(self.args.model) if self.args.model else self.scale.model or work / "llama-2-7b"
        if not model.exists():
            write_model(model, self.scale.shape)
        settings = build_settings(
            {
                **self.scale.engine, **PROFILED[self.kind], "model": str(model), "host_pool": self.host_pool,
                "cache_policy": self.args.policy,
            }
        )[0]  # fmt: skip
        self.say("loading")
        worker, policy, info = build_worker(settings)
        opened_s = time.monotonic()
        try:
            config = read_model_config(model)
            if self.args.profile:
                shape = shape_of(config, info.model, getattr(torch, info.dtype).itemsize)
                find_profile(self.args.profile).expect(shape, machine_name(info.device))
            pages = parse_size(str(self.scale.engine["device_pool"])) // policy.page_bytes
            served = dataclasses.replace(
                policy,
                num_pages=pages,
                max_num_seqs=self.scale.engine["max_num_seqs"],
                max_model_len=min(policy.max_model_len, pages * policy.page_tokens),
            )
            bench = SharedWorker(worker, policy, info, served, self._adapters(work, model), self.scale)
            report = self._report(bench)
            self._rehearse(bench, opened_s)
            profile = self._serve_and_profile(bench, report, loads, config)
            report.head["alone"] = alone(bench)
            report.save()
        finally:
            worker.close()
        report.simulate_all(profile, self.scale)
        self.say("all done")

    def _adapters(self, work: Path, model: Path) -> Path:
        folder = work / f"adapters-{self.kind}"
        if not (folder / "complete").exists():
            shape = json.loads((model / "config.json").read_text())
            write_adapters(folder, shape, ranks_of(self.scale))
            (folder / "complete").touch()
        self.say("adapters are there")
        return folder

    def _report(self, bench: SharedWorker) -> RealityReport:
        head = {
            "command": self.recording.command,
            "commit": self.recording.commit,
            "device": machine_name(bench.info.device),
            "torch": torch.__version__,
            "kind": self.kind,
            "cache_policy": self.args.policy,
            "policy": dataclasses.asdict(bench.served),
            "ceilings": ceilings() if self.kind == "cuda" else {},
        }
        return RealityReport(Path(self.args.out), head, self.recording)

    def _rehearse(self, bench: SharedWorker, opened_s: float) -> None:
        stream = stream_of(turns_of("20", self.scale)[:120], self.scale, self.scale.speed)
        asyncio.run(serve(bench, stream, REHEARSAL_SEED, is_warm=False))
        self.say("rehearsed")
        if self.kind == "cuda":
            pinned_s = opened_s + PIN_S_PER_GIB * parse_size(self.host_pool) / 2**30
            time.sleep(max(0.0, pinned_s - time.monotonic()))

    def _serve_and_profile(
        self, bench: SharedWorker, report: RealityReport, loads: Sequence[RateLoad], config: ModelConfig
    ) -> Profile:
        """The profile is measured in parts, before, between and after the streams: machines slow down."""
        if self.args.profile:
            profile = find_profile(self.args.profile)
            for number, load in enumerate(loads):
                self._serve(bench, report, load, number)
        else:
            settings = ProfileSettings(
                engine={}, out=beside(report.out, ".profile.json"), is_quick=self.args.toy,
                name="llama-2-7b" if self.kind == "cuda" else "demo", budget_s=self.args.profile_budget,
                commit=self.recording.commit,
            )  # fmt: skip
            with Profiler(settings, bench.worker, bench.policy, bench.info, config, _Said(self)) as profiler:
                for number, load in enumerate(loads):
                    profiler.watch(number, len(loads) + 1)
                    self._serve(bench, report, load, number)
                profiler.watch(len(loads), len(loads) + 1)
                profile = profiler.profile()
            save_profile(profile, settings.out)
        self.say(describe(profile, fit_profile(profile)))
        return profile

    def _serve(self, bench: SharedWorker, report: RealityReport, load: RateLoad, number: int) -> None:
        stream = stream_for(load, self.scale)
        run: Run = {
            "trace_rate": load.rate, "rate_scale": load.scale, "rounds": load.rounds,
            "offered_per_s": load.offered_per_s * self.scale.speed,
        }  # fmt: skip
        left_s = self.args.time_budget - (time.monotonic() - self.began_s) - AFTER_S
        if stream.duration_s > left_s:
            self.say(f"no time left for {load.offered_per_s:g}/s")
            return
        found, log = asyncio.run(serve(bench, stream, self.args.seed + number))
        report.add(run | found, log)
        self.say(
            f"{load.offered_per_s:g}/s: {found['summary']['requests']} requests, {len(log['steps'])} steps, "
            f"{found['summary']['failed']} failed, TTFT {found['summary']['ttft_ms']}"
        )


class _Said:
    """``bench.profile.Progress``: one line for each part."""

    def __init__(self, comparison: RealityComparison) -> None:
        self._comparison = comparison
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what or done == total:
            self._what = what
            self._comparison.say(f"{what} {done}/{total}")


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="a folder (default: the demo, or Llama-2-7B's shape on cuda)")
    parser.add_argument(
        "--rates", default="10x2,5x2,20*0.6", help="traces, most important first; 20*0.6x2: at 12/s, twice"
    )
    parser.add_argument("--policy", default="manylora", choices=CACHE_POLICIES)
    parser.add_argument("--profile", help="a shipped profile or a file, instead of measuring one")
    parser.add_argument(
        "--again", type=Path, help="an earlier --out: simulate its runs anew (with --profile)"
    )
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--profile-budget", type=float, default=60.0, metavar="S", help="for watching the engine"
    )
    parser.add_argument(
        "--time-budget", type=float, default=1e9, metavar="S", help="serve nothing that may pass it"
    )
    parser.add_argument("--host-pool", help="size (default: 48GiB on cuda, 32MiB)")
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "manylora-simulator-reality"))
    parser.add_argument("--seed", type=int, default=0)
    add_flags(parser)
    parser.add_argument("--toy", action="store_true", help="tiny, on a CPU, in seconds")
    args = parser.parse_args(argv)
    try:
        loads = loads_from(args.rates)
        if args.again is not None:
            again(args)
            return
        if args.device == "cpu":
            torch.set_num_threads(1)
        RealityComparison(args).run(loads)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def again(args: argparse.Namespace) -> None:
    """Simulate the runs of an earlier report."""
    report = RealityReport.of(Path(args.out), args.again, Provenance.of(args, args.seed))
    scale = SCALES[report.head["kind"]]
    name = args.profile or str(beside(args.again, ".profile.json"))
    profile = find_profile(name)
    profile.expect(machine=report.head["device"])
    report.simulate_all(profile, scale)


if __name__ == "__main__":
    main()
