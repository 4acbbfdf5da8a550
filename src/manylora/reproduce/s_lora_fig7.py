"""S-LoRA's Figure 7: throughput and attainment on arrivals of a real service, beside its variants (§7.3)."""

from __future__ import annotations

from pathlib import Path
from random import Random

from manylora.reproduce import drawing
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.report import Report, Row
from manylora.reproduce.s_lora_cells import NOTES, SETTINGS, SYSTEMS, Case, measure
from manylora.reproduce.s_lora_variants import against_variants, variant_rows
from manylora.workloads.arrivals import from_gaps
from manylora.workloads.extracts import azure_chat_gaps_s
from manylora.workloads.popularity import Popularity
from manylora.workloads.scenarios import CHATBOT_POPULARITY
from manylora.workloads.stream import Piece, Stream, StreamRequest
from manylora.workloads.synthetic import independent

ADAPTERS = 26
LENGTHS = ("lognormal(85,1)", "lognormal(165,1)")
MOST_TOKENS = 1000
RATES = (1.0, 2.0, 3.0, 4.0)
"""The authors' suite a10g-req-rate-real, which runs 5 minutes as §7.3 says."""


def run(setup: Setup) -> Report:
    """The same requests for each system, faster or slower."""
    rates = setup.pick(RATES, RATES, (4.0,))
    duration_s = setup.pick(300.0, 150.0, 8.0)
    cases = [
        Case("S2", "a10", ADAPTERS, rate, duration_s, system, seed=setup.seed)
        for system in SYSTEMS
        for rate in rates
    ]
    rows = variant_rows(cases, setup, measure_real)
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s, "rates_per_s": list(rates),
        "num_adapters": ADAPTERS, "lengths": list(LENGTHS), "popularity": CHATBOT_POPULARITY,
    }  # fmt: skip
    notes = (
        *NOTES,
        "The log of LMSYS Chatbot Arena is not public. For it: gaps of Azure's chat service 2023 (as in "
        f"FastLibra's chatbot), shares of {ADAPTERS} adapters by {CHATBOT_POPULARITY}, and lengths about the "
        f"means that §7.3 states, 85 and 165 tokens, lognormal with an assumed cv of 1 and cut at {MOST_TOKENS}.",
    )
    headline = against_variants(rows, ("throughput_per_s", "attainment"))
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings, rows, headline, notes)


def measure_real(case: Case) -> Row:
    """Simulate on the stream that stands for the Arena's."""
    return measure(case, arena_like(case))


def arena_like(case: Case) -> Stream:
    """round(rate * duration) requests at a real service's pace, scaled to fit (§7.3)."""
    # A generator for each part, so that the rate changes nothing but the pace.
    starts, adapters, lengths = (Random(f"{case.seed} {part}") for part in ("gaps", "adapters", "lengths"))
    gaps_s = azure_chat_gaps_s()
    moments = from_gaps(gaps_s, case.rate, case.duration_s, starts.randrange(len(gaps_s)))
    draws = Popularity.parse(CHATBOT_POPULARITY).draws(case.num_adapters, adapters)
    length = independent(*LENGTHS)
    requests = []
    for number, (moment, adapter) in enumerate(zip(moments, draws)):
        prompt, output = (min(MOST_TOKENS, tokens) for tokens in length(lengths))
        requests.append(
            StreamRequest(moment, adapter, number, 0, (Piece(("arena", number), prompt),), output)
        )
    ranks = SETTINGS[case.setting].ranks
    return Stream(
        "arena-like", tuple(requests), tuple(ranks[n % len(ranks)] for n in range(case.num_adapters))
    )


def draw(report: Report, path: Path) -> None:
    """Throughput above attainment."""
    panels = (("throughput_per_s", "throughput, requests/s"), ("attainment", "SLO attainment"))
    drawing.grid(report, path, panels, x=("rate_per_s", "requests/s"), series="system", column="setting")


EXPERIMENT = Experiment(
    "s-lora-fig7",
    "Throughput and attainment of S-LoRA and its own variants, on a real service's arrivals",
    ("sim",),
    run,
    draw,
)
