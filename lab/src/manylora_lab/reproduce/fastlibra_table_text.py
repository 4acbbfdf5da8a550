"""The FastLibra table to read: Markdown with the gaps explained from the parts of TTFT, and the picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.fastlibra_grid import BASELINES
from manylora_lab.reproduce.fastlibra_table_cases import PAGED
from manylora_lab.reproduce.fastlibra_table_report import LIMITS, PARTS, finished, parts
from manylora_lab.reproduce.report import ExperimentReport, Row, mean, ratio

_NAMES = {"queue": "queue", "adapter": "adapter cold start", "kv": "KV cold start", "steps": "steps"}


def markdown(report: ExperimentReport) -> str:
    """The whole table, headline first; what is missing last."""
    main = [row for row in report.rows if row["group"] == "main"]
    many = [row for row in report.rows if row["group"] == "many"]
    blocks = [
        f"# {report.title} ({report.settings['device']})",
        *_status(report),
        "\n".join(f"- {note}" for note in report.notes),
        "## Beside the paper",
        _headline(report),
        "## Where the time goes",
        "Mean milliseconds of TTFT by part, over the cases that every policy has finished. The parts after the "
        "queue are waits once admitted; the last is the steps until the first token.",
        *_where_time_goes(main),
        "## Case by case",
        *_by_case(main, "Mean TTFT, ms", "ttft_mean_ms", 1),
        *_by_case(main, "Mean TTFT over the rates that all sustain, ms", "sustained_ttft_mean_ms", 1),
        *_by_case(main, "Mean TPOT, ms", "tpot_mean_ms", 2),
        *_by_case(main, "Peak, requests/s", "peak_per_s", 2),
        "## Rate by rate",
        "Mean TTFT in ms at each rate (requests/s), also of cases that are not finished.",
        *_by_rate(report, main),
        "## Memory and hits",
        "Means over the same cases.",
        _use(finished(main)),
        "## What could have been kept",
        _limits(main),
    ]
    if many:
        blocks += [
            "## 1,000 and 2,000 adapters",
            *_by_case(many, "Mean TTFT, ms", "ttft_mean_ms", 1),
            *_by_case(many, "Mean TPOT, ms", "tpot_mean_ms", 2),
            "Milliseconds of TTFT by part, as above.",
            *_where_time_goes(many),
            *_by_rate(report, many),
        ]
    if report.settings["missing"]:
        blocks += ["## What there is of unfinished cases", _missing(report)]
    return "\n\n".join(blocks) + "\n"


def _status(report: ExperimentReport) -> list[str]:
    hours = report.settings["hours_simulated"]
    command = f"manylora reproduce fastlibra-table --hardware {report.settings['hardware']} --out DIR"
    lines = [f"    {command}", f"{hours:g} hours of one core."]
    if report.settings["missing"]:
        done = report.settings["done"]
        counts = ", ".join(
            f"{done[what]} of {done[f'all_{what}']} {what}" for what in ("simulations", "peaks")
        )
        lines.append(f"**Partial**: {counts} are there; how much of which stands at the end.")
    return lines


def _missing(report: ExperimentReport) -> str:
    """A line a case: what is there of it."""
    num_rates = len(report.settings["rate_shares"])
    lines, without_rates = [], []
    for case in report.settings["cases"]:
        mine = [row for row in report.rows if row["case"] == case]
        done = sum(row["rates_done"] for row in mine)
        searched = mine[:-1] if mine and mine[0]["group"] == "main" else []  # not the reference
        peaks = sum(row["peak_per_s"] is not None for row in searched)
        if not mine:
            without_rates.append(case)
        elif done < num_rates * len(mine) or peaks < len(searched):
            of_peaks = f", {peaks} of {len(searched)} peaks" if searched else ""
            lines.append(f"- {case}: {done} of {num_rates * len(mine)} simulations{of_peaks}")
    if without_rates:
        lines.append(f"- not even rates: {', '.join(without_rates)}")
    return "\n".join(lines)


def _headline(report: ExperimentReport) -> str:
    rows = [(f.metric, _number(f.ours, 4), _number(f.paper, 4)) for f in report.headline]
    return _table(("", "ours", "paper"), rows)


def _where_time_goes(rows: list[Row]) -> list[str]:
    """The parts of TTFT, then what each gap is made of: over all rates, and over those that all sustain."""
    blocks = []
    for which, prefix in (("All rates:", ""), ("The rates that all sustain:", "sustained_")):
        found = parts(rows, prefix)
        blocks += [which, _parts(found), *_explained(found)]
    return blocks


def _parts(rows: Sequence[Row]) -> str:
    header = ("scenario", "cases", "policy", "TTFT", *_NAMES.values())
    return _table(
        header,
        [
            (r["scenario"], str(r["cases"]), r["policy"], *(_number(r[name], 1) for name in ("mean", *PARTS)))
            for r in rows
        ],
    )


def _explained(rows: Sequence[Row]) -> list[str]:
    """A sentence on each gap: which parts it is made of."""
    found = {(row["scenario"], row["policy"]): row for row in rows}
    pairs = [(b, ours) for ours in (PAGED, "manylora") for b in BASELINES] + [(PAGED, "manylora")]
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        for other, ours in pairs:
            theirs, mine = found[scenario, other], found[scenario, ours]
            gap = theirs["mean"] - mine["mean"]
            pieces = ", ".join(f"{_NAMES[part]} {theirs[part] - mine[part]:+.1f}" for part in PARTS)
            lines.append(f"- {scenario}: {other} waits {gap:+.1f} ms longer than {ours}: {pieces}.")
    return ["\n".join(lines)] if lines else []


def _by_case(rows: Sequence[Row], what: str, field: str, digits: int) -> list[str]:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    values = {(row["case"], row["policy"]): row[field] for row in rows}
    if field == "peak_per_s":
        policies = policies[:-1]  # of the reference it would say nothing
    cases = [case for case in dict.fromkeys(row["case"] for row in rows) if any(
        values[case, policy] is not None for policy in policies
    )]  # fmt: skip
    lines = [(case, *(_number(values[case, policy], digits) for policy in policies)) for case in cases]
    return [f"{what}:", _table(("case", *policies), lines)]


def _by_rate(report: ExperimentReport, rows: Sequence[Row]) -> list[str]:
    """The lines of each case with a rate that more than one policy has run at."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    blocks = []
    for case in dict.fromkeys(row["case"] for row in rows):
        ttft = {row["policy"]: row["ttft_ms_by_rate"] for row in rows if row["case"] == case}
        lines = [
            (f"{rate:g}", *(_number(ttft[policy][place], 1) for policy in policies))
            for place, rate in enumerate(report.settings["rates"][case])
            if sum(ttft[policy][place] is not None for policy in policies) > 1
        ]
        if lines:
            blocks += [f"{case}:", _table(("rate", *policies), lines)]
    return blocks


def _use(main: Sequence[Row]) -> str:
    fields = ("pool_used", "pool_running", "pool_history", "pool_adapters", "kv_hit_device", "kv_hit_host",
              "adapter_hit_device", "invalid_share", "preemptions")  # fmt: skip
    header = ("scenario", "policy", "used", "running", "history", "adapters", "KV hit, device", "host",
              "adapter hit", "invalid", "preempted")  # fmt: skip
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in main):
        for policy in list(dict.fromkeys(row["policy"] for row in main))[:-1]:
            mine = [row for row in main if (row["scenario"], row["policy"]) == (scenario, policy)]
            lines.append((scenario, policy, *(_number(mean([r[f] for r in mine]), 3) for f in fields)))
    return _table(header, lines)


def _limits(main: Sequence[Row]) -> str:
    mine = [row for row in main if row["policy"] == "manylora" and row[LIMITS[0]] is not None]
    header = ("case", "kept on the device", "at most", "on either tier", "at most")
    return _table(header, [(row["case"], *(_number(row[field], 3) for field in LIMITS)) for row in mine])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def draw(report: ExperimentReport, path: Path) -> None:
    """Bars by scenario and model as in the paper's Figure 11, means over numbers of adapters, of the cases that
    every policy has finished; and the Markdown beside it. Peaks are shares of ``fastlibra-pages``'s in the same
    case, since scenarios bear rates that differ by a factor of 80."""
    path.with_suffix(".md").write_text(markdown(report))
    main = [row for row in report.rows if row["group"] == "main"]
    main = finished(main) or main
    if not main:
        return  # not even rates: there is nothing to draw
    peaks = {row["case"]: row["peak_per_s"] for row in main if row["policy"] == PAGED}
    fields = ("ttft_mean_ms", "sustained_ttft_mean_ms", "tpot_mean_ms", "peak_share")
    joined: dict[tuple[str, str], list[Row]] = {}
    for row in main:
        group = f"{row['scenario']} {row['model'].rpartition('-')[2].upper()}"
        share = ratio(row["peak_per_s"], peaks[row["case"]])
        joined.setdefault((group, row["policy"]), []).append({**row, "peak_share": share})
    rows = [
        {"case": group, "policy": policy, **{field: mean([r[field] for r in mine]) for field in fields}}
        for (group, policy), mine in joined.items()
    ]
    panels = tuple(
        zip(fields, ("TTFT, ms", "TTFT where all sustain, ms", "TPOT, ms", f"peak over {PAGED}'s"))
    )
    bars = BarPanels(panels, group="case", series="policy", is_log=fields[:2])
    bars(dataclasses.replace(report, rows=rows), path)
