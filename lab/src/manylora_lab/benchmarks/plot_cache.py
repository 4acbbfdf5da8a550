"""The report of ``manylora_lab.benchmarks.h200_cache`` as numbers beside others', as a table and as a picture.

python -m manylora_lab.benchmarks.plot_cache cache.json --markdown cache.md --picture cache.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POLICIES = ("manylora", "fastlibra", "static-lru", "s-lora", "lru")
OURS = ("manylora", "fastlibra")
PEAK_TTFT_MS = 500.0
"""The paper's peak: the highest rate at which the mean time to the first token stays below."""

VLLM_NAME = "vLLM 0.26.0"
VLLM: list[dict[str, Any]] = [
    {
        "policy": VLLM_NAME, "offered_per_s": offered, "rate_scale": 1.0,
        "summary": {
            "failed": 0, "done_per_s": done, "output_tokens_per_s": tokens, "prefix_hit": hit,
            "ttft_ms": {"mean": mean, "p50": p50, "p99": p99}, "tpot_ms": {"mean": tpot},
        },
    }
    for offered, done, tokens, mean, p50, p99, tpot, hit in (
        (5.0, 4.95, 689, 34.1, 28.4, 78.2, 8.46, 0.70),
        (10.0, 9.43, 1392, 66.4, 50.7, 373.6, 14.13, 0.44),
        (20.0, 12.14, 1820, 4594, 5075, 11568, 19.52, 0.10),
    )
]  # fmt: skip
"""The same traces on an H200: vLLM's defaults, 10 GiB of KV and 20 adapter slots of rank 64 beside it (2.6 GiB),
one run each."""

PAPER = {
    "vLLM": {"ttft_change": -0.603, "tpot_change": -0.339, "peak_ratio": 1.7},
    "S-LoRA": {"ttft_change": -0.501, "tpot_change": -0.286, "peak_ratio": 1.6},
}
"""What the FastLibra paper reports of itself against two systems, on other machines and traces."""

Run = dict[str, Any]


def line_of(run: Run) -> str:
    """One run in one line."""
    head = f"{run['policy']:<14} {run['offered_per_s']:>5g}/s"
    if "error" in run:
        return f"{head}  {run['error']}"
    summary = run["summary"]
    ttft = summary["ttft_ms"] or {"mean": float("nan"), "p50": float("nan"), "p99": float("nan")}
    tpot = (summary["tpot_ms"] or {"mean": float("nan")})["mean"]
    return (
        f"{head}  done {summary['done_per_s']:.2f}/s  {summary['output_tokens_per_s']:.0f} tok/s  "
        f"TTFT {ttft['mean']:.1f} / {ttft['p50']:.1f} / {ttft['p99']:.1f} ms  TPOT {tpot:.2f} ms  "
        f"prefix {_share(summary['prefix_hit'])}  adapter {_share(summary.get('adapter_hit'))}  "
        f"failed {summary['failed']}"
    )


def measured(report: dict[str, Any]) -> list[Run]:
    """What gave numbers, vLLM's among it: a run for each system and rate, of medians where several were made.

    ``num_runs``: of how many; ``ttft_range_ms``: their lowest and highest mean. Runs with a reason to be
    ``set_aside`` do not count.
    """
    same: dict[tuple[str, float], list[Run]] = {}
    for run in [*report["runs"], *report["reference"]["vllm"]]:
        if "error" not in run and "set_aside" not in run and run["summary"]["ttft_ms"]:
            same.setdefault((run["policy"], run["offered_per_s"]), []).append(run)
    return [_pooled(runs) for runs in same.values()]


def _pooled(runs: Sequence[Run]) -> Run:
    means = [run["summary"]["ttft_ms"]["mean"] for run in runs]
    return {
        **runs[0],
        "num_runs": len(runs),
        "ttft_range_ms": (min(means), max(means)),
        "summary": _median([run["summary"] for run in runs]),
    }


def _median(values: Sequence[Any]) -> Any:
    """Number by number; None where any is missing, and for what is no number."""
    if all(isinstance(value, dict) for value in values):
        return {name: _median([value.get(name) for value in values]) for name in values[0]}
    return statistics.median(values) if all(isinstance(value, int | float) for value in values) else None


def compare(report: dict[str, Any]) -> dict[str, Any]:
    """Ours against every other system at each rate, and the peaks. Changes: -0.5 is half the time."""
    good = measured(report)
    found: dict[str, Any] = {"at_rate": [], "mean_change": {}, "peak_per_s": peaks(good)}
    for ours in (run for run in good if run["policy"] in OURS):
        for other in good:
            is_same = other["offered_per_s"] == ours["offered_per_s"]
            if is_same and other["policy"] not in OURS and other["summary"]["tpot_ms"]:
                found["at_rate"].append(_change(ours, other))
    for row in found["at_rate"]:
        found["mean_change"].setdefault(f"{row['policy']} against {row['against']}", []).append(row)
    found["mean_change"] = {
        pair: {name: sum(row[name] for row in rows) / len(rows) for name in ("ttft_change", "tpot_change")}
        for pair, rows in found["mean_change"].items()
    }
    return found


def _change(ours: Run, other: Run) -> dict[str, Any]:
    def change(name: str) -> float:
        return float(ours["summary"][name]["mean"] / other["summary"][name]["mean"] - 1)

    return {
        "policy": ours["policy"], "against": other["policy"], "offered_per_s": ours["offered_per_s"],
        "ttft_change": change("ttft_ms"), "tpot_change": change("tpot_ms"),
    }  # fmt: skip


def peaks(runs: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    """By system: the highest rate that it bore, and the lowest measured one above, that it did not bear."""
    found = {}
    for policy in dict.fromkeys(run["policy"] for run in runs):
        mine = [run for run in runs if run["policy"] == policy]
        too_much = [run["offered_per_s"] for run in mine if not _is_borne(run)]
        borne = [
            run["offered_per_s"]
            for run in mine
            if _is_borne(run) and run["offered_per_s"] < min(too_much, default=float("inf"))
        ]
        found[policy] = {"borne": max(borne, default=None), "too_much": min(too_much, default=None)}
    return found


def _is_borne(run: Run) -> bool:
    return bool(run["summary"]["ttft_ms"]["mean"] < PEAK_TTFT_MS and not run["summary"]["failed"])


def markdown(report: dict[str, Any]) -> str:
    """What was measured beside vLLM's, then the changes beside the paper's."""
    lines = [
        "| offered req/s | system | runs | done/s | output tok/s | TTFT ms mean / p50 / p99 "
        "| mean, lowest-highest | TPOT ms mean | prefix hit | adapter hit | failed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(measured(report), key=lambda run: run["offered_per_s"]):
        summary = run["summary"]
        ttft = " / ".join(f"{summary['ttft_ms'][name]:.1f}" for name in ("mean", "p50", "p99"))
        tpot = f"{summary['tpot_ms']['mean']:.2f}" if summary["tpot_ms"] else "-"
        cells = [
            f"{run['offered_per_s']:g}", run["policy"], run["num_runs"], f"{summary['done_per_s']:.2f}",
            f"{summary['output_tokens_per_s']:.0f}", ttft, _range(run["ttft_range_ms"]), tpot,
            _share(summary["prefix_hit"]), _share(summary.get("adapter_hit")), f"{summary['failed']:g}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    found = compare(report)
    lines += ["", "| req/s | ours | against | TTFT mean | TPOT mean |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['offered_per_s']:g} | {row['policy']} | {row['against']} | {row['ttft_change']:+.1%} "
        f"| {row['tpot_change']:+.1%} |"
        for row in found["at_rate"]
    ]
    lines += [
        f"| (paper, all its cases) | FastLibra | {name} | {row['ttft_change']:+.1%} | {row['tpot_change']:+.1%} |"
        for name, row in PAPER.items()
    ]
    lines += [
        "",
        f"| system | highest rate with mean TTFT below {PEAK_TTFT_MS:g} ms | not borne |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {_number(peak['borne'])} | {_number(peak['too_much'])} |"
        for name, peak in found["peak_per_s"].items()
    ]
    lines += [
        f"\nThe paper's peaks: {PAPER['vLLM']['peak_ratio']} x vLLM's, {PAPER['S-LoRA']['peak_ratio']} x S-LoRA's."
    ]
    return "\n".join(lines) + "\n"


def _range(bounds: tuple[float, float]) -> str:
    return "-" if bounds[0] == bounds[1] else f"{bounds[0]:.1f}-{bounds[1]:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def draw(report: dict[str, Any], path: str) -> None:
    """Mean TTFT, mean TPOT and done/s over the offered rate, a line a system. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = measured(report)
    panels = (
        ("mean time to the first token, ms", lambda s: s["ttft_ms"]["mean"]),
        ("mean time per output token, ms", lambda s: s["tpot_ms"]["mean"] if s["tpot_ms"] else None),
        ("prefix hit", lambda s: s["prefix_hit"]),
        ("done per s", lambda s: s["done_per_s"]),
    )
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, (title, pick) in zip(axes.flat, panels, strict=True):
        for policy in dict.fromkeys(run["policy"] for run in runs):
            mine = sorted((r for r in runs if r["policy"] == policy), key=lambda r: r["offered_per_s"])
            points = [(r["offered_per_s"], pick(r["summary"])) for r in mine]
            xs = [x for x, y in points if y is not None]
            style = "--" if policy == VLLM_NAME else "-"
            axis.plot(xs, [y for _, y in points if y is not None], style, marker="o", label=policy)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("offered requests per s")
        axis.grid(alpha=0.3)
    axes[0, 0].set_yscale("log")
    axes[0, 0].axhline(PEAK_TTFT_MS, color="gray", linewidth=0.8)
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(f"multi-turn chat over {report['num_adapters']} adapters, {report['device']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("report")
    parser.add_argument("--markdown")
    parser.add_argument("--picture")
    args = parser.parse_args()
    report = json.loads(Path(args.report).read_text())
    text = markdown(report)
    if args.markdown:
        Path(args.markdown).write_text(text)
    else:
        print(text)
    if args.picture:
        draw(report, args.picture)


if __name__ == "__main__":
    main()
