"""The cases of FastLibra's evaluation (§6.1, §6.3): scenarios, models on cards, numbers of adapters, rates.

Rates are fixed before policies are compared: shares of the peak that ``fastlibra`` bears in each case. Owns also
how policies are compared in a headline; which figures there are is each experiment's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from manylora_lab.reproduce.cells import REFERENCE, Cell, CellResult, in_parallel, peak_rate, run_cells
from manylora_lab.reproduce.experiment import GridResult, Setup
from manylora_lab.reproduce.fastlibra_paper import AMONG_MANY, stated
from manylora_lab.reproduce.report import Headline, Row, change, mean

SCENARIOS = ("chatbot", "translation", "agent")
MODELS = (("llama-2-7b", 1), ("llama-2-13b", 2), ("codellama-34b", 4))
"""The models, with the cards that the paper gives them (§6.1)."""
ADAPTERS = (20, 50, 100)
OURS = ("fastlibra", "manylora")
"""Each is compared with both baselines; the paper's figures are of the first."""
BASELINES = ("static-lru", "s-lora")
PAPERS_NAMES = {"static-lru": "vLLM", "s-lora": "S-LoRA"}
VARIANTS = ("fastlibra-wom", "fastlibra-wos", "fastlibra-wol")
POLICIES = ("manylora", "fastlibra", *BASELINES)
SHOWN = (*POLICIES, REFERENCE)
TTFT_PARTS = ("ttft_queue_ms", "ttft_adapter_ms", "ttft_kv_ms", "ttft_steps_ms")
FIRST_RATES = {"chatbot": 4.0, "translation": 32.0, "agent": 32.0}
"""Where the search for a peak begins; translations and agents' turns are short."""
SIMULATION_NOTES = (
    "Simulated: the engine's own policy on a device of assumed costs (manylora_lab.sim.analytical), ideally split "
    "over the cards.",
    "The paper's NPU has no stated memory bandwidth: 1.2 TB/s is assumed.",
    "static-lru stands for the paper's vLLM with LRU offloading (§6.1), s-lora for its S-LoRA.",
    "Adapters of rank 32 or 64 on q, k, v, o (the paper does not name the modules).",
)
WARM_NOTE = "Every adapter was asked for once before the start."
NOTES = (
    *SIMULATION_NOTES,
    WARM_NOTE,
    "Rates are shares of the peak that fastlibra bears in each case (mean TTFT below 500 ms); figures are means "
    "over them, then over cases.",
    "cached, where it is shown: the same arrivals with unlimited pages and all resident; a reference, not a "
    "bound.",
)


def duration_s(setup: Setup) -> float:
    """How long one run takes: the paper's half hour, or less."""
    return setup.pick(1800.0, 30.0, 4.0)


def rate_shares(setup: Setup) -> tuple[float, ...]:
    """The rates as shares of the peak: ten from nothing to all (§6.3)."""
    return setup.pick(tuple(n / 10 for n in range(1, 11)), (0.4, 0.9), (0.5,))


def cases(setup: Setup) -> dict[str, Cell]:
    """All of the paper's, named as in its figures ("7B-20" in a scenario); a few with less time.

    Policy and rate are for others to fill in: here ``fastlibra``, and where the search for its peak begins.
    """
    scenarios: Sequence[str] = setup.pick(SCENARIOS, SCENARIOS, SCENARIOS[:1])
    models: Sequence[tuple[str, int]] = setup.pick(MODELS, MODELS[:1], MODELS[:1])
    adapters: Sequence[int] = setup.pick(ADAPTERS, (100,), (20,))
    return {
        f"{scenario} {model.rpartition('-')[2].upper()}-{num}": Cell(
            scenario, "fastlibra", FIRST_RATES[scenario], num, duration_s(setup),
            model=model, cards=cards, seed=setup.seed,
        )
        for scenario in scenarios
        for model, cards in models
        for num in adapters
    }  # fmt: skip


MANY_ADAPTERS = (1000, 2000)
POPULARITIES = {
    "uniform": "uniform",
    "distinct": "round-robin",
    "skewed-0.05": "gaussian(0.05)",
    "skewed-0.1": "gaussian(0.1)",
    "skewed-0.2": "gaussian(0.2)",
}
"""§6.9; the paper's x are in its picture alone."""


def cases_of_many(setup: Setup, numbers: Sequence[int], names: Sequence[str]) -> dict[str, Cell]:
    """The cases of §6.9, named "1000 uniform": chatbot and the 7B model, policy and rate as in ``cases``."""
    return {
        f"{number} {name}": Cell(
            "chatbot", "fastlibra", FIRST_RATES["chatbot"], number, duration_s(setup),
            popularity=POPULARITIES[name], seed=setup.seed,
        )
        for number in numbers
        for name in names
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Grid:
    """Cases by name. ``runs``: of a case under a policy, one for each of the case's ``rates``; ``peaks``: of those
    policies whose were asked for."""

    cases: dict[str, Cell]
    rates: dict[str, list[float]]
    peaks: dict[tuple[str, str], float]
    runs: dict[tuple[str, str], list[CellResult]]

    def settings(self, setup: Setup) -> dict[str, Any]:
        """All that a repetition needs."""
        return {
            "scale": setup.scale, "seed": setup.seed, "rate_shares": list(rate_shares(setup)),
            "cases": {name: dataclasses.asdict(cell) for name, cell in self.cases.items()},
            "rates": self.rates,
        }  # fmt: skip

    def mean(self, case: str, policy: str, field: str) -> float | None:
        """The mean over the case's rates."""
        return mean([run[field] for run in self.runs[case, policy]])

    def parts(self, case: str, policy: str) -> Row:
        """The parts of the mean TTFT, by the names they have in a result."""
        return {name: self.mean(case, policy, name) for name in TTFT_PARTS}


def run_grid(
    setup: Setup, found: dict[str, Cell], policies: Sequence[str], peaks_of: Sequence[str] = ()
) -> Grid:
    """Every policy in every case, at shares of ``fastlibra``'s peak; and the peaks of ``peaks_of``."""
    searched = dict.fromkeys(("fastlibra", *peaks_of))
    peaks = _peaks(setup, ((case, policy) for case in found for policy in searched), found)
    rates = {case: [share * peaks[case, "fastlibra"] for share in rate_shares(setup)] for case in found}
    # Policies of one case and rate in a row: they share the stream.
    cells = {
        (case, rate, policy): dataclasses.replace(cell, rate=rate, policy=policy)
        for case, cell in found.items()
        for rate in rates[case]
        for policy in policies
    }
    results = run_cells(cells.values(), setup.num_workers, setup.show)
    runs = {
        (case, policy): [results[cells[case, rate, policy]] for rate in rates[case]]
        for case in found
        for policy in policies
    }
    return Grid(found, rates, peaks, runs)


def _peaks(
    setup: Setup, wanted: Iterable[tuple[str, str]], found: Mapping[str, Cell]
) -> dict[tuple[str, str], float]:
    """The peak rate of each case under each policy, by bisection from the case's own rate."""
    cells = {(case, policy): dataclasses.replace(found[case], policy=policy) for case, policy in wanted}
    return find_peaks(setup, cells)


def find_peaks(setup: Setup, cells: Mapping[Any, Cell]) -> dict[Any, float]:
    """Find each cell's peak, by bisection from its rate; coarser with less time."""
    search = functools.partial(
        peak_rate, tolerance=setup.pick(0.03, 0.25, 0.5), highest=setup.pick(400.0, 200.0, 8.0)
    )
    return in_parallel(search, dict(cells), setup.num_workers, setup.show, "peak rates found")


def scenario_rows(grid: Grid, policies: Sequence[str], fields: Mapping[str, str]) -> list[Row]:
    """A row for each scenario under each policy: means over rates, then over cases.

    ``fields``: a result's, by the name it gets in the row.
    """
    rows: list[Row] = []
    for scenario in dict.fromkeys(cell.scenario for cell in grid.cases.values()):
        inside = [case for case, cell in grid.cases.items() if cell.scenario == scenario]
        for policy in policies:
            row: Row = {"scenario": scenario, "policy": policy}
            for name, field in fields.items():
                row[name] = mean([grid.mean(case, policy, field) for case in inside])
            rows.append(row)
    return rows


def pairs(rows: Sequence[Row], ours: str, other: str, field: str, by: str) -> list[tuple[Any, Any]]:
    """(our policy's value, the other's) for each value of ``by``."""
    values = {(row[by], row["policy"]): row[field] for row in rows}
    return [(values[place, ours], values[place, other]) for place in dict.fromkeys(row[by] for row in rows)]


# ---------------------------------------------------------------- experiments over the grid, and their headlines


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyGrid:
    """An experiment's grid: every policy in every case, at shares of ``fastlibra``'s peak.

    ``rows``: what is told of the runs; ``peaks_of``: the policies whose peaks it needs besides.
    """

    cases: Callable[[Setup], dict[str, Cell]]
    policies: Sequence[str]
    rows: Callable[[Grid], list[Row]]
    peaks_of: Sequence[str] = ()

    def __call__(self, setup: Setup) -> GridResult:
        """Run it."""
        grid = run_grid(setup, self.cases(setup), self.policies, self.peaks_of)
        return GridResult(grid.settings(setup), self.rows(grid))


@dataclasses.dataclass(frozen=True, slots=True)
class Against:
    """A headline figure: how a policy's field compares with another policy's, in the mean over cases.

    ``how``: ``change`` or ``ratio``. ``by``: the row's field that names the case. ``within``, ``without``: only
    cases whose names begin so, or do not. ``digits``: how far it is rounded; None: not at all.
    """

    metric: str
    ours: str
    other: str
    field: str
    how: Callable[[Any, Any], float | None] = change
    by: str = "case"
    paper: float | None = None
    within: str = ""
    without: str | None = None
    digits: int | None = None

    def __call__(self, rows: list[Row]) -> list[Headline]:
        """The figure, from the experiment's rows."""
        mine = [
            row
            for row in rows
            if row[self.by].startswith(self.within)
            and (self.without is None or not row[self.by].startswith(self.without))
        ]
        compared = pairs(mine, self.ours, self.other, self.field, self.by)
        found = mean([self.how(a, b) for a, b in compared])
        if found is not None and self.digits is not None:
            found = round(found, self.digits)
        return [Headline(self.metric, found, self.paper)]


def against_both(
    rows: list[Row], where: str = "", digits: int | None = None, of: Sequence[str] = OURS
) -> list[Headline]:
    """§6.9: changes of TTFT and TPOT against both baselines together, then against each.

    ``where``: what each figure's name ends in. ``digits``: as in ``Against``. ``of``: the policies compared.
    """
    figures = []
    for ours in of:
        for what, paper in AMONG_MANY.items():
            each: list[Headline] = []
            for baseline in BASELINES:
                metric = f"{ours}: {what} against {PAPERS_NAMES[baseline]}{where}"
                each += Against(metric, ours, baseline, f"{what.lower()}_mean_ms", digits=digits)(rows)
            both = mean([figure.ours for figure in each])
            figures += [Headline(f"{ours}: {what} against both{where}", both, stated(ours, paper)), *each]
    return figures
