"""Cache policies on loads that no policy was changed by: published traces, over adapters that fill memory.

From the repository's root, with the traces of docs/workloads.md in a folder (``TRACES`` has the names below it):

    python -m manylora_lab.benchmarks.held_out --data DIR --store held_out.jsonl --out held_out.json

Each load is served by the 7B model on one card of FastLibra's paper with 200 adapters on all seven projections, of
rank 64, 128 or 256: the host holds them, the device some sixty. Its peak is the highest rate, within a tenth, at
which requests queue less than 500 ms in the mean under ``lru-ahead`` with seed 0 (what a read of an adapter takes
is no queue); it runs at 0.4, 0.7 and 0.95 of that with the judging seeds. A seed is a part of the trace that no
other seed has, as far as it is long enough, other ranks, and where the trace has no keys, other draws of adapters.
Times are stretched to the rate. A run that was stopped goes on from the store.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from manylora.config.policy import PolicyConfig
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.reproduce.cells import (
    BELADY_SEEN,
    REFERENCE,
    Cell,
    cell_adapter_pages,
    cell_config,
    cell_costs,
    policy_replay,
)
from manylora_lab.reproduce.experiment import Setup, show_progress
from manylora_lab.reproduce.fastlibra_seeds import (
    JUDGING_SEEDS,
    SHARES,
    WHOLE,
    Load,
    headline,
    rows_of,
)
from manylora_lab.reproduce.fastlibra_table_peaks import LIMIT_MS
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Row
from manylora_lab.sim.limits import reference
from manylora_lab.sim.summary import summarize, ttft_parts_ms
from manylora_lab.workloads.named import named
from manylora_lab.workloads.stream import Stream, prompt_tokens

POLICIES = ("manylora", "fastlibra", "lru-ahead", "lru-drop", BELADY_SEEN, REFERENCE)
SERVED_BY = dataclasses.replace(WHOLE, num_adapters=200)
"""What serves all loads; its scenario, rate and times are another's."""
SETTLE_S, COUNTED_S = 100.0, 300.0
CONTEXT = 16_384
"""Longer requests are left out."""
_FIRST_RATE, _MOST_RATE, _TOLERANCE = 0.5, 64.0, 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """``path``: below the folder of traces. ``popularity``: where it has no keys that stand for adapters.
    ``length_scale``: so much of its lengths, where they are beyond the model."""

    path: str
    file_format: str
    popularity: str | None = None
    length_scale: float = 1.0


TRACES = {
    "azure-conv": Trace("azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz", "azure-llm", "zipf(1)"),
    "azure-code": Trace("azure_llm_2023/AzureLLMInferenceTrace_code.csv.gz", "azure-llm", "zipf(1)"),
    "mooncake": Trace("mooncake/conversation_trace.jsonl.gz", "mooncake", length_scale=1 / 8),
    "servegen": Trace("servegen/m-large_client_rates.csv.gz", "servegen"),
    "genai-lora": Trace("genai_lora_trace/lora_requests.csv.gz", "genai-lora-trace"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOutRun:
    """One run; ``rate``: requests a second."""

    trace: str
    rate: float
    seed: int
    policy: str

    @property
    def cell(self) -> Cell:
        """What serves it."""
        return dataclasses.replace(SERVED_BY, policy=self.policy, rate=self.rate, seed=self.seed)


# ---------------------------------------------------------------- streams


@functools.lru_cache(maxsize=2)
def _whole_trace(trace: Trace, data: Path, seed: int) -> Stream:
    return named(
        str(data / trace.path), num_adapters=SERVED_BY.num_adapters, seed=seed, popularity=trace.popularity,
        ranks=SERVED_BY.ranks, file_format=trace.file_format,
    )  # fmt: skip


def stream_at(trace: Trace, data: Path, rate: float, seed: int, duration_s: float) -> Stream:
    """A part of the trace at that rate. Raises ConfigError."""
    if trace.file_format == "servegen":  # no requests, but rates to draw them by
        return _short(
            named(
                str(data / trace.path), rate=rate, duration_s=duration_s, num_adapters=SERVED_BY.num_adapters,
                seed=seed, ranks=SERVED_BY.ranks, file_format=trace.file_format,
            )
        )  # fmt: skip
    whole = _short(_whole_trace(trace, data, seed).with_lengths(trace.length_scale))
    count = min(round(rate * duration_s), len(whole.requests) - 1)
    first = seed * count % (len(whole.requests) - count)
    part, end_s = whole.requests[first : first + count], whole.requests[first + count].arrival_s
    began_s = part[0].arrival_s
    stream = dataclasses.replace(whole, requests=part).since(began_s)
    return stream.with_rate(rate * (end_s - began_s) / count)


def _short(stream: Stream) -> Stream:
    """Without requests longer than ``CONTEXT``. None of these traces has later turns."""
    lengths = prompt_tokens(stream.requests)
    kept = [
        request
        for request, length in zip(stream.requests, lengths)
        if length + request.output_tokens < CONTEXT and request.turn == 0
    ]
    return dataclasses.replace(stream, requests=tuple(kept))


# ---------------------------------------------------------------- runs


def measure(data: Path, run: HeldOutRun, settle_s: float = SETTLE_S, counted_s: float = COUNTED_S) -> Row:
    """One run's numbers, of what came after ``settle_s``; equal runs give equal ones."""
    cell = run.cell
    stream = stream_at(TRACES[run.trace], data, run.rate, run.seed, settle_s + counted_s)
    config: PolicyConfig = dataclasses.replace(cell_config(cell), max_model_len=CONTEXT)
    pages, costs = cell_adapter_pages(cell, stream), cell_costs(cell)
    if run.policy == REFERENCE:
        replay = reference(stream, config, costs, pages)
    else:
        replay = policy_replay(run.policy, stream, config, costs, pages)
        while replay.advance():
            now_s = replay.since_start_s
            if now_s is not None and now_s < settle_s:
                replay.counters_at_start = replay.report().counters
        replay.run()  # raises where a request was forgotten
    replay.outcomes = [outcome for outcome in replay.outcomes if outcome.handed_s >= settle_s]
    return {**summarize(replay), **ttft_parts_ms(replay.outcomes), "requests": len(replay.outcomes)}


def peak_of(data: Path, trace: str) -> float:
    """The highest rate that ``lru-ahead`` sustains with seed 0, rounded to two digits."""

    def is_borne(rate: float) -> bool:
        return bool(measure(data, HeldOutRun(trace, rate, 0, "lru-ahead"))["ttft_queue_ms"] < LIMIT_MS)

    low, high = 0.0, _FIRST_RATE
    while high <= _MOST_RATE and is_borne(high):
        low, high = high, 2 * high
    while high - low > _TOLERANCE * high and high > _FIRST_RATE / 16:
        middle = (low + high) / 2
        low, high = (middle, high) if is_borne(middle) else (low, middle)
    return float(f"{low:.2g}")


@dataclasses.dataclass(frozen=True, slots=True)
class PeakRun:
    """The search for a trace's peak."""

    trace: str


def _measure(data: Path, case: HeldOutRun | PeakRun) -> Row:
    return {"peak": peak_of(data, case.trace)} if isinstance(case, PeakRun) else measure(data, case)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run what the store does not have of the traces that are asked for. Raises ConfigError."""
    setup = Setup(workers=args.workers, store=Path(args.store), show=show_progress)
    data, traces = Path(args.data), args.traces.split(",")
    call = functools.partial(_measure, data)
    peaks = run_cases(call, [PeakRun(trace) for trace in traces], setup)
    runs = {
        (trace, share, seed, policy): HeldOutRun(
            trace, float(f"{share * peaks[PeakRun(trace)]['peak']:.3g}"), seed, policy
        )
        for trace in traces
        for share in SHARES
        for seed in JUDGING_SEEDS
        for policy in POLICIES
    }
    found = run_cases(call, runs.values(), setup)
    results = {key: found[one] for key, one in runs.items()}
    rows = [
        row
        for trace in traces
        for row in rows_of(Load(trace, SERVED_BY, POLICIES, seeds=JUDGING_SEEDS), results)
    ]
    return {
        "what": "cache policies on published traces that no policy was changed by, simulated",
        "settings": {
            "adapters": SERVED_BY.num_adapters, "ranks": SERVED_BY.ranks,
            "settle_s": SETTLE_S, "counted_s": COUNTED_S,
            "shares": SHARES, "seeds": JUDGING_SEEDS, "context": CONTEXT,
            "traces": {trace: dataclasses.asdict(TRACES[trace]) for trace in traces},
            "peaks": {trace: peaks[PeakRun(trace)]["peak"] for trace in traces},
        },
        "headline": [dataclasses.asdict(figure) for figure in headline(rows)],
        "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, metavar="DIR", help="the published traces")
    parser.add_argument("--store", required=True, metavar="FILE", help="finished runs")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--traces", default=",".join(TRACES), help="some of them (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1)
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, f"{JUDGING_SEEDS[0]} to {JUDGING_SEEDS[-1]}")
    report = run(args)
    report["provenance"] = recording.provenance()
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
