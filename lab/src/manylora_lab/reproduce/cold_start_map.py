"""Which way of beginning answers a cold request first, over the link's rate, the adapter's rank and the prompt."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Literal

from manylora.config.cold_start import ColdStartConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora_lab.pricing.shapes import ALL_MODULES, shape_named
from manylora_lab.reproduce.caraserve_cold import MEASURED_RATES, WORKERS
from manylora_lab.reproduce.cells import PAGE_TOKENS
from manylora_lab.reproduce.drawing import LinePanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Headline, Row
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cold import ColdCosts, assumed_cold
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.replay import Replay
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

Cores = Literal["measured", "assumed"]
WAYS = ("wait", "block", "layerwise", "cpu", "auto")
LINKS = (4, 8, 16, 52)
"""GB/s."""
RANKS = (16, 64, 256)
PROMPTS = (16, 64, 512)
BETWEEN_LINKS, BETWEEN_RANKS, BETWEEN_PROMPTS = (6, 30), (32, 128), (32, 200)
"""Between the grid's points, where ``auto`` is judged."""
_REQUESTS, _LEFT_OUT, _EVERY_S = 12, 4, 3.0
_LAUNCH_S = 0.5e-3
_SHAPE = shape_named("llama-2-7b")

NOTES = (
    "Simulated: the engine's own policy on an H200 of assumed costs, Llama-2-7B, adapters on all linears in host "
    "memory. Requests come one at a time, each with a cold adapter of its own; the mean of all but the first "
    f"{_LEFT_OUT}, from which the policy learns what copies and cores take.",
    f"{WORKERS} workers. measured: as ours took on a core of a shared machine; assumed: 100 GFLOP/s and 8 GB/s "
    "each, 20 us a hand-over. What cores compute is hidden by half of the step's own time at most, and their "
    "results cross the same link.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class MapCase:
    """One cell and way. ``link``: GB/s."""

    way: str
    link: int
    rank: int
    prompt: int
    cores: Cores


def measure(case: MapCase) -> Row:
    """Simulate; equal cases give equal rows."""
    h200 = HARDWARE["h200"]
    card = dataclasses.replace(h200, link_bytes_s=1e9 * case.link / h200.link_efficiency)
    costs = AnalyticalCosts(_SHAPE, card, launch_s=_LAUNCH_S)
    cold = _cold(case)
    page_bytes = _SHAPE.page_bytes(PAGE_TOKENS)
    pages = _SHAPE.adapter_pages(case.rank, PAGE_TOKENS, ALL_MODULES)
    config = PolicyConfig(
        num_pages=2 * pages + 2 * -(-case.prompt // PAGE_TOKENS) + 4,
        page_tokens=PAGE_TOKENS,
        max_model_len=1024,
        max_num_seqs=8,
        max_batch_tokens=1024,
        num_host_pages=(_REQUESTS + 1) * pages + 1024,
        page_bytes=page_bytes,
        cache=CacheConfig("lru"),
        pipeline_depth=1,
        cold_start=ColdStartConfig(
            case.way, num_workers=WORKERS if case.way == "cpu" else 0
        ),
    )  # fmt: skip
    requests = [
        StreamRequest(_EVERY_S * number, number, number, 0, (Piece(number, case.prompt),), 2)
        for number in range(_REQUESTS)
    ]
    stream = Stream("cold", tuple(requests), (case.rank,) * _REQUESTS)
    replay = Replay(stream, config, costs, [pages] * _REQUESTS, cold=cold)
    replay.run()
    began = replay.report().counters.cold_starts
    return {
        "ttft_ms": round(1e3 * statistics.fmean(o.ttft_s for o in replay.outcomes[_LEFT_OUT:]), 3),
        "began": {key.split("/")[0]: value for key, value in sorted(began.items()) if key.endswith("/host")},
    }


def _cold(case: MapCase) -> ColdCosts:
    found = dataclasses.replace(assumed_cold(_SHAPE, ALL_MODULES, HARDWARE["h200"]), num_workers=WORKERS)
    if case.cores == "assumed":
        return found
    # Four products a layer, where the measured step has one.
    rates = dataclasses.replace(MEASURED_RATES, step_s=4 * MEASURED_RATES.step_s)
    return dataclasses.replace(found, rates=rates)


def _grid(setup: Setup) -> GridResult:
    places = setup.pick(
        [*_all(LINKS, RANKS, PROMPTS), *_all(BETWEEN_LINKS, BETWEEN_RANKS, BETWEEN_PROMPTS)],
        [*_all(LINKS, RANKS, PROMPTS), *_all(BETWEEN_LINKS, BETWEEN_RANKS, BETWEEN_PROMPTS)],
        _all(LINKS[:1], RANKS[:2], PROMPTS[:1]),
    )
    kinds: tuple[Cores, ...] = setup.pick(("measured", "assumed"), ("measured", "assumed"), ("assumed",))
    cases = [MapCase(way, *place, cores) for cores in kinds for place in places for way in WAYS]
    found = run_cases(measure, cases, setup)
    rows: list[Row] = [
        {
            "cell": f"{case.link} GB/s, rank {case.rank}, {case.cores} cores", "link_gb_s": case.link,
            "rank": case.rank, "prompt": case.prompt, "cores": case.cores, "way": case.way,
            "is_between": case.link in BETWEEN_LINKS, **row,
        }
        for case, row in found.items()
    ]  # fmt: skip
    settings = {
        "scale": setup.scale, "model": _SHAPE.name, "hardware": "h200", "workers": WORKERS,
        "rates": {cores: dataclasses.asdict(_cold(MapCase("cpu", 4, 16, 16, cores)).rates) for cores in kinds},
    }  # fmt: skip
    return GridResult(settings, rows)


def _all(
    links: tuple[int, ...], ranks: tuple[int, ...], prompts: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    return [(link, rank, prompt) for link in links for rank in ranks for prompt in prompts]


# ---------------------------------------------------------------- figures


def best_of(rows: list[Row], ways: tuple[str, ...]) -> dict[tuple[str, int, int, int], Row]:
    """The row with the least time of each cell, by cores, link, rank and prompt."""
    found: dict[tuple[str, int, int, int], Row] = {}
    for row in rows:
        place = (row["cores"], row["link_gb_s"], row["rank"], row["prompt"])
        if row["way"] in ways and (place not in found or row["ttft_ms"] < found[place]["ttft_ms"]):
            found[place] = row
    return found


def _headline(rows: list[Row]) -> list[Headline]:
    figures = []
    best, auto = best_of(rows, WAYS[:-1]), best_of(rows, ("auto",))
    for cores in dict.fromkeys(place[0] for place in best):
        for is_between in (False, True):
            places = [p for p, row in best.items() if p[0] == cores and row["is_between"] == is_between]
            if not places:
                continue
            where = f"{cores} cores, {'between the points' if is_between else 'the grid'}"
            over = [auto[place]["ttft_ms"] / best[place]["ttft_ms"] for place in places]
            figures += [
                Headline(f"{where}: auto over the best, mean", round(statistics.fmean(over), 4)),
                Headline(f"{where}: auto over the best, most", round(max(over), 4)),
                *(
                    Headline(
                        f"{where}: cells where {way} is best", sum(best[p]["way"] == way for p in places)
                    )
                    for way in WAYS[:-1]
                ),
            ]
    return figures


MAP = Experiment(
    "cold-start-map",
    "The time to the first token of a cold request by the way it begins",
    "Cold-start modes beside each other: ours (CaraServe §4)",
    _grid,
    LinePanels(
        "cell", "way", ("prompt", "prompt, tokens"), ("ttft_ms", "ms"), ("prompt", "ttft_ms"), is_shared=False
    ),
    (_headline,),
    NOTES,
    is_stored=True,
)
