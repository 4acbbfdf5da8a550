"""Computes dLoRA's plans (dLoRA §5): adapters to keep on replicas, by arrival rates, and moves of requests,
by an integer programme."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from manylora.config.routing import DloraParameters
from manylora.protocol import routing
from manylora.protocol.routing import ON_DEVICE, ProgrammeRequest, ReplicaId, Solve
from manylora.router.fleet import Fleet
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.types import BASE, AdapterId

Plan = list[int]
"""A plan: for each request of a programme, the index of its replica."""


def build_programme(view: Fleet, replicas: Sequence[ReplicaState], number: int, eta_steps: float) -> Solve:
    """Build the programme of these replicas and all their requests."""
    places, requests = [], []
    adapters: dict[AdapterId, int] = {}
    for place, replica in enumerate(replicas):
        live = list(replica.requests.values())
        page_tokens = replica.facts.page_tokens
        taken = sum(request.pages_now(page_tokens) for request in live) + replica.adapter_pages
        places.append(
            routing.ProgrammeReplica(replica.id, max(replica.free_pages, 0) + taken, replica.kind.page_in_s)
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
    """A plan and its value, updated as requests move."""

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
        if count == max(sign, 0):  # the adapter's first request came, or its last one left
            self._pages[place] += sign * self._sizes[each.adapter]
        if not count:
            del adapters[each.adapter]

    def _cost_s(self, request: ProgrammeRequest, place: int) -> float:
        return request.run_s + (request.move_s if place != request.source else 0.0)

    def finish_s(self, place: int, request: int | None = None) -> float:
        """Return the time at which the replica finishes its requests, in seconds. ``request``: without this one,
        where it is there, or with it, where it is elsewhere."""
        replica = self._problem.replicas[place]
        run_s, pages, num_adapters = self._run_s[place], self._pages[place], len(self._adapters[place])
        if request is not None:
            each, sign = self._problem.requests[request], -1 if self.plan[request] == place else 1
            run_s += sign * self._cost_s(each, place)
            pages += sign * each.pages
            count = self._adapters[place].get(each.adapter, 0) + sign
            if count == max(sign, 0):  # the adapter's first request, or its last one
                pages += sign * self._sizes[each.adapter]
                num_adapters += sign
        return run_s + max(pages - replica.pages, 0) * replica.page_s + self._problem.eta_s * num_adapters

    def value_s(self) -> float:
        """Return the time at which the last replica finishes, in seconds: the plan's value, where less is
        better."""
        return max(self.finish_s(place) for place in range(len(self._problem.replicas)))

    def move(self, request: int, place: int) -> None:
        """Move the request to another replica."""
        self._add(request, self.plan[request], -1)
        self._add(request, place, 1)
        self.plan[request] = place


_LEAST_GAIN = 1e-9
"""The least gain of a move, in seconds; smaller gains are rounding errors."""


def greedy_plan(problem: Solve) -> Plan:
    """Improve the present places of the requests by greedy moves."""
    return improve(problem, [request.source for request in problem.requests])


def improve(problem: Solve, plan: Sequence[int]) -> Plan:
    """Move requests, one after another, from the replica that finishes last, as long as that makes the plan
    better. Each step takes the move after which the later of its two replicas finishes soonest."""
    state = PlanState(problem, plan)
    places = range(len(problem.replicas))
    for _ in range(len(problem.requests) * len(places)):
        worst = max(places, key=lambda place: (state.finish_s(place), -place))
        now_s = state.finish_s(worst)
        best, best_s = None, now_s - _LEAST_GAIN
        for request, place in enumerate(state.plan):
            if place != worst:
                continue
            without_s = state.finish_s(worst, request)
            for other in places:
                if other == worst or without_s >= best_s:
                    continue
                then_s = max(without_s, state.finish_s(other, request))
                if then_s < best_s:
                    best, best_s = (request, other), then_s
        if best is None:
            break
        state.move(*best)
    return state.plan


def is_solution(problem: Solve, shares: Sequence[Sequence[float]]) -> bool:
    """Return whether the shares have one number for each request and replica."""
    count = len(problem.replicas)
    return len(shares) == len(problem.requests) and all(len(each) == count for each in shares)


def round_shares(problem: Solve, shares: Sequence[Sequence[float]]) -> Plan:
    """Round shares to a plan, the longest requests first."""
    count = len(problem.replicas)
    due_s = [0.0] * count  # the solution's work for each replica, over the requests so far
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


_FORGOTTEN = 2.0**-8
"""The least decayed count of an adapter's requests. Below it the adapter has no rate."""


class AdapterRates:
    """The request rate of each adapter per second, as a mean whose weights halve every ``half_life_s``."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._counts: dict[AdapterId, tuple[float, float]] = {}  # the decayed count, and its time

    def saw(self, adapter: AdapterId, now: float) -> None:
        """Count a request. The base model is not counted."""
        if adapter != BASE:
            self._counts[adapter] = self._count(adapter, now) + 1.0, now

    def rates(self, now: float) -> dict[AdapterId, float]:
        """Return the rates of the adapters that have one; drop the others."""
        counts = {adapter: (self._count(adapter, now), now) for adapter in self._counts}
        self._counts = {adapter: count for adapter, count in counts.items() if count[0] >= _FORGOTTEN}
        return {
            adapter: count * math.log(2) / self._half_life_s for adapter, (count, _) in self._counts.items()
        }

    def _count(self, adapter: AdapterId, now: float) -> float:
        count, at_s = self._counts.get(adapter, (0.0, now))
        return float(count * 2.0 ** ((at_s - now) / self._half_life_s))


Copy = tuple[AdapterId, int]
"""An adapter, and the index of a replica in the sequences below."""
NOTHING: Mapping[AdapterId, Collection[int]] = {}


def plan_copies(
    free: Sequence[int],
    reserve: Sequence[int],
    holders: Mapping[AdapterId, Iterable[int]],
    sizes: Mapping[AdapterId, int],
    loads: Mapping[AdapterId, float],
    request_pages: float,
    barred: Mapping[AdapterId, Collection[int]] = NOTHING,
) -> list[Copy]:
    """List the copies to preload, in order.

    Each step copies the adapter with the least tolerance to the replica without it that has the most
    unallocated memory (the first among equal ones). The plan ends before the copy that would make the least
    tolerance smaller. ``free``: unallocated pages of each replica; ``reserve``: the number of these pages
    that copies may take; ``holders``: the replicas that have an adapter; ``loads``: requests per second, all
    above 0; ``request_pages``: pages of a mean request; ``barred``: replicas that cannot have an adapter.
    """
    if not loads:
        return []
    unallocated, left = list(free), list(reserve)
    has = {adapter: set(holders.get(adapter, ())) for adapter in sorted(loads)}
    on: list[set[AdapterId]] = [set() for _ in left]
    for adapter, replicas_of in has.items():
        for place in replicas_of:
            on[place].add(adapter)

    def entry(adapter: AdapterId) -> tuple[float, float, AdapterId]:
        """Return an entry that sorts by burst tolerance, then by the larger load, then by the lower id. The
        tolerance is the number of requests for which the adapter's replicas have free pages, over its rate."""
        peak = sum(max(unallocated[place], 0) for place in has[adapter]) / request_pages
        return peak / loads[adapter], -loads[adapter], adapter

    def least() -> tuple[float, float, AdapterId]:
        while (now := entry(heap[0][-1])) != heap[0]:
            heapq.heapreplace(heap, now)
        return now

    heap = [entry(adapter) for adapter in has]
    heapq.heapify(heap)
    copies: list[Copy] = []
    while True:
        before, _, adapter = least()
        size, without = sizes[adapter], {*has[adapter], *barred.get(adapter, ())}
        places = [place for place in range(len(left)) if place not in without and size <= left[place]]
        if not places:
            return copies
        place = max(places, key=lambda each: (unallocated[each], -each))
        has[adapter].add(place)
        on[place].add(adapter)
        unallocated[place] -= size
        for each in sorted(on[place]):
            heapq.heappush(heap, entry(each))
        if least()[0] < before:
            return copies
        left[place] -= size
        copies.append((adapter, place))


_PROMPT_TOKENS = 256.0
"""The assumed length of a mean prompt, in tokens, before the first request."""
_KEEP = 0.99
"""The weight of the mean prompt against one new request."""

Placed = routing.Place | routing.Unplace


class Placement:
    """The adapter copies that the policy wants kept.

    Copies are only added. A copy is dropped when its adapter has no rate any more or is unlisted, or its
    replica is gone. Each replica decides itself what it evicts.
    """

    def __init__(self, parameters: DloraParameters) -> None:
        self._given = parameters
        self._rates = AdapterRates(parameters.half_life_s)
        self._prompt_tokens = _PROMPT_TOKENS
        self._last_order = 0
        self._due_s: float | None = None
        self._copies: dict[AdapterId, dict[ReplicaId, int]] = {}  # with the epoch of each replica

    def saw(self, request: LiveRequest, now: float) -> None:
        """Count a request that is routed for the first time."""
        order = request.key[1]
        if order > self._last_order:
            self._last_order = order
            self._rates.saw(request.adapter, now)
            self._prompt_tokens = _KEEP * self._prompt_tokens + (1 - _KEEP) * request.prompt_tokens

    def homes(self, view: Fleet, adapter: AdapterId) -> list[ReplicaId]:
        """List the open replicas, by id, that have the adapter, receive it with a request, or are to keep it."""
        found = {*view.homes(adapter), *self._copies.get(adapter, ())}
        return sorted(replica for replica in found if replica in view.up and view.up[replica].is_open)

    def on_timer(self, view: Fleet) -> Sequence[Placed]:
        """Return the copies to place and to unplace, if a new plan is due."""
        if self._due_s is not None and view.now < self._due_s:
            return ()
        loads = self._rates.rates(view.now)
        loads = {adapter: rate for adapter, rate in loads.items() if adapter in view.adapters}
        if not view.open_ids or not (loads or self._copies):
            return ()
        self._due_s = view.now + self._given.replan_s
        return [*self._drop(view, loads), *self._plan(view, loads)]

    def _drop(self, view: Fleet, loads: Mapping[AdapterId, float]) -> list[Placed]:
        """Drop the copies that are not wanted any more, and forget those whose replica is gone."""
        dropped: list[Placed] = []
        for adapter, copies in list(self._copies.items()):
            for name, epoch in list(copies.items()):
                is_there = view.find(name, epoch) is not None
                if is_there and adapter in loads:
                    continue
                del copies[name]
                if is_there:
                    dropped.append(routing.Unplace(adapter, name))
            if not copies:
                del self._copies[adapter]
        return dropped

    def _plan(self, view: Fleet, loads: dict[AdapterId, float]) -> list[Placed]:
        places = {name: place for place, name in enumerate(view.open_ids)}
        sizes = {adapter: view.adapters[adapter][1] for adapter in loads}
        holders: dict[AdapterId, list[int]] = {
            adapter: [
                places[home]
                for home in view.homes(adapter)
                if home in places and view.up[home].tier_of(adapter) == ON_DEVICE
            ]
            for adapter in loads
        }
        free, reserve = [], []
        for name in view.open_ids:
            facts, residency = view.up[name].facts, view.up[name].residency
            allocated = sum(
                view.adapters[each][1]
                for each, tier in residency.items()
                if tier == ON_DEVICE and each in view.adapters
            )
            free.append(facts.num_pages - allocated)
            reserve.append(int(self._given.reserve * facts.num_pages))
        for adapter, copies in self._copies.items():
            for place in (places[name] for name in copies if name in places):
                reserve[place] -= sizes[adapter]
                if place not in holders[adapter]:
                    holders[adapter].append(place)
                    free[place] -= sizes[adapter]
        barred = {
            adapter: {places[name] for name in lacking if name in places}
            for adapter in loads
            if (lacking := view.lacking(adapter))
        }
        page_tokens = view.up[view.open_ids[0]].facts.page_tokens
        request_pages = max((self._prompt_tokens + view.lengths.mean) / page_tokens, 1.0)
        wishes: list[Placed] = []
        for adapter, place in plan_copies(free, reserve, holders, sizes, loads, request_pages, barred):
            replica = view.open_ids[place]
            self._copies.setdefault(adapter, {})[replica] = view.up[replica].epoch
            wishes.append(routing.Place(adapter, replica))
        return wishes
