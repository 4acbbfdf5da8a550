"""The report of ``simulator_reality``: measured beside simulated, as ratios, text and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora_lab.pricing.costs import StepCosts, StepWork
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.report import ExperimentReport

Run = dict[str, Any]

METRICS = (
    ("ttft_mean_ms", "mean time to the first token, ms"),
    ("ttft_p50_ms", "median time to the first token, ms"),
    ("ttft_p99_ms", "99th percentile of it, ms"),
    ("tpot_mean_ms", "mean time per output token, ms"),
    ("output_tokens_per_s", "generated tokens per s"),
    ("done_per_s", "requests done per s"),
    ("queue_ms", "until admitted, ms"),
    ("adapter_ms", "then until the adapter is there, ms"),
    ("kv_ms", "then until history is there, ms"),
    ("prefix_hit", "share of prompt tokens not computed again"),
    ("num_steps", "steps"),
    ("step_mean_ms", "mean step, ms"),
    ("gap_mean_ms", "mean time between steps, ms"),
    ("pages_in", "pages copied to the device"),
    ("pages_out", "pages copied to the host"),
)
AIMS = ("ttft_mean_ms", "ttft_p99_ms", "output_tokens_per_s", "done_per_s")
"""The metrics that are to be within 15 % of what is measured."""

WORK = slice(5, 5 + len(StepWork._fields))
"""A step's columns of its work; after it comes, in newer logs, its CPU time."""
KINDS = ("decode only", "with prefill")


def work_of(step: Sequence[Any]) -> StepWork:
    """The work of a row of a log."""
    return StepWork(*step[WORK])


def compare(runs: Sequence[Run], logs: Sequence[Run], costs: StepCosts) -> list[Run]:
    """Every metric of each run, measured, simulated and their ratio; and its steps, measured and as the costs
    have the very same batches."""
    rows = []
    for run, log in zip(runs, logs, strict=True):
        measured, simulated = _measured(run, log), dict(run["simulated"])
        simulated["gap_mean_ms"] = 1e3 * statistics.fmean(
            costs.overhead_s(step[3], step[4]) for step in log["steps"]
        )
        metrics = {}
        for name, _ in METRICS:
            real, made = measured.get(name), simulated.get(name)
            if real is not None and made is not None:
                ratio = _short(made / real) if real else None
                metrics[name] = {"measured": _short(real), "simulated": _short(made), "ratio": ratio}
                if run["as_it_was"].get(name) is not None:
                    metrics[name]["as_it_was"] = _short(run["as_it_was"][name])
        rows.append(
            {
                "offered_per_s": run["offered_per_s"], "metrics": metrics, "steps": _steps(log, costs),
                "wall_per_cpu": _wall_per_cpu(log),
            }
        )  # fmt: skip
    return rows


def _wall_per_cpu(log: Run) -> float | None:
    """How much longer the log's steps took than their thread computed."""
    if "cpu_s" not in log["step_columns"]:
        return None
    return _short(sum(step[1] for step in log["steps"]) / sum(step[-1] for step in log["steps"]))


def medians(comparison: Sequence[Run], names: Sequence[str] = AIMS) -> list[Run]:
    """Of the runs at each rate, the median of each metric, measured and simulated, and their ratio."""
    rates: dict[float, list[Run]] = {}
    for row in comparison:
        rates.setdefault(row["offered_per_s"], []).append(row["metrics"])
    rows = []
    for rate, runs in sorted(rates.items()):
        metrics = {}
        for name in names:
            found: Run = {
                kind: statistics.median(run[name][kind] for run in runs)
                for kind in ("measured", "simulated", "as_it_was")
            }
            found["lowest"] = min(run[name]["measured"] for run in runs)
            found["highest"] = max(run[name]["measured"] for run in runs)
            metrics[name] = found | {"ratio": _short(found["simulated"] / found["measured"])}
        rows.append({"offered_per_s": rate, "num_runs": len(runs), "metrics": metrics})
    return rows


def _measured(run: Run, log: Run) -> Run:
    summary, counters, steps = run["summary"], run["counters"], log["steps"]
    parts = summary["ttft_parts_ms"]
    gaps = [step[2] for step in steps if step[2] is not None]
    return {
        **{f"ttft_{name}_ms": summary["ttft_ms"][name] for name in ("mean", "p50", "p99")},
        "tpot_mean_ms": summary["tpot_ms"]["mean"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "done_per_s": summary["done_per_s"],
        **{f"{part}_ms": parts[f"{part}_s"]["mean"] for part in ("queue", "adapter", "kv")},
        "prefix_hit": summary["prefix_hit"],
        "num_steps": len(steps),
        "step_mean_ms": 1e3 * statistics.fmean(step[1] for step in steps),
        "gap_mean_ms": 1e3 * statistics.fmean(gaps),
        "pages_in": counters.get("pages_swapped_in"),
        "pages_out": counters.get("pages_swapped_out"),
    }


def _steps(log: Run, costs: StepCosts) -> list[Run]:
    """Of each kind and doubling of the rows: how many steps, their mean, and that of the costs' for the same."""
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for step in log["steps"]:
        work = work_of(step)
        key = (int(work.num_prefill_tokens > 0), int(step[3]).bit_length())
        groups.setdefault(key, []).append((step[1], costs.step_s(work)))
    rows = []
    for (kind, level), pairs in sorted(groups.items()):
        real = statistics.fmean(took_s for took_s, _ in pairs)
        made = statistics.fmean(cost_s for _, cost_s in pairs)
        rows.append(
            {
                "kind": KINDS[kind], "rows": f"{2 ** (level - 1)}-{2**level - 1}", "num_steps": len(pairs),
                "measured_ms": _short(1e3 * real), "simulated_ms": _short(1e3 * made),
                "ratio": _short(made / real),
            }
        )  # fmt: skip
    return rows


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def lines_of(comparison: Sequence[Run]) -> str:
    """Markdown: what is aimed at by rate, medians of the runs; then a table for each run."""
    lines = [
        "| requests/s | | measured | (lowest-highest) | simulated | ratio | as it was |",
        "|---|---|---|---|---|---|---|",
    ]
    titles = dict(METRICS)
    for row in medians(comparison):
        for name, found in row["metrics"].items():
            spread = f"{found['lowest']:g}-{found['highest']:g}" if row["num_runs"] > 1 else "one run"
            lines.append(
                f"| {row['offered_per_s']:g} | {titles[name]} | {found['measured']:g} | {spread} | "
                f"{found['simulated']:g} | {found['ratio']:.2f} | {found['as_it_was']:g} |"
            )
    for row in comparison:
        lines += [
            f"\n{row['offered_per_s']:g} requests/s"
            + (f", steps {row['wall_per_cpu']:.2f} times their CPU time" if row["wall_per_cpu"] else ""),
            "",
            "| | measured | simulated | ratio | as it was |",
            "|---|---|---|---|---|",
        ]
        for name, title in METRICS:
            found = row["metrics"].get(name)
            if found is not None:
                ratio = "" if found["ratio"] is None else f"{found['ratio']:.2f}"
                own = f"{found['as_it_was']:g}" if "as_it_was" in found else ""
                lines.append(
                    f"| {title} | {found['measured']:g} | {found['simulated']:g} | {ratio} | {own} |"
                )
        for step in row["steps"]:
            what = f"{step['num_steps']} steps, {step['kind']}, {step['rows']} rows, ms"
            lines.append(
                f"| {what} | {step['measured_ms']:g} | {step['simulated_ms']:g} | {step['ratio']:.2f} | |"
            )
    return "\n".join(lines)


def draw(report: Run, path: Path) -> None:
    """Measured beside simulated by the rate, and 'as it was'. Needs matplotlib."""
    names = ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "output_tokens_per_s")
    kinds = {"measured": "measured", "simulated": "simulated", "as_it_was": "as it was"}
    rows = []
    for row in medians(report["comparison"], names):
        for kind, label in kinds.items():
            values = {name: row["metrics"][name][kind] for name in names}
            rows.append({"rate": f"{row['offered_per_s']:g}/s", "kind": label, **values})
    titles = dict(METRICS)
    bars = BarPanels([(name, titles[name]) for name in names], "rate", "kind")
    settings = {"device": report["device"]}
    title = f"chat served and simulated, {report['cache_policy']}"
    bars(ExperimentReport("simulator_reality", title, settings, rows, []), path)
