"""What ``manylora_lab.benchmarks.simulator_reality`` serves and simulates, and its report's files."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manylora.config import ConfigError, PolicyConfig
from manylora.pricing.costs import IDLE_S, StepCosts, StepWork
from manylora.pricing.fit import fit_profile
from manylora.pricing.profile import Profile
from manylora_lab.bench.provenance import Provenance
from manylora_lab.benchmarks.h200_cache import REAL, ROOT, TRACES, Scale, stream_of, turns_of
from manylora_lab.benchmarks.plot_reality import compare, draw, lines_of, work_of
from manylora_lab.sim.replay import Outcome, Replay
from manylora_lab.sim.summary import summarize
from manylora_lab.workloads.stream import Stream

Run = dict[str, Any]

DEMO = Scale(
    shape={},
    model=ROOT / "demo" / "model",
    engine={
        "device": "cpu", "dtype": "float32", "max_num_seqs": 32, "max_batch_tokens": 1024, "device_pool": "8MiB",
    },
    num_adapters=20,
    ranks=(8, 16),
    divisor=4,
)  # fmt: skip
TOY = dataclasses.replace(
    DEMO,
    engine={
        **DEMO.engine,
        "max_num_seqs": 8,
        "max_batch_tokens": 256,
        "device_pool": "2MiB",
        "max_model_len": 256,
    },
    num_adapters=8,
    ranks=(4, 8),
    divisor=16,
    num_conversations=8,
    speed=25.0,
)
"""For tests: as short as can be."""

WINDOW_S = 5.0
"""Of AsItWas: long beside a step, short beside a machine's changes of speed."""
_ENTRY = re.compile(r"(\d+)(?:\*(\d+\.?\d*))?(?:x(\d+))?")
SCALES = {"cuda": REAL, "cpu": DEMO, "toy": TOY}


@dataclasses.dataclass(frozen=True)
class RateLoad:
    """A trace by its rate, replayed ``scale`` times as fast, ``rounds`` times one after another."""

    rate: str
    scale: float
    rounds: int

    @property
    def offered_per_s(self) -> float:
        return float(self.rate) * self.scale


def loads_from(text: str) -> list[RateLoad]:
    """From "5x2,10,20*0.6": the 5/s trace twice, the 10/s one, the 20/s one at 12/s. Raises ConfigError."""
    loads = []
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ConfigError(f"--rates: {entry!r} is not RATE, RATE*SCALE or RATE*SCALExROUNDS")
        rate, scale, rounds = found.groups()
        if not (TRACES / f"chat_{rate}rps.jsonl.gz").is_file():
            raise ConfigError(f"there is no trace of {rate!r}/s in {TRACES}")
        load = RateLoad(rate, float(scale or 1), int(rounds or 1))
        if not load.scale > 0 or load.rounds < 1:
            raise ConfigError(f"--rates: scale and rounds must be above 0 in {entry!r}")
        loads.append(load)
    return loads


def stream_for(load: RateLoad, scale: Scale) -> Stream:
    """The trace, said over and over in new words, so that a 99th percentile is of enough requests."""
    turns = turns_of(load.rate, scale)
    span_s = turns[-1].arrival_s * (1 + 1 / len(turns))
    conversations = 1 + max(turn.conversation for turn in turns)
    repeated = [
        dataclasses.replace(
            turn,
            arrival_s=turn.arrival_s + number * span_s,
            conversation=turn.conversation + number * conversations,
        )
        for number in range(load.rounds)
        for turn in turns
    ]
    return stream_of(repeated, scale, load.scale * scale.speed)


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


def simulate(stream: Stream, policy: PolicyConfig, noted: Noted, adapter_pages: Sequence[int]) -> Run:
    """The same stream in virtual time."""
    replayed = Replay(stream, policy, noted, adapter_pages)
    if isinstance(noted, AsItWas):
        noted.now = lambda: replayed.now
    began_s = time.perf_counter()
    replayed.run()
    real_s = time.perf_counter() - began_s
    end_s = max(outcome.end_s for outcome in replayed.outcomes)
    return {
        **summarize(replayed),
        **{f"{part}_ms": _mean_ms(replayed.outcomes, f"{part}_s") for part in ("queue", "adapter", "kv")},
        "num_steps": len(noted.seconds),
        "step_mean_ms": 1e3 * sum(noted.seconds) / len(noted.seconds),
        "virtual_s": end_s,
        "real_s": real_s,
    }


def _mean_ms(outcomes: Sequence[Outcome], name: str) -> float:
    return 1e3 * sum(getattr(outcome, name) for outcome in outcomes) / len(outcomes)


# ---------------------------------------------------------------- the report


class RealityReport:
    """All files beside ``--out``, written after every part."""

    def __init__(self, out: Path, head: Run, recording: Provenance) -> None:
        self.out = out
        self.head: Run = {**head, "runs": []}
        self.logs: list[Run] = []
        self._recording = recording
        self._measured: list[Run] | None = None
        """Where an earlier report's runs come from."""

    @classmethod
    def of(cls, out: Path, earlier: Path, recording: Provenance) -> RealityReport:
        """An earlier one's runs and logs. Raises ConfigError where either is missing or damaged."""
        head = _read(earlier, "report", json.loads)
        log = beside(earlier, ".log.json.gz")
        logs = _read(log, "report's log", lambda data: json.loads(gzip.decompress(data)))
        if not isinstance(head, dict) or not {"kind", "device", "policy", "runs"} <= head.keys():
            raise ConfigError(f"{earlier} is no report of manylora_lab.benchmarks.simulator_reality")
        if len(logs) != len(head["runs"]):
            raise ConfigError(f"{log} is the log of {len(logs)} runs, its report has {len(head['runs'])}")
        report = cls(out, head, recording)
        report.head["runs"] = head["runs"]
        report._measured = head.get("provenance", [])
        report.logs = logs
        return report

    def add(self, run: Run, log: Run) -> None:
        """One measured run."""
        self.head["runs"].append(run)
        self.logs.append(log)
        self.save()

    def simulate_all(self, profile: Profile, scale: Scale) -> None:
        """Simulate every measured run; then the comparison and the picture."""
        costs = fit_profile(profile)
        policy = msgspec.convert(self.head["policy"], PolicyConfig)
        for run, log in zip(self.head["runs"], self.logs, strict=True):
            stream = stream_for(RateLoad(run["trace_rate"], run["rate_scale"], run["rounds"]), scale)
            run["simulated"] = simulate(stream, policy, Noted(costs), run["adapter_pages"])
            run["as_it_was"] = simulate(stream, policy, AsItWas(costs, log), run["adapter_pages"])
        self.head["profile"] = {
            "machine": profile.machine, "model": str(profile.model), "format": profile.format,
            "commit": profile.commit, "fit_error": dataclasses.asdict(costs.held_out),
        }  # fmt: skip
        self.head["comparison"] = compare(self.head["runs"], self.logs, costs)
        self.save()
        print(lines_of(self.head["comparison"]), flush=True)
        draw(self.head, self.logs, costs, beside(self.out, ".png"))

    def save(self) -> None:
        """Whole or not at all."""
        self.head["provenance"] = self._provenance()
        _replace(self.out, (json.dumps(self.head, indent=1) + "\n").encode())
        _replace(beside(self.out, ".log.json.gz"), gzip.compress(json.dumps(self.logs).encode(), mtime=0))

    def _provenance(self) -> list[Run]:
        if self._measured is None:
            return self._recording.provenance()
        simulated = [f"runs/{i}/{part}" for i in range(len(self.logs)) for part in ("simulated", "as_it_was")]
        return [*self._measured, *self._recording.provenance("profile", "comparison", *simulated)]


def beside(out: Path, ending: str) -> Path:
    return out.with_name(out.name.removesuffix(".json") + ending)


def _read(path: Path, what: str, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(path.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot read the {what} {path}: {reason}") from error


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(data)
    scratch.replace(path)
