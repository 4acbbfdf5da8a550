"""S-LoRA's adapter clustering (§4.2, appendix A): few adapters at once, over popularity and burstiness."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.drawing import Matrix
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, ratio
from manylora_lab.reproduce.s_lora_cells import NOTES, ServingCase, simulate, stream_of, summary

NUM_ADAPTERS, RATE = 32, 2.0
SIZES = ("1", "2", "4", "8", "32")
ALPHAS = (0.1, 0.3, 0.6, 1.0)
CVS = (1.0, 2.0, 4.0, 6.0, 8.0)
PLACES = (("S2", "a10"), ("S4", "a100-40"))


def measure(case: ServingCase) -> Row:
    """What the other experiments of S-LoRA measure, and how unlike adapters fared: from the least mean time to the
    first token of an adapter to the largest."""
    outcomes = simulate(case, stream_of(case))
    ttfts: dict[int, list[float]] = {}
    for outcome in outcomes:
        ttfts.setdefault(outcome.request.adapter or 0, []).append(outcome.ttft_s)
    means = [statistics.fmean(of_adapter) for of_adapter in ttfts.values()]
    return {**summary(outcomes), "ttft_spread_s": round(max(means) - min(means), 4)}


def _grid(setup: Setup) -> GridResult:
    places = setup.pick(PLACES, PLACES[:1], PLACES[:1])
    alphas, cvs = setup.pick(ALPHAS, (0.1, 1.0), (1.0,)), setup.pick(CVS, (4.0,), ())
    sizes: Sequence[str] = setup.pick((*SIZES, "4:hard"), (*SIZES, "4:hard"), ("1", "32"))
    duration_s = setup.pick(120.0, 60.0, 10.0)
    loads = [(1.0, alpha) for alpha in alphas] + [(cv, 1.0) for cv in cvs if cv != 1.0]
    cases = [
        ServingCase(
            *place,
            NUM_ADAPTERS,
            RATE,
            duration_s,
            cv=cv,
            alpha=alpha,
            seed=setup.seed,
            adapter_batch_limit=size,
        )
        for place in places
        for cv, alpha in loads
        for size in sizes
    ]
    found = in_parallel(
        measure, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )
    rows: list[Row] = [
        {
            "place": f"{case.setting}, {case.hardware}", "load": f"alpha {case.alpha:g}, cv {case.cv:g}",
            "size": case.adapter_batch_limit, **row,
        }
        for case, row in found.items()
    ]  # fmt: skip
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s, "num_adapters": NUM_ADAPTERS,
        "rate_per_s": RATE, "sizes": list(sizes), "loads": [list(load) for load in loads],
        "places": [list(place) for place in places],
    }  # fmt: skip
    return GridResult(settings, rows)


def _smallest_over_largest(rows: list[Row]) -> list[Headline]:
    """Appendix A says that small sizes are better, without numbers in the text at hand."""
    figures = []
    for place, load in dict.fromkeys((row["place"], row["load"]) for row in rows):
        by_size = {row["size"]: row for row in rows if (row["place"], row["load"]) == (place, load)}
        for field in ("throughput_per_s", "latency_mean_s", "ttft_spread_s"):
            value = ratio(by_size["1"][field], by_size["32"][field])
            figures.append(Headline(f"{place}, {load}: {field} of size 1 over that of 32", value))
    return figures


CLUSTER = Experiment(
    "s-lora-cluster",
    "Throughput and latency by the number of adapters at once",
    "S-LoRA, appendix A (§4.2)",
    _grid,
    Matrix(
        (("throughput_per_s", "throughput, requests/s"), ("latency_mean_s", "mean latency, s")),
        x=("size", "adapters at once"),
        series="load",
        column="place",
    ),
    (_smallest_over_largest,),
    (
        *NOTES,
        "Unlike in the authors' code a request is overtaken for 2 s at most, and adapters count after each "
        "admission, not once a round. size N: soft, as theirs; N:hard runs no further adapter.",
        "The authors' repository has for S2, alpha 1, sizes 1, 2, 4, 8 and 32: 1.73, 1.69, 1.68, 1.71 and 1.64 "
        "requests a second, mean latencies of 14.6, 15.4, 15.9, 14.1 and 16.6 s.",
    ),
)
