"""How much of FastLibra's table hangs on the NPU's memory bandwidth, which the paper does not name.

    python -m manylora_lab.benchmarks.npu_bandwidth --out npu_bandwidth.json

Three scenarios, 20 adapters, 7B, one card, with ``NPU_MEMORY_CHOICES``: at shares of the rate that ``fastlibra``
sustains with that bandwidth (mean TTFT below 500 ms), every policy's TTFT and TPOT beside those of ``static-lru``
and ``s-lora``. Everything else is as in the table (docs/fastlibra-table.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.reproduce.cells import REFERENCE, Cell, in_parallel, peak_rate, run_cells
from manylora_lab.reproduce.fastlibra_table_peaks import rounded
from manylora_lab.sim.hardware import NPU_MEMORY_CHOICES, fastlibra_npu

POLICIES = ("manylora", "fastlibra", "lru", "static-lru", "s-lora", REFERENCE)
FIRST_RATES = {"chatbot": 1.0, "translation": 60.0, "agent": 30.0}
"""Where the search for the peak begins; requests a second."""


def cells_of(peaks: dict[Cell, float], shares: Sequence[float], duration_s: float) -> dict[Cell, float]:
    """Every policy's cell at each share of its case's peak, and the share."""
    return {
        dataclasses.replace(case, policy=policy, rate=rounded(share * peak), duration_s=duration_s): share
        for case, peak in peaks.items()
        for share in shares
        for policy in POLICIES
    }


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=list(FIRST_RATES), choices=FIRST_RATES)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9], help="of the peak")
    parser.add_argument("--search", type=float, default=300.0, help="virtual seconds of a run of the search")
    parser.add_argument("--duration", type=float, default=1800.0, help="virtual seconds of the others")
    parser.add_argument("--workers", type=int, default=1)
    add_flags(parser)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    cases = [
        Cell(
            scenario,
            "fastlibra",
            FIRST_RATES[scenario],
            20,
            args.search,
            hardware=fastlibra_npu(bytes_s).name,
        )
        for scenario in args.scenarios
        for bytes_s in NPU_MEMORY_CHOICES
    ]
    began_s, recording = time.monotonic(), Provenance.of(args, cases[0].seed)
    found = in_parallel(peak_rate, {case: case for case in cases}, args.workers, show, "peaks found")
    shares = cells_of(found, args.shares, args.duration)
    results = run_cells(shares, args.workers, show)
    rows: list[dict[str, Any]] = [
        {
            "scenario": cell.scenario, "hardware": cell.hardware, "share": shares[cell], "rate": cell.rate,
            "policy": cell.policy,
        }
        | {name: result[name] for name in ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "ttft_queue_ms")}
        for cell, result in results.items()
    ]  # fmt: skip
    report = {
        "benchmark": "npu_bandwidth", "commit": recording.commit, "python": platform.python_version(),
        "num_adapters": 20, "model": "llama-2-7b", "cards": 1, "duration_s": args.duration,
        "wall_s": round(time.monotonic() - began_s),
        "peaks": [
            {"scenario": case.scenario, "hardware": case.hardware, "fastlibra_per_s": peak}
            for case, peak in found.items()
        ],
        "rows": rows, "provenance": recording.provenance(),
    }  # fmt: skip
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
