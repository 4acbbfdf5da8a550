"""S-LoRA's Figure 10: early abort against first and last come first served, as arrivals become burstier (§7.5)."""

from __future__ import annotations

from pathlib import Path

from manylora.config import ADMISSIONS
from manylora.reproduce import drawing
from manylora.reproduce.cells import in_parallel
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.report import Headline, Report, Row, mean
from manylora.reproduce.s_lora_cells import NOTES, OBJECTIVE_S, Case, measure

LOADS = (
    ("S1", "a100-80", 200, 10.0), ("S1", "a100-80", 200, 20.0), ("S2", "a100-80", 200, 10.0),
    ("S2", "a100-80", 200, 15.0), ("S4", "a100-80", 400, 6.0),
)  # fmt: skip
"""Setting, card, adapters, requests a second. 10 (S1, S2) and 6 (S4) are the authors'; the simulated card serves
S1 and S2 faster than theirs did, so 20 and 15 are there too, which are more than it can."""
CVS = (1.0, 2.0, 4.0, 6.0, 8.0)
"""As in the authors' suites a10g-cv and a100-80-S4-cv."""


def run(setup: Setup) -> Report:
    """The same arrivals under each admission policy."""
    loads = setup.pick(LOADS, LOADS[-2:], (("S1", "a10", 10, 8.0),))
    cvs = setup.pick(CVS, (1.0, 4.0, 8.0), (4.0,))
    duration_s = setup.pick(300.0, 60.0, 15.0)
    cases = [
        Case(*load, duration_s, cv=cv, admission=admission, seed=setup.seed)
        for load in loads
        for admission in ADMISSIONS
        for cv in cvs
    ]
    results = in_parallel(
        measure, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )
    rows: list[Row] = [
        {
            "load": f"{case.setting}, {case.hardware}, {case.rate:g}/s", "num_adapters": case.num_adapters,
            "admission": case.admission, "cv": case.cv, **result,
        }
        for case, result in results.items()
    ]  # fmt: skip
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s,
        "cvs": list(cvs), "objective_s": OBJECTIVE_S, "loads": [list(load) for load in loads],
    }  # fmt: skip
    notes = (
        *NOTES,
        "early-abort is as the paper's notes describe the authors' repository (Appendix B was not at hand), "
        "decided anew before every step; averages keep 0.7 of the old, where the repository's abort_req_queue.py "
        "at hand keeps 0.3 and truncates.",
        "Attainment: requests with their first token in 6 s, of all. Satisfaction: 1 - (t/6)^2, 0 when late or "
        "dropped. Throughput counts those that were served.",
    )
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings, rows, _headline(rows), notes)


def _headline(rows: list[Row]) -> list[Headline]:
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


def draw(report: Report, path: Path) -> None:
    """Attainment above satisfaction, over cv."""
    panels = (("attainment", "SLO attainment"), ("satisfaction", "user satisfaction"))
    drawing.grid(report, path, panels, x=("cv", "cv"), series="admission", column="load")


EXPERIMENT = Experiment(
    "s-lora-fig10",
    "Attainment and satisfaction of admission policies, by burstiness of arrivals",
    ("sim",),
    run,
    draw,
)
