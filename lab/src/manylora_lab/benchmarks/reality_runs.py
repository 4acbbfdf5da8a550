"""What ``manylora_lab.benchmarks.simulator_reality`` serves and simulates, and its report's files."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manylora.config.cold_start import num_cores
from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora_lab.benchmarks.chat_runs import REAL, TOY, ChatScale, RateLoad
from manylora_lab.benchmarks.plot_reality import compare, draw, lines_of, work_of
from manylora_lab.benchmarks.run_report import RunReport, replace
from manylora_lab.pricing.cold import CpuRates, cpu_rates, gate_lines
from manylora_lab.pricing.costs import IDLE_S, StepCosts, StepWork
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.profile import Profile
from manylora_lab.sim.cold import ColdCosts
from manylora_lab.sim.replay import Outcome, Replay
from manylora_lab.sim.summary import summarize
from manylora_lab.workloads.stream import Stream

Run = dict[str, Any]

SCALES = {"cuda": REAL, "cpu": ChatScale(20, (8, 16), "8MiB", 32, divisor=4), "toy": TOY}
WINDOW_S = 5.0
"""Of AsItWas: long beside a step, short beside a machine's changes of speed."""


# ---------------------------------------------------------------- simulated


class Noted:
    """Costs that remember what they were asked."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.reads_at_once = costs.reads_at_once
        self.wake_s = costs.wake_s
        self.answer_s = costs.answer_s
        self.copy_drag = costs.copy_drag
        self.spread = costs.spread
        self.overhead_s = costs.overhead_s
        self.copy_s = costs.copy_s
        self.read_s = costs.read_s
        self.seconds: list[float] = []

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        seconds = self._costs.step_s(work)
        self.seconds.append(seconds)
        return seconds


class AsItWas(Noted):
    """Costs with a run's own speed, from its log: how much more or less than ``costs`` say each window's steps and
    the times between them took all together, and what reads took. What still differs is the simulator's doing, not
    the profile's."""

    def __init__(self, costs: StepCosts, log: Run) -> None:
        super().__init__(costs)
        sums: dict[int, list[float]] = {}
        ended_s = -IDLE_S
        for step in log["steps"]:
            began_s, took_s, gap_s, num_rows, num_new = step[:5]
            found = sums.setdefault(int(began_s // WINDOW_S), [0.0, 0.0])
            found[0] += took_s + (gap_s or 0.0)
            found[1] += costs.step_s(work_of(step)) + (
                0.0 if gap_s is None else costs.overhead_s(num_rows, num_new)
            )
            found[1] += costs.wake_s if began_s - ended_s >= IDLE_S else 0.0
            ended_s = began_s + took_s
        self._factors = {window: took_s / cost_s for window, (took_s, cost_s) in sums.items()}
        self._reads = {
            way: sum(read[2] for read in log["reads"] if read[3] == way)
            / max(1, sum(read[4] for read in log["reads"] if read[3] == way))
            for way in (False, True)
        }
        self.overhead_s = self._overhead_s
        self.read_s = self._read_s
        self.now: Callable[[], float] = float

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        seconds = self._costs.step_s(work) * self._factor()
        self.seconds.append(seconds)
        return seconds

    def _overhead_s(self, num_rows: int, num_new: int, /) -> float:
        return self._costs.overhead_s(num_rows, num_new) * self._factor()

    def _factor(self) -> float:
        return self._factors.get(int(self.now() // WINDOW_S), 1.0)

    def _read_s(self, num_bytes: int, to_device: bool = False, /) -> float:
        return num_bytes * self._reads[to_device] or self._costs.read_s(num_bytes, to_device)


def cold_of(policy: PolicyConfig, cores: int, profile: Profile) -> ColdCosts:
    """What cold starts take, by the profile."""
    rates = cpu_rates(profile) or CpuRates()
    return ColdCosts(rates, policy.cold_start.num_workers, cores, gates=gate_lines(profile))


def simulate(
    stream: Stream, policy: PolicyConfig, noted: Noted, adapter_pages: Sequence[int], cold: ColdCosts
) -> Run:
    """The same stream in virtual time."""
    replayed = Replay(stream, policy, noted, adapter_pages, cold=cold)
    if isinstance(noted, AsItWas):
        noted.now = lambda: replayed.now
    began_s = time.perf_counter()
    replayed.run()
    real_s = time.perf_counter() - began_s
    end_s = max(outcome.end_s for outcome in replayed.outcomes)
    counters = replayed.report().counters
    return {
        "cold_starts": counters.cold_starts,
        "cold_start_stall_s": counters.cold_start_stall_s,
        **summarize(replayed),
        **{f"{part}_ms": _mean_ms(replayed.outcomes, f"{part}_s") for part in ("queue", "adapter", "kv")},
        "num_steps": len(noted.seconds),
        "step_mean_ms": 1e3 * sum(noted.seconds) / len(noted.seconds),
        "virtual_s": end_s,
        "real_s": real_s,
    }


def _mean_ms(outcomes: Sequence[Outcome], name: str) -> float:
    seconds: list[float] = [getattr(outcome, name) for outcome in outcomes]
    return 1e3 * statistics.fmean(seconds)


# ---------------------------------------------------------------- the report


class RealityReport(RunReport):
    """All files beside ``--out``, written after every part."""

    def __init__(self, args: argparse.Namespace, device: str, **head: Any) -> None:
        super().__init__(args, args.seed, device, **head, runs=[])
        self.logs: list[Run] = []
        self._measured: list[Run] | None = None
        """Where an earlier report's runs come from."""

    @classmethod
    def again(cls, args: argparse.Namespace) -> RealityReport:
        """An earlier one's runs and logs. Raises ConfigError where either is missing or damaged."""
        head = _read(args.again, "report", json.loads)
        log = beside(args.again, ".log.json.gz")
        logs = _read(log, "report's log", lambda data: json.loads(gzip.decompress(data)))
        if not isinstance(head, dict) or not {"kind", "device", "policy", "runs"} <= head.keys():
            raise ConfigError(f"{args.again} is no report of manylora_lab.benchmarks.simulator_reality")
        if len(logs) != len(head["runs"]):
            raise ConfigError(f"{log} is the log of {len(logs)} runs, its report has {len(head['runs'])}")
        report = cls(args, head["device"])
        report.values |= head
        report._measured = head.get("provenance", [])
        report.logs = logs
        return report

    def add(self, run: Run, log: Run) -> None:
        """One measured run."""
        self.values["runs"].append(run)
        self.logs.append(log)
        self.save()

    def simulate_all(self, profile: Profile, scale: ChatScale) -> None:
        """Simulate every measured run; then the comparison and the picture."""
        costs = fit_profile(profile)
        policy = msgspec.convert(self.values["policy"], PolicyConfig)
        for run, log in zip(self.values["runs"], self.logs, strict=True):
            stream = RateLoad(run["trace_rate"], run["rate_scale"], run["rounds"]).stream(scale)
            pages, cold = (
                run["adapter_pages"],
                cold_of(policy, self.values.get("cores", num_cores()), profile),
            )
            run["simulated"] = simulate(stream, policy, Noted(costs), pages, cold)
            run["as_it_was"] = simulate(stream, policy, AsItWas(costs, log), pages, cold)
        self.values["profile"] = {
            "machine": profile.machine, "model": str(profile.model), "format": profile.format,
            "commit": profile.commit, "fit_error": dataclasses.asdict(costs.held_out),
        }  # fmt: skip
        self.values["comparison"] = compare(self.values["runs"], self.logs, costs)
        self.save()
        if not self.values["runs"]:
            return self.say("no stream was served: nothing to compare")
        print(lines_of(self.values["comparison"]), flush=True)
        draw(self.values, beside(self.out, ".png"))

    def save(self) -> None:
        """See RunReport; the logs too."""
        super().save()
        replace(beside(self.out, ".log.json.gz"), gzip.compress(json.dumps(self.logs).encode(), mtime=0))

    def provenance(self) -> list[Run]:
        """See RunReport."""
        if self._measured is None:
            return super().provenance()
        simulated = [f"runs/{i}/{part}" for i in range(len(self.logs)) for part in ("simulated", "as_it_was")]
        return [*self._measured, *self.recording.provenance("profile", "comparison", *simulated)]


def beside(out: Path, ending: str) -> Path:
    return out.with_name(out.name.removesuffix(".json") + ending)


def _read(path: Path, what: str, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(path.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot read the {what} {path}: {reason}") from error
