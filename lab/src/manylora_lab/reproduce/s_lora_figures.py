"""S-LoRA's Figures 5, 6, 7 and 10 (§7.2 to §7.5): each a set of cases, its headline and its picture.

Figures 5, 6 and 7 have S-LoRA and its own variants side by side over something that is varied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from random import Random

from manylora.config.policy import ADMISSIONS
from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.drawing import Matrix
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, mean, ratio
from manylora_lab.reproduce.s_lora_cells import NOTES, OBJECTIVE_S, SETTINGS, SYSTEMS, ServingCase, measure
from manylora_lab.workloads.arrivals import from_gaps
from manylora_lab.workloads.extracts import azure_chat_gaps_s
from manylora_lab.workloads.popularity import Popularity
from manylora_lab.workloads.scenarios import CHATBOT_POPULARITY
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest
from manylora_lab.workloads.synthetic import independent

THROUGHPUT = ("throughput_per_s", "throughput, requests/s")
ATTAINMENT = ("attainment", "SLO attainment")


def _measured(
    cases: Sequence[ServingCase], setup: Setup, measure_one: Callable[[ServingCase], Row] = measure
) -> dict[ServingCase, Row]:
    return in_parallel(
        measure_one, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )


def _variant_rows(results: dict[ServingCase, Row]) -> list[Row]:
    return [
        {
            "setting": f"{case.setting}, {case.hardware}", "system": case.system,
            "num_adapters": case.num_adapters, "rate_per_s": case.rate, **result,
        }
        for case, result in results.items()
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class AgainstVariants:
    """Headline figures: S-LoRA over each variant in these fields, mean of the ratios where it serves the same; the
    paper's text has no numbers."""

    fields: Sequence[str]

    def __call__(self, rows: list[Row]) -> list[Headline]:
        """The figures, from the experiment's rows."""
        places: dict[tuple[str, int, float], dict[str, Row]] = {}
        for row in rows:
            place = (row["setting"], row["num_adapters"], row["rate_per_s"])
            places.setdefault(place, {})[row["system"]] = row
        figures = []
        for setting in dict.fromkeys(row["setting"] for row in rows):
            for variant in SYSTEMS[1:]:
                for field in self.fields:
                    pairs = [by_system for place, by_system in places.items() if place[0] == setting]
                    ratios = [ratio(by["s-lora"][field], by[variant][field]) for by in pairs]
                    figures.append(Headline(f"{setting}: {field} of s-lora over {variant}'s", mean(ratios)))
        return figures


# ---------------------------------------------------------------- Figures 5 and 6

Loads = dict[tuple[str, str], tuple[float, tuple[float, ...]]]
"""Figures by setting and card: what is the same for all, and the values of what is varied."""


@dataclasses.dataclass(frozen=True, slots=True)
class VariantGrid:
    """An experiment's grid: the same synthetic load for each system.

    ``is_over_rates``: rates (requests a second) are varied and the number of adapters is not; else the other way
    round. At quick scale only the first of ``loads`` is run, and at smoke that place with ``smoke``.
    ``durations_s``: at full, quick and smoke.
    """

    loads: Loads
    smoke: tuple[float, tuple[float, ...]]
    durations_s: tuple[float, float, float]
    is_over_rates: bool

    def __call__(self, setup: Setup) -> GridResult:
        """Run it."""
        first = next(iter(self.loads))
        loads = setup.pick(self.loads, {first: self.loads[first]}, {first: self.smoke})
        duration_s = setup.pick(*self.durations_s)
        cases = [
            self._case(place, fixed, varied, duration_s, system, setup.seed)
            for place, (fixed, values) in loads.items()
            for system in SYSTEMS
            for varied in values
        ]
        settings = {
            "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s, "cv": 1, "alpha": 1,
            "loads": [[*place, *load] for place, load in loads.items()],
        }  # fmt: skip
        return GridResult(settings, _variant_rows(_measured(cases, setup)))

    def _case(
        self, place: tuple[str, str], fixed: float, varied: float, duration_s: float, system: str, seed: int
    ) -> ServingCase:
        num_adapters, rate = (fixed, varied) if self.is_over_rates else (varied, fixed)
        return ServingCase(*place, int(num_adapters), rate, duration_s, system, seed=seed)


def _most_over_fewest(rows: list[Row]) -> list[Headline]:
    """§7.2 says that throughput falls slightly at first and not beyond some 100 adapters; without numbers."""
    figures = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if (row["setting"], row["system"]) == (setting, "s-lora")]
        fewest, most = mine[0], mine[-1]
        name = (
            f"{setting}: s-lora's throughput, {most['num_adapters']} adapters over {fewest['num_adapters']}"
        )
        figures.append(Headline(name, ratio(most["throughput_per_s"], fewest["throughput_per_s"])))
    return figures


FIG5 = Experiment(
    "s-lora-fig5",
    "Throughput and latency of S-LoRA and its own variants, by number of adapters",
    "S-LoRA, Figure 5 (§7.2)",
    VariantGrid(
        # The authors' suites a10g-, a100-40-, a100-80-S2- and a100-80-S4-num-adapter.
        {
            ("S2", "a10"): (2.0, (1, 20, 50, 100, 200)),
            ("S4", "a100-40"): (2.0, (1, 20, 50, 100, 200)),
            ("S2", "a100-80"): (10.0, (1, 20, 50, 100, 200)),
            ("S4", "a100-80"): (6.0, (1, 100, 200, 400)),
        },
        smoke=(2.0, (1, 8)),
        durations_s=(300.0, 200.0, 10.0),
        is_over_rates=False,
    ),
    Matrix(
        (THROUGHPUT, ("latency_mean_s", "mean latency, s")),
        x=("num_adapters", "adapters"),
        series="system",
        column="setting",
    ),
    (AgainstVariants(("throughput_per_s", "latency_mean_s")), _most_over_fewest),
    NOTES,
)
FIG6 = Experiment(
    "s-lora-fig6",
    "Throughput, TTFT and attainment of S-LoRA and its own variants, by request rate",
    "S-LoRA, Figure 6 (§7.2)",
    VariantGrid(
        # The authors' suites a10g-req-rate and a100-80-S4-req-rate.
        {
            ("S2", "a10"): (200, (1.0, 1.5, 2.0, 2.5)),
            ("S4", "a100-80"): (400, (1.0, 2.0, 4.0, 6.0, 8.0)),
        },
        smoke=(8, (1.0, 4.0)),
        durations_s=(300.0, 200.0, 8.0),
        is_over_rates=True,
    ),
    Matrix(
        (THROUGHPUT, ("ttft_mean_s", "mean TTFT, s"), ATTAINMENT),
        x=("rate_per_s", "requests/s"),
        series="system",
        column="setting",
    ),
    (AgainstVariants(("throughput_per_s", "ttft_mean_s", "attainment")),),
    NOTES,
)

# ---------------------------------------------------------------- Figure 7

ADAPTERS = 26
LENGTHS = ("lognormal(85,1)", "lognormal(165,1)")
MOST_TOKENS = 1000
RATES = (1.0, 2.0, 3.0, 4.0)
"""The authors' suite a10g-req-rate-real, which runs 5 minutes as §7.3 says."""


def _on_real_arrivals(setup: Setup) -> GridResult:
    """The same requests for each system, faster or slower."""
    rates = setup.pick(RATES, RATES, (4.0,))
    duration_s = setup.pick(300.0, 150.0, 8.0)
    cases = [
        ServingCase("S2", "a10", ADAPTERS, rate, duration_s, system, seed=setup.seed)
        for system in SYSTEMS
        for rate in rates
    ]
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s, "rates_per_s": list(rates),
        "num_adapters": ADAPTERS, "lengths": list(LENGTHS), "popularity": CHATBOT_POPULARITY,
    }  # fmt: skip
    return GridResult(settings, _variant_rows(_measured(cases, setup, measure_real)))


def measure_real(case: ServingCase) -> Row:
    """Simulate on the stream that stands for the Arena's."""
    return measure(case, arena_like(case))


def arena_like(case: ServingCase) -> Stream:
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


FIG7 = Experiment(
    "s-lora-fig7",
    "Throughput and attainment of S-LoRA and its own variants, on a real service's arrivals",
    "S-LoRA, Figure 7 (§7.3)",
    _on_real_arrivals,
    Matrix((THROUGHPUT, ATTAINMENT), x=("rate_per_s", "requests/s"), series="system", column="setting"),
    (AgainstVariants(("throughput_per_s", "attainment")),),
    (
        *NOTES,
        "The log of LMSYS Chatbot Arena is not public. For it: gaps of Azure's chat service 2023 (as in "
        f"FastLibra's chatbot), shares of {ADAPTERS} adapters by {CHATBOT_POPULARITY}, and lengths about the "
        f"means that §7.3 states, 85 and 165 tokens, lognormal with an assumed cv of 1 and cut at {MOST_TOKENS}.",
    ),
)

# ---------------------------------------------------------------- Figure 10

ADMISSION_LOADS = (
    ("S1", "a100-80", 200, 10.0), ("S1", "a100-80", 200, 20.0), ("S2", "a100-80", 200, 10.0),
    ("S2", "a100-80", 200, 15.0), ("S4", "a100-80", 400, 6.0),
)  # fmt: skip
"""Setting, card, adapters, requests a second. 10 (S1, S2) and 6 (S4) are the authors'; the simulated card serves
S1 and S2 faster than theirs did, so 20 and 15 are there too, which are more than it can."""
CVS = (1.0, 2.0, 4.0, 6.0, 8.0)
"""The values of the authors' suites a10g-cv and a100-80-S4-cv."""


def _by_burstiness(setup: Setup) -> GridResult:
    """The same arrivals under each admission policy."""
    loads = setup.pick(ADMISSION_LOADS, ADMISSION_LOADS[-2:], (("S1", "a10", 10, 8.0),))
    cvs = setup.pick(CVS, (1.0, 4.0, 8.0), (4.0,))
    duration_s = setup.pick(300.0, 60.0, 15.0)
    cases = [
        ServingCase(*load, duration_s, cv=cv, admission=admission, seed=setup.seed)
        for load in loads
        for admission in ADMISSIONS
        for cv in cvs
    ]
    rows: list[Row] = [
        {
            "load": f"{case.setting}, {case.hardware}, {case.rate:g}/s", "num_adapters": case.num_adapters,
            "admission": case.admission, "cv": case.cv, **result,
        }
        for case, result in _measured(cases, setup).items()
    ]  # fmt: skip
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s,
        "cvs": list(cvs), "objective_s": OBJECTIVE_S, "loads": [list(load) for load in loads],
    }  # fmt: skip
    return GridResult(settings, rows)


def _means_over_cv(rows: list[Row]) -> list[Headline]:
    """The paper's text has no numbers here."""
    return [
        Headline(
            f"{load}: {field} of {admission}, mean over cv",
            mean([row[field] for row in rows if (row["load"], row["admission"]) == (load, admission)]),
        )
        for load in dict.fromkeys(row["load"] for row in rows)
        for field in ("attainment", "satisfaction")
        for admission in ADMISSIONS
    ]


FIG10 = Experiment(
    "s-lora-fig10",
    "Attainment and satisfaction of admission policies, by burstiness of arrivals",
    "S-LoRA, Figure 10 (§7.5)",
    _by_burstiness,
    Matrix(
        (ATTAINMENT, ("satisfaction", "user satisfaction")),
        x=("cv", "cv"),
        series="admission",
        column="load",
    ),
    (_means_over_cv,),
    (
        *NOTES,
        "early-abort is as the paper's notes describe the authors' repository (Appendix B was not at hand), "
        "decided anew before every step; averages keep 0.7 of the old, where the repository's abort_req_queue.py "
        "at hand keeps 0.3 and truncates.",
        "Attainment: requests with their first token in 6 s, of all. Satisfaction: 1 - (t/6)^2, 0 when late or "
        "dropped. Throughput counts those that were served.",
    ),
)
