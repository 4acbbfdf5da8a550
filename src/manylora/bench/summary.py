"""From turns' results to the numbers that are compared, and to a table of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manylora.bench.replay import TurnResult
from manylora.workloads.chat import Turn, prefix_bound

Summary = dict[str, Any]


def summarize(turns: Sequence[Turn], results: Sequence[TurnResult]) -> Summary:
    """One replay in numbers, plain enough for JSON. Rates count over the time to the last turn's end."""
    done = [result for result in results if result.error is None]
    wall_s = max((result.end_s for result in results), default=0.0)
    tpots_s = [result.tpot_s for result in done if result.tpot_s is not None]
    last_arrival_s = max(result.arrival_s for result in results)
    parts = {
        name: _spread_ms([result.parts.get(name, 0.0) for result in done])
        for name in dict.fromkeys(name for result in done for name in result.parts)
    }
    return {
        "requests": len(results),
        "failed": len(results) - len(done),
        "first_error": next((result.error for result in results if result.error is not None), None),
        "wall_s": wall_s,
        "offered_per_s": len(results) / last_arrival_s if last_arrival_s else None,
        "done_per_s": len(done) / wall_s if wall_s else 0.0,
        "output_tokens_per_s": sum(result.reply_tokens for result in done) / wall_s if wall_s else 0.0,
        "ttft_ms": _spread_ms([result.ttft_s for result in done]),
        "ttft_parts_ms": parts,
        "tpot_ms": _spread_ms(tpots_s),
        "prefix_hit": _prefix_hit(done),
        "prefix_bound": prefix_bound(turns),
        "adapter_hit": _adapter_hit(done),
        "client_lag_ms": _spread_ms([result.lag_s for result in results]),
    }


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """How each number grew; those that did not are left out."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value}


def _spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    found = {"mean": statistics.fmean(seconds), "p50": p50, "p90": p90, "p99": p99, "max": max(seconds)}
    return {name: 1e3 * value for name, value in found.items()}


def _prefix_hit(done: Sequence[TurnResult]) -> float | None:
    """The share of prompt tokens that came from the cache; None where the target does not tell."""
    known = [result for result in done if result.cached_tokens is not None]
    if not known:
        return None
    return sum(r.cached_tokens or 0 for r in known) / sum(r.prompt_tokens for r in known)


def _adapter_hit(done: Sequence[TurnResult]) -> float | None:
    """The share of turns that did not have to wait for their adapter once admitted; None where unknown."""
    waits = [result.parts["adapter_s"] for result in done if "adapter_s" in result.parts]
    return sum(wait == 0 for wait in waits) / len(waits) if waits else None


def table(summary: Summary) -> str:
    """For people, some lines."""
    failed = f" ({summary['failed']} failed)" if summary["failed"] else ""
    rows = [
        ("turns", f"{summary['requests']}{failed} in {summary['wall_s']:.1f} s"),
        ("offered, done per s", f"{_number(summary['offered_per_s'])}, {_number(summary['done_per_s'])}"),
        ("output tokens per s", f"{summary['output_tokens_per_s']:.0f}"),
        ("TTFT ms", _spread(summary["ttft_ms"])),
        *((f"  of it {name}", _spread(part)) for name, part in summary["ttft_parts_ms"].items()),
        ("TPOT ms", _spread(summary["tpot_ms"])),
        ("prefix hit (bound)", f"{_number(summary['prefix_hit'])} ({_number(summary['prefix_bound'])})"),
        ("adapter hit", _number(summary["adapter_hit"])),
        ("client's own lag ms", _spread(summary["client_lag_ms"])),
    ]
    if summary["first_error"] is not None:
        rows.append(("first error", summary["first_error"]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _spread(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "unknown"
    return "  ".join(f"{name} {value:.1f}" for name, value in spread.items())


def as_rows(results: Sequence[TurnResult]) -> list[dict[str, Any]]:
    """The results for JSON, times to the microsecond."""
    return [_rounded(dataclasses.asdict(result)) for result in results]


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 6)
        if isinstance(value, float)
        else _rounded(value)
        if isinstance(value, dict)
        else value
        for name, value in values.items()
    }
