"""From a store of cells to the table's rows and its headline beside the paper's, as far as the cells are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from manylora.reproduce.cells import REFERENCE, Cell, CellResult
from manylora.reproduce.experiment import Found, Setup
from manylora.reproduce.fastlibra_grid import (
    BASELINES,
    PAPERS_NAMES,
    SCENARIOS,
    SIMULATION_NOTES,
    VARIANTS,
    WARM_NOTE,
)
from manylora.reproduce.fastlibra_paper import AGAINST, AMONG_MANY, IN_SCENARIOS, INVALID, OF_VARIANTS
from manylora.reproduce.fastlibra_table_cases import COMPARED, Table
from manylora.reproduce.fastlibra_table_peaks import LIMIT_MS, known_peak
from manylora.reproduce.fastlibra_table_store import CellStore, code_of
from manylora.reproduce.report import Headline, Row, change, mean, ratio

PARTS = ("queue", "adapter", "kv", "steps")
TIMES = ("ttft_mean_ms", "tpot_mean_ms", *(f"ttft_{part}_ms" for part in PARTS))
FIELDS = (
    *TIMES, "ttft_p50_ms", "ttft_p99_ms", "done_per_s", "output_tokens_per_s", "kv_hit_device", "kv_hit_host",
    "adapter_hit_device", "adapter_hit_host", "pool_used", "pool_running", "pool_history", "pool_adapters",
    "invalid_share", "preemptions",
)  # fmt: skip
LIMITS = ("page_kept_device", "page_kept_device_limit", "page_kept", "page_kept_limit")

NOTES = {
    "npu": SIMULATION_NOTES,
    "h200": (
        "Simulated: the engine's own policy on a device with the costs that manylora profile measured on an H200, "
        "ideally split over the cards: every step takes 1/cards of the time, every copy goes over as many links.",
        "Pools are as large as those that the weights leave on the paper's NPU, so their ratio to the weights is "
        "the paper's.",
        *SIMULATION_NOTES[2:],
    ),
}
ALL_NOTES = (
    "34B: CodeLlama-34B's shape, with 8 KV heads for 64 query heads; the paper's 34B is not named.",
    WARM_NOTE,
    f"Peak: the highest rate with a mean TTFT below {LIMIT_MS:g} ms below which none was missed, by bisection. "
    "Rates: ten shares of fastlibra's peak in each case, fixed before policies were compared; arrivals, lengths "
    "and seed are the same for all.",
    "A figure of a case is the mean over its rates; sustained: over the rates that every policy sustains. Changes "
    "and ratios are means over cases of the change in each.",
    "Hit rate: the mean of the share of prompt tokens whose KV, and of requests whose adapter, is on the device "
    "when they are admitted. Memory use: share of the pool, sampled every virtual second.",
    "cached: the same arrivals with unlimited pages and all resident; a reference, not a bound. kept: pages found "
    "that were asked for, and the most that any policy could have kept of what manylora's runs asked for "
    "(docs/limits.md).",
    "lru and static-lru free pages when none are left, by way of the host (the paper's offloading, §6.1): for all "
    "requests that wait and could be admitted together, which then wait for one copy. On the gaps: "
    "docs/fastlibra-table.md.",
)


def found(setup: Setup, table: Table, rates: Mapping[str, list[float]], store: CellStore) -> Found:
    """All that the store has; ``settings["missing"]`` says what it has not."""
    rows: list[Row] = []
    missing: list[str] = []
    seconds = 0.0
    for case in table.cases:
        if case not in rates:
            missing.append(f"{case}: rates")
            continue
        cells = table.cells(case, rates)
        results = {key: store.find(cell) for key, cell in cells.items()}
        seconds += sum(store.seconds(cell) for cell in cells.values())
        for policy in table.policies(case):
            row = _row(table, case, policy, rates[case], results)
            if policy != REFERENCE and case in table.main:
                peak = known_peak(table.peak_cell(case, policy, rates), store, table.search)
                row["peak_per_s"] = peak.per_s if peak else None
            rows.append(row)
            if row["ttft_mean_ms"] is None:
                missing.append(f"{case}, {policy}: {row['rates_done']} of {len(rates[case])} rates")
            elif policy in COMPARED and case in table.main and row["peak_per_s"] is None:
                missing.append(f"{case}, {policy}: peak")
    settings = {
        "scale": setup.scale, "seed": setup.seed, "hardware": table.hardware,
        "device": f"simulated, {table.hardware}", "rate_shares": list(table.shares), "rates": dict(rates),
        "cases": {name: _settings(cell) for name, cell in table.cases.items()},
        "code": _codes(table), "lines_of_other_code": store.num_of_other_code,
        "hours_simulated": round(seconds / 3600, 2), "done": _done(table, rows), "missing": missing,
    }  # fmt: skip
    notes: tuple[str, ...] = (*NOTES[table.hardware], *ALL_NOTES, _resolution(table))
    if store.num_of_other_code:
        notes += (f"{store.num_of_other_code} lines of the store are of other code and were passed over.",)
    return Found(settings, rows, notes=notes)


def _resolution(table: Table) -> str:
    share = table.search.tolerance
    return f"A search ends within {share:.1%} of the peak: peaks that differ by less are not told apart."


def _done(table: Table, rows: list[Row]) -> dict[str, int]:
    """How much is there, beside how much there is to run."""
    return {
        "simulations": sum(row["rates_done"] for row in rows),
        "all_simulations": len(table.shares) * sum(len(table.policies(case)) for case in table.cases),
        "peaks": sum(row["peak_per_s"] is not None for row in rows),
        "all_peaks": len(COMPARED) * len(table.main),
    }


def _settings(cell: Cell) -> dict[str, Any]:
    names = (
        "scenario",
        "model",
        "cards",
        "num_adapters",
        "popularity",
        "duration_s",
        "hardware",
        "pool_like",
    )
    return {name: getattr(cell, name) for name in names}


def _codes(table: Table) -> dict[str, str]:
    """Of each policy in the first case: what decided (see ``code_of``)."""
    case, cell = next(iter(table.cases.items()))
    return {policy: code_of(dataclasses.replace(cell, policy=policy)) for policy in table.policies(case)}


def _row(
    table: Table,
    case: str,
    policy: str,
    rates: list[float],
    results: Mapping[tuple[float, str], CellResult | None],
) -> Row:
    cell = table.cases[case]
    mine = [results[rate, policy] for rate in rates]
    done = [result for result in mine if result is not None]
    sustained = [result for rate, result in zip(rates, mine) if result and _all_sustain(rate, results)]
    row: Row = {
        "group": "main" if case in table.main else "many", "case": case, "scenario": cell.scenario,
        "model": cell.model, "num_adapters": cell.num_adapters, "policy": policy, "rates_done": len(done),
        "peak_per_s": None,
    }  # fmt: skip
    # A mean over some of the rates would be of other loads than another policy's.
    complete = done if len(done) == len(rates) else []
    for field in (*FIELDS, *LIMITS):
        row[field] = _rounded(mean([result.get(field) for result in complete]))
    for field in TIMES:
        row[f"sustained_{field}"] = _rounded(mean([result[field] for result in sustained if complete]))
    row["hit"] = _rounded(mean([row["kv_hit_device"], row["adapter_hit_device"]]))
    row["num_sustained"] = len(sustained)
    row["ttft_ms_by_rate"] = [result and result["ttft_mean_ms"] for result in mine]
    return row


def _all_sustain(rate: float, results: Mapping[tuple[float, str], CellResult | None]) -> bool:
    """Every policy, not the reference."""
    there = [result for (at, policy), result in results.items() if at == rate and policy != REFERENCE]
    return all(result is not None and result["ttft_mean_ms"] < LIMIT_MS for result in there)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# ---------------------------------------------------------------- headline


def compared(
    rows: Iterable[Row], ours: str, other: str, field: str, how: Callable[[Any, Any], float | None]
) -> float | None:
    """The mean over cases of ``how`` our value compares with the other's in each."""
    values: dict[str, dict[str, float | None]] = {}
    for row in rows:
        values.setdefault(row["case"], {})[row["policy"]] = row[field]
    found = mean([how(case.get(ours), case.get(other)) for case in values.values()])
    return None if found is None else round(found, 4)


def headline(rows: list[Row]) -> list[Headline]:
    """The paper's figures beside ours, then what we aim at."""
    main = [row for row in rows if row["group"] == "main"]
    many = [row for row in rows if row["group"] == "many"]
    figures = []
    for ours in ("fastlibra", "manylora"):
        for baseline in BASELINES:
            figures += _against(main, ours, baseline)
    for variant in VARIANTS:
        figures += _of_variant(main, variant)
    for policy, stated in INVALID.items():
        invalid = mean([row["invalid_share"] for row in main if row["policy"] == policy])
        figures.append(Headline(f"{policy}: invalid share of history", _rounded(invalid), stated))
    if many:
        figures += _among_many(many)
    return figures + _aims(main)


def _against(main: list[Row], ours: str, baseline: str) -> list[Headline]:
    is_papers, name = ours == "fastlibra", PAPERS_NAMES[baseline]
    stated = AGAINST[baseline] if is_papers else None
    figures = []
    for what in ("TTFT", "TPOT"):
        field = f"{what.lower()}_mean_ms"
        found = compared(main, ours, baseline, field, change)
        figures.append(
            Headline(f"{ours}: {what} against {name}", found, stated and getattr(stated, what.lower()))
        )
        found = compared(main, ours, baseline, f"sustained_{field}", change)
        figures.append(Headline(f"{ours}: {what} against {name}, rates that all sustain", found))
    for what, field, paper in (
        ("peak", "peak_per_s", stated and stated.peak),
        ("memory use", "pool_used", stated and stated.used),
        ("hit rate", "hit", stated and stated.hit),
    ):
        found = compared(main, ours, baseline, field, ratio)
        figures.append(Headline(f"{ours}: {what} over {name}'s", found, paper))
    scenario, in_it, in_others = IN_SCENARIOS[baseline]
    inside = [row for row in main if row["scenario"] == scenario]
    others = [row for row in main if row["scenario"] != scenario]
    for rows, where, paper in ((inside, scenario, in_it), (others, f"without {scenario}", in_others)):
        found = compared(rows, ours, baseline, "ttft_mean_ms", change)
        figures.append(Headline(f"{ours}: TTFT against {name}, {where}", found, paper if is_papers else None))
    return figures


def _of_variant(main: list[Row], variant: str) -> list[Headline]:
    ttft, tpot, peak = OF_VARIANTS[variant]
    return [
        Headline(f"{variant}: TTFT ratio", compared(main, variant, "fastlibra", "ttft_mean_ms", ratio), ttft),
        Headline(
            f"{variant}: TTFT ratio, rates that all sustain",
            compared(main, variant, "fastlibra", "sustained_ttft_mean_ms", ratio),
        ),
        Headline(f"{variant}: TPOT ratio", compared(main, variant, "fastlibra", "tpot_mean_ms", ratio), tpot),
        Headline(f"{variant}: peak change", compared(main, variant, "fastlibra", "peak_per_s", change), peak),
    ]


def _among_many(many: list[Row]) -> list[Headline]:
    figures = []
    for ours in ("fastlibra", "manylora"):
        for what, paper in AMONG_MANY.items():
            found = [compared(many, ours, b, f"{what.lower()}_mean_ms", change) for b in BASELINES]
            names = ("both", *(PAPERS_NAMES[baseline] for baseline in BASELINES))
            stated = (paper if ours == "fastlibra" else None, None, None)
            figures += [
                Headline(f"{ours}: {what} against {name}, 1,000 and 2,000 adapters", value, beside)
                for name, value, beside in zip(names, (mean(found), *found), stated, strict=True)
            ]
    return figures


def _aims(main: list[Row]) -> list[Headline]:
    by_case = {(row["case"], row["policy"]): row["ttft_mean_ms"] for row in main}
    both = [
        (ours, by_case.get((case, "fastlibra")))
        for (case, policy), ours in by_case.items()
        if policy == "manylora" and ours is not None and by_case.get((case, "fastlibra")) is not None
    ]
    figures = [
        Headline("cases with both policies", float(len(both))),
        Headline(
            "cases where manylora's TTFT is at or below fastlibra's", float(sum(a <= b for a, b in both))
        ),
    ]
    for other in ("fastlibra", "lru", REFERENCE):
        for field, where in (("ttft_mean_ms", ""), ("sustained_ttft_mean_ms", ", rates that all sustain")):
            found = compared(main, "manylora", other, field, change)
            figures.append(Headline(f"manylora: TTFT against {other}{where}", found))
    for tier, field in (("device", "page_kept_device"), ("device and host", "page_kept")):
        kept = [ratio(row[field], row[f"{field}_limit"]) for row in main if row["policy"] == "manylora"]
        figures.append(Headline(f"manylora: pages kept of the most possible, {tier}", _rounded(mean(kept))))
    return figures


def finished(rows: list[Row], field: str = "ttft_mean_ms") -> list[Row]:
    """Of those cases alone that have the field under every policy, so that means over cases compare."""
    lacking = {row["case"] for row in rows if row[field] is None}
    return [row for row in rows if row["case"] not in lacking]


def parts(main: list[Row], prefix: str = "") -> list[Row]:
    """Means by scenario and policy of TTFT and its parts, over the cases that every policy has finished."""
    found: list[Row] = []
    whole = finished(main, f"{prefix}ttft_mean_ms")
    for scenario in SCENARIOS:
        inside = [row for row in whole if row["scenario"] == scenario]
        for policy in dict.fromkeys(row["policy"] for row in inside):
            mine = [row for row in inside if row["policy"] == policy]
            row = {"scenario": scenario, "policy": policy, "cases": len(mine)}
            for name in ("mean", *PARTS):
                row[name] = mean([r[f"{prefix}ttft_{name}_ms"] for r in mine])
            found.append(row)
    return found
