"""Which requests meet the objective, where ``router_proof`` found that fewer do under our router than elsewhere.

From the repository's root:

    python -m manylora_lab.benchmarks.router_attainment --records docs/results/router_proof_ages.json \
        --conversation AzureLLMInferenceTrace_conv.csv.gz --servegen SERVEGEN --out router_attainment.json

Each such cell of the records is run again under both routers, which gives the same attainment. A request's
company is how many sequences its replica was between their first and last tokens with, itself among them, in the
mean of its own time between these. The objective is the same for all, so it says how few must run beside a
request that meets it; how many requests have so little company is what routers differ in.
"""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.benchmarks.router_proof import ProofRun, stream_of
from manylora_lab.reproduce.router_cells import run_router, slo_s
from manylora_lab.sim.cluster_summary import slo_attainment
from manylora_lab.sim.replay import Outcome

BANDS = (0, 5, 10, 15, 20)
"""From so many sequences on, to the next."""


def company(outcomes: Sequence[Outcome]) -> Callable[[Outcome], float]:
    """Of the requests that one replica served: what the module's text says, of any with more than one token."""
    moments, counts, passed = (
        [0.0],
        [0],
        [0.0],
    )  # from each moment on so many; before it so many times seconds
    changes = sorted(
        [(outcome.first_s, 1) for outcome in outcomes] + [(outcome.end_s, -1) for outcome in outcomes]
    )
    for moment, change in changes:
        passed.append(passed[-1] + counts[-1] * (moment - moments[-1]))
        moments.append(moment)
        counts.append(counts[-1] + change)

    def until(moment: float) -> float:
        place = bisect.bisect_right(moments, moment) - 1
        return passed[place] + counts[place] * (moment - moments[place])

    def mean(outcome: Outcome) -> float:
        return (until(outcome.end_s) - until(outcome.first_s)) / (outcome.end_s - outcome.first_s)

    return mean


def examine(run: ProofRun) -> dict[str, Any]:
    """One run: requests of more than one token by the company that they had, and how many of them met."""
    cluster = run_router(stream_of(run), run.router, run.delay_s)
    bands = [{"from": least, "requests": 0, "met": 0} for least in BANDS]
    for served in cluster.front.served.values():
        mean = company(served)
        for outcome in served:
            if outcome.tpot_s is not None and not outcome.is_dropped:
                band = bands[bisect.bisect_right(BANDS, mean(outcome)) - 1]
                band["requests"] += 1
                band["met"] += outcome.tpot_s <= slo_s()
    return {
        "workload": run.workload, "load": run.load, "delay_s": run.delay_s, "seed": run.seed, "router": run.router,
        "requests": sum(band["requests"] for band in bands), "met": sum(band["met"] for band in bands),
        "slo_attainment": slo_attainment(cluster.front.outcomes, slo_s()), "by_company": bands,
    }  # fmt: skip


def runs_of(records: Sequence[dict[str, Any]], files: tuple[str, str]) -> list[ProofRun]:
    """Of each cell whose attainment does not hold, under our router and under the best other."""
    found = [
        ProofRun(cell["workload"], cell["load"], cell["delay_s"], seed, router, files)
        for record in records
        for cell in record["cells"]
        if not cell["is_attainment_kept"]
        for seed in cell["seeds"]
        for router in ("manylora", cell["best_met"])
    ]
    return list(dict.fromkeys(found))


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--records", type=Path, nargs="+", required=True, help="what router_proof has written"
    )
    parser.add_argument("--conversation", required=True, help="Azure's conversation trace of 2023, CSV")
    parser.add_argument("--servegen", required=True, help="ServeGen's clients, a folder or CSV of rates")
    add_flags(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    records = [json.loads(path.read_text()) for path in args.records]
    runs = runs_of(records, (args.conversation, args.servegen))
    recording = Provenance.of(args, ", ".join(map(str, sorted({run.seed for run in runs}))))
    rows = []
    for run in runs:
        rows.append(examine(run))
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        report = {
            "benchmark": "router_attainment", "commit": recording.commit, "slo_tpot_s": slo_s(), "rows": rows,
            "provenance": recording.provenance(),
        }  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
