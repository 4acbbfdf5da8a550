"""The numbers that are compared, of a replay in virtual time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from manylora.reports import Counters
from manylora_lab.sim.replay import Outcome, Replay

Summary = dict[str, float]


def summarize(replay: Replay) -> Summary:
    """A finished replay, in numbers that depend on nothing but its inputs; shares are of 1, times in ms.

    Of dropped requests nothing counts but the moment of the last end.
    """
    return summary_of(replay.outcomes, [grown_since(replay.counters_at_start, replay.report().counters)])


def grown_since(before: Counters, after: Counters) -> dict[str, float]:
    """By how much each count grew."""
    earlier = numbers_of(before)
    return {name: value - earlier[name] for name, value in numbers_of(after).items()}


def numbers_of(counters: Counters) -> dict[str, float]:
    """Those that are one number each."""
    return {
        name: value for name, value in dataclasses.asdict(counters).items() if not isinstance(value, dict)
    }


def summary_of(all_outcomes: Sequence[Outcome], counts: Sequence[Mapping[str, float]]) -> Summary:
    """Outcomes, and what each replica counted meanwhile, in numbers."""
    outcomes = [outcome for outcome in all_outcomes if not outcome.is_dropped]
    grown = {name: sum(each[name] for each in counts) for name in counts[0]}
    end_s = max((outcome.end_s for outcome in all_outcomes), default=0.0)
    adapters = sum(grown[name] for name in ("adapter_hits_device", "adapter_hits_host", "adapter_misses"))
    tokens = grown["prefix_queries_tokens"]
    return {
        **spread_ms("ttft", [outcome.ttft_s for outcome in outcomes]),
        **spread_ms("tpot", [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]),
        "done_per_s": len(outcomes) / end_s if end_s else 0.0,
        "output_tokens_per_s": sum(outcome.num_tokens for outcome in outcomes) / end_s if end_s else 0.0,
        "prefix_hit": _share(sum(o.num_cached for o in outcomes), sum(o.prompt_tokens for o in outcomes)),
        "kv_hit_device": _share(grown["kv_hit_tokens_device"], tokens),
        "kv_hit_host": _share(grown["kv_hit_tokens_host"], tokens),
        "adapter_hit_device": _share(grown["adapter_hits_device"], adapters),
        "adapter_hit_host": _share(grown["adapter_hits_host"], adapters),
        "adapter_miss": _share(grown["adapter_misses"], adapters),
        "preemptions": grown["preemptions"],
        "adapter_reads": grown["adapter_reads"],
        "prefetches": grown["prefetches"],
        "pages_in": grown["pages_swapped_in"],
        "pages_out": grown["pages_swapped_out"],
        "history_drops": grown["history_drops"],
        "invalid_share": _share(grown["invalid_share_sum"], grown["invalid_share_samples"]),
    }


def merging(replay: Replay) -> dict[str, float] | None:
    """What a finished replay merged; None where it may not merge. Steps by mode are shares of all."""
    return merging_of([replay.report().counters])


def merging_of(replicas: Sequence[Counters]) -> dict[str, float] | None:
    """What replicas merged, by what each has counted since it began; None where they may not merge."""
    counts = [numbers_of(each) for each in replicas]
    total = {name: sum(each[name] for each in counts) for name in counts[0]}
    num_steps = {mode: total[f"steps_{mode}"] for mode in ("unmerged", "merged")}
    if not sum(num_steps.values()):
        return None
    return {
        **{f"steps_{mode}": _share(count, sum(num_steps.values())) for mode, count in num_steps.items()},
        "switches_merged": total["switches_merged"],
        "switches_base": total["switches_base"],
        "switch_s": round(total["merge_switch_s"], 6),
        "paused_s": round(total["paused_s"], 6),
        "longest_pause_s": round(max(each["longest_pause_s"] for each in counts), 6),
    }


def ttft_parts_ms(outcomes: Sequence[Outcome]) -> Summary:
    """Mean milliseconds of each part of the time to the first token; dropped requests do not count."""
    served = [outcome for outcome in outcomes if not outcome.is_dropped]
    parts = {
        "queue": [o.queue_s for o in served],
        "adapter": [o.adapter_s for o in served],
        "kv": [o.kv_s for o in served],
        "steps": [o.ttft_s - o.queue_s - o.adapter_s - o.kv_s for o in served],
    }
    return {
        f"ttft_{name}_ms": round(1e3 * statistics.fmean(seconds), 3) if seconds else 0.0
        for name, seconds in parts.items()
    }


def spread_ms(name: str, seconds: Sequence[float]) -> Summary:
    """Mean, median and 99th percentile in milliseconds; 0 of nothing."""
    p50, p99 = np.percentile(seconds, (50, 99)).tolist() if seconds else (0.0, 0.0)
    mean = statistics.fmean(seconds) if seconds else 0.0
    return {
        f"{name}_mean_ms": round(1e3 * mean, 3),
        f"{name}_p50_ms": round(1e3 * p50, 3),
        f"{name}_p99_ms": round(1e3 * p99, 3),
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
