"""What Figures 5, 6 and 7 of S-LoRA share: it and its own variants, side by side over something that is varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manylora.reproduce.cells import in_parallel
from manylora.reproduce.experiment import Setup
from manylora.reproduce.report import Headline, Row, mean, ratio
from manylora.reproduce.s_lora_cells import SYSTEMS, Case, measure

Measure = Callable[[Case], Row]


def variant_rows(cases: Sequence[Case], setup: Setup, measured: Measure = measure) -> list[Row]:
    """A row for each case."""
    results = in_parallel(
        measured, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )
    return [
        {
            "setting": f"{case.setting}, {case.hardware}", "system": case.system,
            "num_adapters": case.num_adapters, "rate_per_s": case.rate, **result,
        }
        for case, result in results.items()
    ]  # fmt: skip


def against_variants(rows: Sequence[Row], fields: Sequence[str]) -> list[Headline]:
    """S-LoRA over each variant, mean of the ratios where it serves the same; the paper's text has no numbers."""
    figures = []
    places: dict[tuple[str, int, float], dict[str, Row]] = {}
    for row in rows:
        place = (row["setting"], row["num_adapters"], row["rate_per_s"])
        places.setdefault(place, {})[row["system"]] = row
    for setting in dict.fromkeys(row["setting"] for row in rows):
        for variant in SYSTEMS[1:]:
            for field in fields:
                pairs = [by_system for place, by_system in places.items() if place[0] == setting]
                ratios = [ratio(by["s-lora"][field], by[variant][field]) for by in pairs]
                figures.append(Headline(f"{setting}: {field} of s-lora over {variant}'s", mean(ratios)))
    return figures
