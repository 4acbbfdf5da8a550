"""The table's rows, made from a store of cells, and its headline beside the paper's, as far as the cells are
there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from manylora_lab.reproduce.cells import REFERENCE, Cell, CellResult
from manylora_lab.reproduce.experiment import GridResult, Setup
from manylora_lab.reproduce.fastlibra_grid import (
    BASELINES,
    PAPERS_NAMES,
    SCENARIOS,
    SIMULATION_NOTES,
    WARM_NOTE,
    Against,
    against_both,
)
from manylora_lab.reproduce.fastlibra_paper import AGAINST, IN_SCENARIOS, INVALID, OF_VARIANTS, stated
from manylora_lab.reproduce.fastlibra_table_cases import COMPARED, PAGED, VARIANTS, Table
from manylora_lab.reproduce.fastlibra_table_peaks import LIMIT_MS, known_peak
from manylora_lab.reproduce.fastlibra_table_store import CellStore, code_of
from manylora_lab.reproduce.report import Headline, Row, change, mean, ratio

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
    "Rates: ten shares of fastlibra-pages's peak in each case, fixed before policies were compared; arrivals, "
    "lengths and seed are the same for all.",
    "A figure of a case is the mean over its rates; sustained: over the rates that every policy sustains. Changes "
    "and ratios are means over cases of the change in each.",
    "Hit rate: the mean of the share of prompt tokens whose KV, and of requests whose adapter, is on the device "
    "when they are admitted. Memory use: share of the pool, sampled every virtual second.",
    "cached: the same arrivals with unlimited pages and all resident; a reference, not a bound. kept: pages found "
    "that were asked for, and the most that any policy could have kept of what manylora's runs asked for "
    "(docs/limits.md).",
    "fastlibra-pages: FastLibra's policy with a page of KV as a node; fastlibra, whose nodes are turns, is not in "
    "the table (docs/fastlibra-table.md).",
    "lru and static-lru free pages when none are left, by way of the host (the paper's offloading, §6.1): for all "
    "requests that wait and could be admitted together, which then wait for one copy. On the gaps: "
    "docs/fastlibra-table.md.",
)


def grid_result(setup: Setup, table: Table, rates: Mapping[str, list[float]], store: CellStore) -> GridResult:
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
    return GridResult(settings, rows, notes=notes)


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
    """What decided, for each policy in the first case (see ``code_of``)."""
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
    return None if value is None else round(value, DIGITS)


# ---------------------------------------------------------------- headline


DIGITS = 4
_Against = functools.partial(Against, digits=DIGITS)
SUSTAINED = "rates that all sustain"


def headline(rows: list[Row]) -> list[Headline]:
    """The paper's figures beside ours, then what we aim at."""
    main = [row for row in rows if row["group"] == "main"]
    many = [row for row in rows if row["group"] == "many"]
    compared = [
        each for ours in (PAGED, "manylora") for baseline in BASELINES for each in _against(ours, baseline)
    ]
    compared += [each for variant in VARIANTS for each in _of_variant(variant)]
    figures = [figure for each in compared for figure in each(main)]
    for papers, paper in INVALID.items():
        policy = papers.replace("fastlibra", PAGED)
        invalid = mean([row["invalid_share"] for row in main if row["policy"] == policy])
        figures.append(Headline(f"{policy}: invalid share of history", _rounded(invalid), paper))
    if many:
        figures += against_both(many, ", 1,000 and 2,000 adapters", DIGITS, (PAGED, "manylora"))
    return figures + _aims(main)


def _against(ours: str, baseline: str) -> Iterator[Against]:
    name, paper = PAPERS_NAMES[baseline], AGAINST[baseline]
    figures = (
        (f"TTFT against {name}", "ttft_mean_ms", change, paper.ttft),
        (f"TTFT against {name}, {SUSTAINED}", "sustained_ttft_mean_ms", change, None),
        (f"TPOT against {name}", "tpot_mean_ms", change, paper.tpot),
        (f"TPOT against {name}, {SUSTAINED}", "sustained_tpot_mean_ms", change, None),
        (f"peak over {name}'s", "peak_per_s", ratio, paper.peak),
        (f"memory use over {name}'s", "pool_used", ratio, paper.used),
        (f"hit rate over {name}'s", "hit", ratio, paper.hit),
    )
    for what, field, how, figure in figures:
        yield _Against(f"{ours}: {what}", ours, baseline, field, how, paper=stated(ours, figure))
    scenario, in_it, in_others = IN_SCENARIOS[baseline]
    against = functools.partial(_Against, ours=ours, other=baseline, field="ttft_mean_ms")
    what = f"{ours}: TTFT against {name}"
    yield against(f"{what}, {scenario}", paper=stated(ours, in_it), within=scenario)
    yield against(f"{what}, without {scenario}", paper=stated(ours, in_others), without=scenario)


def _of_variant(variant: str) -> Iterator[Against]:
    ttft, tpot, peak = OF_VARIANTS[variant.replace(PAGED, "fastlibra")]
    for what, field, how, figure in (
        ("TTFT ratio", "ttft_mean_ms", ratio, ttft),
        (f"TTFT ratio, {SUSTAINED}", "sustained_ttft_mean_ms", ratio, None),
        ("TPOT ratio", "tpot_mean_ms", ratio, tpot),
        ("peak change", "peak_per_s", change, peak),
    ):
        yield _Against(f"{variant}: {what}", variant, PAGED, field, how, paper=figure)


def _aims(main: list[Row]) -> list[Headline]:
    by_case = {(row["case"], row["policy"]): row["ttft_mean_ms"] for row in main}
    both = [
        (ours, by_case.get((case, PAGED)))
        for (case, policy), ours in by_case.items()
        if policy == "manylora" and ours is not None and by_case.get((case, PAGED)) is not None
    ]
    figures = [
        Headline("cases with both policies", float(len(both))),
        Headline(
            f"cases where manylora's TTFT is at or below {PAGED}'s", float(sum(a <= b for a, b in both))
        ),
    ]
    for other in (PAGED, "lru", REFERENCE):
        for field, where in (("ttft_mean_ms", ""), ("sustained_ttft_mean_ms", f", {SUSTAINED}")):
            figures += _Against(f"manylora: TTFT against {other}{where}", "manylora", other, field)(main)
    for tier, field in (("device", "page_kept_device"), ("device and host", "page_kept")):
        kept = [ratio(row[field], row[f"{field}_limit"]) for row in main if row["policy"] == "manylora"]
        figures.append(Headline(f"manylora: pages kept of the most possible, {tier}", _rounded(mean(kept))))
    return figures


def finished(rows: list[Row], field: str = "ttft_mean_ms") -> list[Row]:
    """The rows of those cases alone that have the field under every policy, so that means over cases compare."""
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
