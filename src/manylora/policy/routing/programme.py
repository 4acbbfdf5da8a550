"""dLoRA's programme for overloaded replicas (§5.2): what it asks, and what a plan is worth.

A plan gives each request a replica. Its value is the time until the last replica is done: what is left of its
requests, computing those again that came from elsewhere, swapping what exceeds its pages, and a little for each
adapter. As printed, gamma multiplies all requests alike and decides nothing; here only those that move take
longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.replicas import ReplicaState
from manylora.protocol.routing import ProgrammeReplica, ProgrammeRequest, Solve
from manylora.types import AdapterId

Plan = list[int]
"""For each request of a programme the place of its replica."""


def build_programme(view: Fleet, replicas: Sequence[ReplicaState], number: int, eta_steps: float) -> Solve:
    """The programme of these replicas and all their requests."""
    places, requests = [], []
    adapters: dict[AdapterId, int] = {}
    for place, replica in enumerate(replicas):
        live = list(replica.requests.values())
        page_tokens = replica.facts.page_tokens
        taken = sum(request.pages_now(page_tokens) for request in live) + replica.adapter_pages
        places.append(
            ProgrammeReplica(replica.id, max(replica.free_pages, 0) + taken, replica.kind.page_in_s)
        )
        step_s = replica.step_s
        for request in live:
            adapters[request.adapter] = request.adapter_pages
            requests.append(
                ProgrammeRequest(
                    request.id,
                    request.attempt,
                    place,
                    request.adapter,
                    request.pages_now(page_tokens),
                    view.remaining_tokens(request) * step_s,
                    request.num_tokens * replica.kind.token_s,
                )
            )
    eta_s = eta_steps * max(replica.step_s for replica in replicas)
    return Solve(number, tuple(places), tuple(requests), tuple(sorted(adapters.items())), eta_s)


class PlanState:
    """A plan and its value, kept while requests move."""

    def __init__(self, problem: Solve, plan: Sequence[int]) -> None:
        self._problem = problem
        self._sizes = dict(problem.adapters)
        count = len(problem.replicas)
        self.plan: Plan = list(plan)
        self._run_s = [0.0] * count
        self._pages = [0] * count
        self._adapters: list[dict[AdapterId, int]] = [{} for _ in range(count)]
        for request, place in enumerate(self.plan):
            self._add(request, place, 1)

    def _add(self, request: int, place: int, sign: int) -> None:
        each = self._problem.requests[request]
        self._run_s[place] += sign * self._cost_s(each, place)
        self._pages[place] += sign * each.pages
        adapters = self._adapters[place]
        count = adapters.get(each.adapter, 0) + sign
        adapters[each.adapter] = count
        if count == max(sign, 0):  # it has come, or gone
            self._pages[place] += sign * self._sizes[each.adapter]
        if not count:
            del adapters[each.adapter]

    def _cost_s(self, request: ProgrammeRequest, place: int) -> float:
        return request.run_s + (request.move_s if place != request.source else 0.0)

    def finish_s(self, place: int) -> float:
        """When the replica is done."""
        return self._finish_s(place, self._run_s[place], self._pages[place], len(self._adapters[place]))

    def _finish_s(self, place: int, run_s: float, pages: int, num_adapters: int) -> float:
        replica = self._problem.replicas[place]
        return run_s + max(pages - replica.pages, 0) * replica.page_s + self._problem.eta_s * num_adapters

    def finish_without_s(self, request: int) -> float:
        """When the request's replica would be done without it."""
        place, each = self.plan[request], self._problem.requests[request]
        is_last = self._adapters[place][each.adapter] == 1
        pages = self._pages[place] - each.pages - (self._sizes[each.adapter] if is_last else 0)
        num_adapters = len(self._adapters[place]) - is_last
        return self._finish_s(place, self._run_s[place] - self._cost_s(each, place), pages, num_adapters)

    def finish_with_s(self, request: int, place: int) -> float:
        """When another replica would be done with the request besides."""
        each = self._problem.requests[request]
        is_first = each.adapter not in self._adapters[place]
        pages = self._pages[place] + each.pages + (self._sizes[each.adapter] if is_first else 0)
        num_adapters = len(self._adapters[place]) + is_first
        return self._finish_s(place, self._run_s[place] + self._cost_s(each, place), pages, num_adapters)

    def value_s(self) -> float:
        """When the last replica is done."""
        return max(self.finish_s(place) for place in range(len(self._problem.replicas)))

    def move(self, request: int, place: int) -> None:
        """The request goes to another replica."""
        self._add(request, self.plan[request], -1)
        self._add(request, place, 1)
        self.plan[request] = place
