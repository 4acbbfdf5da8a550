"""The numbers that are compared, from requests' results, and a table of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manylora.config.declaring import ConfigError
from manylora_lab.bench.replay import RequestResult
from manylora_lab.sim.service import Served, service_difference
from manylora_lab.workloads.describe import describe
from manylora_lab.workloads.stream import Stream

Summary = dict[str, Any]

LAG_SHARE = 0.1
"""The share of the median time to the first token: a client that is later than this distorts what it measures."""

BASE_NAME = "(base)"
"""The name of requests without an adapter, where adapters are listed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """What makes a request good, in ms; None: whatever it took. Written as ``vllm bench serve --goodput`` is."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, terms: Sequence[str]) -> Objective:
        """Parses ["ttft:500", "tpot:50", "e2el:5000"]; raises ConfigError."""
        names = [field.name for field in dataclasses.fields(cls)]
        found: dict[str, float] = {}
        for term in terms:
            name, colon, text = term.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = -1.0
            if name not in names or not colon or not 0 <= limit < float("inf"):
                raise ConfigError(f"--goodput {term!r}: write ttft:MS, tpot:MS or e2el:MS, such as ttft:500")
            if name in found:
                raise ConfigError(f"--goodput names {name} twice")
            found[name] = limit
        return cls(**found)

    def is_met(self, result: RequestResult) -> bool:
        """One token alone takes no time for each further one."""
        if result.error is not None:
            return False
        taken_s = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.e2e_s}
        limits = dataclasses.asdict(self).items()
        return all(limit is None or 1e3 * taken_s[name] <= limit for name, limit in limits)


def summarize(
    stream: Stream, results: Sequence[RequestResult], objective: Objective | None = None
) -> Summary:
    """One replay in numbers, plain enough for JSON. Rates count over the time to the last request's end."""
    done = [result for result in results if result.error is None]
    wall_s = max((result.end_s for result in results), default=0.0)
    last_arrival_s = max((result.arrival_s for result in results), default=0.0)
    parts = {
        name: spread_ms([result.parts.get(name, 0.0) for result in done])
        for name in dict.fromkeys(name for result in done for name in result.parts)
    }

    def per_s(count: float) -> float:
        return count / wall_s if wall_s else 0.0

    prompt, reply = sum(r.prompt_tokens for r in done), sum(r.reply_tokens for r in done)
    good = None if objective is None else sum(map(objective.is_met, results))
    reuse = describe(stream)
    return {
        "planned": len(stream.requests),
        "requests": len(results),
        "failed": len(results) - len(done),
        "first_error": next((result.error for result in results if result.error is not None), None),
        "wall_s": wall_s,
        "offered_per_s": len(results) / last_arrival_s if last_arrival_s else None,
        "done_per_s": per_s(len(done)),
        "goodput_per_s": None if good is None else per_s(good),
        "good_share": None if good is None or not results else good / len(results),
        "prompt_tokens": prompt,
        "output_tokens": reply,
        "output_tokens_per_s": per_s(reply),
        "total_tokens_per_s": per_s(prompt + reply),
        "ttft_ms": spread_ms([result.ttft_s for result in done]),
        "ttft_parts_ms": parts,
        "tpot_ms": spread_ms([result.tpot_s for result in done if result.tpot_s is not None]),
        "itl_ms": spread_ms([itl_s for result in done for itl_s in result.itls_s]),
        "e2e_ms": spread_ms([result.e2e_s for result in done]),
        "prefix_hit": _prefix_hit(done),
        "prefix_bound": reuse["history_share"] + reuse["shared_prefix_share"],
        "adapter_hit": _adapter_hit(done),
        "client_lag_ms": spread_ms([result.lag_s for result in results]),
        "fairness": fairness(results),
        "service_difference": service_difference(map(_served, done)),
    }


_STEPS, _SWITCHES = "manylora:steps_total", "manylora:merge_switches_total"
_LONGEST = ("longest_pause_s", "manylora:longest_pause_seconds")
"""Not sums but the largest so far."""


def merging(grown: Mapping[str, float]) -> dict[str, float] | None:
    """What the engine merged, from how its numbers grew: of its stats, or as a server's /metrics has them; None
    where nothing was merged. Steps by mode are shares of all; the longest pause is not known where one before was
    longer."""

    def of(field: str, metric: str, *labels: str) -> float:
        names = [name for name in grown if name.startswith(metric) and all(label in name for label in labels)]
        return grown.get(field, sum(grown[name] for name in names))

    num_merged = of("steps_merged", _STEPS, 'mode="merged"')
    total = of("steps", _STEPS)
    switches = {to: of(f"switches_{to}", _SWITCHES, f'to="{to}"') for to in ("merged", "base")}
    if not total or not any((num_merged, *switches.values())):
        return None
    longest_s = next((grown[name] for name in _LONGEST if name in grown), None)
    return {
        "steps_unmerged": 1 - num_merged / total,
        "steps_merged": num_merged / total,
        **{f"switches_{to}": count for to, count in switches.items()},
        "switch_s": of("merge_switch_s", "manylora:merge_switch_seconds_total"),
        "paused_s": of("paused_s", "manylora:paused_seconds_total"),
        **({} if longest_s is None else {"longest_pause_s": longest_s}),
    }


def fairness(results: Sequence[RequestResult]) -> dict[str, Any] | None:
    """How adapters fared beside each other; None where no adapter got anything.

    Jain's index of n values, (sum x)^2 / (n sum x^2): 1 where all are equal, 1/n where one has all. Of times to
    the first token it compares how long adapters' users waited; of output tokens what they got, which is as
    uneven as what they asked for.
    """
    groups: dict[str, list[RequestResult]] = {}
    for result in results:
        groups.setdefault(result.adapter or BASE_NAME, []).append(result)
    adapters = {name: _of_adapter(groups[name]) for name in sorted(groups)}
    ttfts_ms = {name: of["mean_ttft_ms"] for name, of in adapters.items() if of["mean_ttft_ms"] is not None}
    if not ttfts_ms:
        return None
    best, worst = min(ttfts_ms, key=ttfts_ms.__getitem__), max(ttfts_ms, key=ttfts_ms.__getitem__)
    return {
        "adapters": adapters,
        "jain_ttft": jain(list(ttfts_ms.values())),
        "jain_output_tokens": jain([of["output_tokens"] for of in adapters.values()]),
        "best": {"adapter": best, "mean_ttft_ms": ttfts_ms[best]},
        "worst": {"adapter": worst, "mean_ttft_ms": ttfts_ms[worst]},
        "worst_over_best": ttfts_ms[worst] / ttfts_ms[best] if ttfts_ms[best] else None,
    }


def _served(result: RequestResult) -> Served:
    """By the weights of VTC's paper. Where the target does not tell when a request was admitted, it waits until
    its first token."""
    first_s = result.handed_s + result.ttft_s
    queue_s = result.parts.get("queue_s", result.ttft_s)
    num_input = result.prompt_tokens - (result.cached_tokens or 0)
    return Served(
        result.adapter or BASE_NAME,
        result.handed_s,
        result.handed_s + queue_s,
        first_s,
        max(result.end_s, first_s),
        num_input,
        2.0 * result.reply_tokens,
    )


def jain(values: Sequence[float]) -> float | None:
    """Jain's index; None where there is nothing to share."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def _of_adapter(results: Sequence[RequestResult]) -> dict[str, Any]:
    done = [result for result in results if result.error is None]
    return {
        "requests": len(results),
        "failed": len(results) - len(done),
        "output_tokens": sum(result.reply_tokens for result in done),
        "mean_ttft_ms": 1e3 * statistics.fmean(r.ttft_s for r in done) if done else None,
    }


def warnings(summary: Summary) -> list[str]:
    """What makes the numbers doubtful, a line each."""
    lag, ttft = summary["client_lag_ms"], summary["ttft_ms"]
    if lag is None or ttft is None or lag["p99"] <= LAG_SHARE * ttft["p50"]:
        return []
    return [
        f"the client itself was late: its p99 lag of {lag['p99']:.1f} ms is more than {LAG_SHARE:.0%} of the "
        f"median time to the first token, {ttft['p50']:.1f} ms; for a server use more --client-processes"
    ]


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """How each number grew; those that did not are left out. Of what is the largest so far, what it has become."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: after[name] if name in _LONGEST else value for name, value in grown.items() if value}


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (between the two nearest values) and the like, in ms; None of nothing."""
    if not seconds:
        return None
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    found = {
        "mean": statistics.fmean(seconds), "p50": p50, "p90": p90, "p99": p99, "max": max(seconds),
        "std": float(np.std(seconds)),
    }  # fmt: skip
    return {name: 1e3 * value for name, value in found.items()}


def _prefix_hit(done: Sequence[RequestResult]) -> float | None:
    """The share of prompt tokens that came from the cache; None where the target does not tell."""
    known = [result for result in done if result.cached_tokens is not None]
    if not known:
        return None
    return sum(r.cached_tokens or 0 for r in known) / sum(r.prompt_tokens for r in known)


def _adapter_hit(done: Sequence[RequestResult]) -> float | None:
    """The share of requests that did not wait for their adapter once admitted; None where unknown."""
    waits = [result.parts["adapter_s"] for result in done if "adapter_s" in result.parts]
    return sum(wait == 0 for wait in waits) / len(waits) if waits else None


def table(summary: Summary) -> str:
    """The summary as some lines for people."""
    failed = f" ({summary['failed']} failed)" if summary["failed"] else ""
    missing = summary["planned"] - summary["requests"]
    unmade = f", {missing} of {summary['planned']} not made" if missing else ""
    rows = [
        ("requests", f"{summary['requests']}{failed}{unmade} in {summary['wall_s']:.1f} s"),
        ("offered, done per s", f"{_number(summary['offered_per_s'])}, {_number(summary['done_per_s'])}"),
        ("output tokens per s", f"{summary['output_tokens_per_s']:.0f}"),
        ("total tokens per s", f"{summary['total_tokens_per_s']:.0f}"),
    ]
    if summary["goodput_per_s"] is not None:
        rows.append(("goodput per s", f"{summary['goodput_per_s']:.2f} ({_number(summary['good_share'])})"))
    rows += [
        ("TTFT ms", _spread(summary["ttft_ms"])),
        *((f"  of it {name.removesuffix('_s')}", _spread(p)) for name, p in summary["ttft_parts_ms"].items()),
        ("TPOT ms", _spread(summary["tpot_ms"])),
        ("ITL ms", _spread(summary["itl_ms"])),
        ("E2E ms", _spread(summary["e2e_ms"])),
        ("prefix hit (bound)", f"{_number(summary['prefix_hit'])} ({_number(summary['prefix_bound'])})"),
        ("adapter hit", _number(summary["adapter_hit"])),
        ("client's own lag ms", _spread(summary["client_lag_ms"])),
    ]
    if (fair := summary["fairness"]) is not None and len(fair["adapters"]) > 1:
        worst, best = fair["worst"], fair["best"]
        rows += [
            (f"TTFT of {len(fair['adapters'])} adapters", f"Jain's index {_number(fair['jain_ttft'])}"),
            ("  worst, best", f"{_one(worst)}, {_one(best)}"),
        ]
    if summary["first_error"] is not None:
        rows.append(("first error", summary["first_error"]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _one(adapter: Mapping[str, Any]) -> str:
    return f"{adapter['adapter']} {adapter['mean_ttft_ms']:.1f} ms"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _spread(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "unknown"
    return "  ".join(f"{name} {value:.1f}" for name, value in spread.items() if name != "std")


_ELSEWHERE = ("itls_s", "text")


def as_rows(results: Sequence[RequestResult]) -> list[dict[str, Any]]:
    """The results for JSON, times to the microsecond; without what is as long as the reply."""
    rows = [_rounded(dataclasses.asdict(result)) for result in results]
    return [{name: value for name, value in row.items() if name not in _ELSEWHERE} for row in rows]


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 6)
        if isinstance(value, float)
        else _rounded(value)
        if isinstance(value, dict)
        else value
        for name, value in values.items()
    }
