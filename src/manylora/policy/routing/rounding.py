"""From the shares of a solution of dLoRA's programme to a plan: each request goes to one replica.

The paper takes the replica with the largest share. Where many requests have equal shares, that sends all of them
to the same replica; so the time that a replica was already given beyond its part counts against it, and the plan
is repaired by moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.policy.routing.plans import improve
from manylora.policy.routing.programme import Plan
from manylora.protocol.routing import Solve


def is_solution(problem: Solve, shares: Sequence[Sequence[float]]) -> bool:
    """Whether there is a share of each request for each replica."""
    count = len(problem.replicas)
    return len(shares) == len(problem.requests) and all(len(each) == count for each in shares)


def round_shares(problem: Solve, shares: Sequence[Sequence[float]]) -> Plan:
    """The longest requests first."""
    count = len(problem.replicas)
    due_s = [0.0] * count  # what the solution gives each replica, of the requests so far
    given_s = [0.0] * count
    plan = [0] * len(problem.requests)
    longest_first = sorted(range(len(plan)), key=lambda each: (-problem.requests[each].run_s, each))
    for request in longest_first:
        run_s = problem.requests[request].run_s or 1.0
        for place in range(count):
            due_s[place] += shares[request][place] * run_s
        missing = [(due_s[place] - given_s[place]) / run_s for place in range(count)]
        # A replica with no share of the request gets it only where moves make the plan better.
        place = max(
            (place for place in range(count) if shares[request][place] > 0),
            key=lambda each: (missing[each], shares[request][each], -each),
            default=problem.requests[request].source,
        )
        given_s[place] += run_s
        plan[request] = place
    return improve(problem, plan)
