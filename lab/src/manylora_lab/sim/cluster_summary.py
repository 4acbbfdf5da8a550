"""The numbers that are compared, of a cluster in virtual time: of all replicas together, and of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manylora_lab.sim.cluster import VirtualCluster
from manylora_lab.sim.replay import Outcome
from manylora_lab.sim.summary import Summary, grown_since, merging_of, spread_ms, summary_of, ttft_parts_ms


def summarize_cluster(cluster: VirtualCluster, slo_tpot_s: float | None = None) -> dict[str, Any]:
    """A finished run: what ``summarize`` tells of one replica, for all of them, and ``replicas`` with each.

    ``slo_attainment``: the share of requests of more than one token, dropped ones included, whose time between
    tokens is within the objective. ``busy_share``: of the time until the last end, in which steps ran.
    ``adapter_loads``: admissions that did not find their adapter on the device. ``recomputed_tokens``: of moved
    requests. ``decision_mean_us``: for each request that came; of a replica for each that went there at once. All
    but the time of decisions depends on nothing but the inputs.
    """
    front = cluster.front
    counters = [loop.report().counters for loop in cluster.loops]
    grown = [grown_since(before, after) for before, after in zip(cluster.counters_at_start, counters)]
    end_s = max(outcome.end_s for outcome in front.outcomes)
    replicas = []
    for loop, counts, counted in zip(cluster.loops, grown, counters):
        place = loop.place
        replicas.append(
            {
                "requests": len(front.served.get(place, ())),
                **_numbers(front.served.get(place, ()), [counts], slo_tpot_s),
                "merging": merging_of([counted]),
                "busy_share": _share(loop.busy_s, end_s),
                "moves": front.moved_from[place],
                "recomputed_tokens": front.recomputed_on[place],
                **_decisions(cluster.times.chosen_s.get(place)),
            }
        )
    return {
        **_numbers(front.outcomes, grown, slo_tpot_s),
        "merging": merging_of(counters),
        "busy_share": _share(sum(loop.busy_s for loop in cluster.loops), end_s * len(cluster.loops)),
        "moves": front.moved_from.total(),
        "recomputed_tokens": front.recomputed_on.total(),
        "scale_hints": len(cluster.hints),
        "solves": cluster.num_solves,
        "solve_mean_ms": round(1e3 * float(np.mean(cluster.times.solved_s or [0.0])), 3),
        "router_s": round(cluster.times.total_s, 3),
        **_decisions(cluster.times.asked_s),
        "replicas": replicas,
    }


def time_per_token_s(outcome: Outcome) -> float:
    """From a request's arrival to its last token, over its tokens."""
    return (outcome.end_s - outcome.handed_s) / outcome.num_tokens


def slo_attainment(outcomes: Sequence[Outcome], slo_tpot_s: float | None) -> float | None:
    """See ``summarize_cluster``; None without an objective."""
    if slo_tpot_s is None:
        return None
    judged = [outcome for outcome in outcomes if outcome.is_dropped or outcome.tpot_s is not None]
    met = sum(not each.is_dropped and (each.tpot_s or 0.0) <= slo_tpot_s for each in judged)
    return _share(met, len(judged))


def _numbers(
    outcomes: Sequence[Outcome], counts: Sequence[Mapping[str, float]], slo_tpot_s: float | None
) -> dict[str, Any]:
    served = [outcome for outcome in outcomes if not outcome.is_dropped]
    found: Summary = summary_of(outcomes, counts)
    return {
        **found,
        **ttft_parts_ms(outcomes),
        **spread_ms("time_per_token", [time_per_token_s(outcome) for outcome in served]),
        "slo_attainment": slo_attainment(outcomes, slo_tpot_s),
        "adapter_loads": sum(each["adapter_hits_host"] + each["adapter_misses"] for each in counts),
        "dropped": len(outcomes) - len(served),
    }


def _decisions(seconds: Sequence[float] | None) -> dict[str, float]:
    times = 1e6 * np.array(seconds or [0.0])
    return {
        "decision_mean_us": round(float(times.mean()), 2),
        "decision_p99_us": round(float(np.percentile(times, 99)), 2),
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
