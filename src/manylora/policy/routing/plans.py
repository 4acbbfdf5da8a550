"""Plans for dLoRA's programme without a solver: from the most to the least loaded replica, while that helps."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.policy.routing.programme import Plan, PlanState
from manylora.protocol.routing import Solve

_LEAST_GAIN = 1e-9
"""Seconds; less is rounding."""


def greedy_plan(problem: Solve) -> Plan:
    """From where the requests are now."""
    return improve(problem, [request.source for request in problem.requests])


def improve(problem: Solve, plan: Sequence[int]) -> Plan:
    """One request after another leaves the replica that is done last, each time the move after which the later of
    the two replicas is done soonest, as long as the plan's value falls."""
    state = PlanState(problem, plan)
    places = range(len(problem.replicas))
    for _ in range(len(problem.requests) * len(places)):
        worst = max(places, key=lambda place: (state.finish_s(place), -place))
        now_s = state.finish_s(worst)
        best, best_s = None, now_s - _LEAST_GAIN
        for request, place in enumerate(state.plan):
            if place != worst:
                continue
            without_s = state.finish_without_s(request)
            for other in places:
                if other == worst or without_s >= best_s:
                    continue
                then_s = max(without_s, state.finish_with_s(request, other))
                if then_s < best_s:
                    best, best_s = (request, other), then_s
        if best is None:
            break
        state.move(*best)
    return state.plan
