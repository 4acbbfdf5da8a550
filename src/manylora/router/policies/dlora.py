"""Routes as dLoRA (§5): places adapters ahead of bursts, and moves requests from overloaded replicas."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar

from manylora.config.routing import DloraParameters, ReactiveParameters
from manylora.protocol.routing import Planned, Solve, Solved
from manylora.router.fleet import Fleet
from manylora.router.policies import dlora_plan
from manylora.router.policies.cost import QueueBySteps, load_s
from manylora.router.policies.policy import Relocation, RoutingPolicy, Wish
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest


class DloraProactive(RoutingPolicy):
    """A policy that dispatches (§5.2) to the replica where the request is pending for the shortest time: the
    load of its adapter, and the queue. Among equal replicas the lowest id wins."""

    parameters: ClassVar[type[DloraParameters]] = DloraParameters

    def __init__(self, parameters: DloraParameters) -> None:
        self._placement = dlora_plan.Placement(parameters)
        self._queue = QueueBySteps()

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        self._placement.saw(request, view.now)
        can = self.candidates(view, request)
        return min(can, key=lambda replica: self.pending_s(view, replica, request), default=None)

    def candidates(self, view: Fleet, request: LiveRequest) -> list[ReplicaState]:
        """List the open replicas that can ever hold the request."""
        return [view.up[name] for name in view.open_ids if view.fits_ever(view.up[name], request)]

    def pending_s(self, view: Fleet, replica: ReplicaState, request: LiveRequest) -> float:
        """Estimate the seconds until the request would run on the replica."""
        loads_s = load_s(replica, request.adapter, request.adapter_pages)
        return loads_s + self._queue.seconds(view, replica)

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        return self._placement.on_timer(view)


class Dlora(DloraProactive):
    """A policy that also moves requests, by an integer programme over the most and the least loaded replicas.

    A replica is overloaded where more than ``most_kv_use`` of its pages are used, or where its queue is
    longer than ``most_delay_ratio`` medians and ``least_delay_s``. Where the solver does not answer in time,
    a greedy plan is used instead.
    """

    parameters: ClassVar[type[ReactiveParameters]] = ReactiveParameters

    def __init__(self, parameters: ReactiveParameters) -> None:
        super().__init__(parameters)
        self._reactive = parameters
        self._num_solves = 0
        self._checked_s = float("-inf")
        self._asked_s = float("-inf")
        self._asked: Solve | None = None

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        wishes: list[Wish] = list(super().on_timer(view))
        given = self._reactive
        if self._asked is not None and view.now - self._asked_s >= given.solve_wait_s:
            problem, self._asked = self._asked, None
            wishes += wishes_of(problem, dlora_plan.greedy_plan(problem))
        if view.now - self._checked_s < given.check_s or self._asked is not None:
            return wishes
        self._checked_s = view.now
        if view.now - self._asked_s >= given.solve_interval_s:
            chosen = self._overloaded(view)
            if chosen:
                self._num_solves += 1
                self._asked_s = view.now
                self._asked = dlora_plan.build_programme(view, chosen, self._num_solves, given.eta_steps)
                wishes.append(self._asked)
        return wishes

    def on_solved(self, view: Fleet, solved: Solved) -> Sequence[Wish]:
        """See RoutingPolicy."""
        problem = self._asked
        if problem is None or solved.number != problem.number:
            return ()
        self._asked = None
        plans = [dlora_plan.greedy_plan(problem)]
        if dlora_plan.is_solution(problem, solved.shares):
            plans.insert(0, dlora_plan.round_shares(problem, solved.shares))
        best = min(plans, key=lambda plan: dlora_plan.PlanState(problem, plan).value_s())
        return wishes_of(problem, best, solved.bound_s)

    def _overloaded(self, view: Fleet) -> list[ReplicaState]:
        """Find the overloaded replicas and the replicas with the shortest queues, at most ``most_replicas``
        of each, sorted by id. Returns none where no replica is overloaded."""
        given = self._reactive
        queues = {name: self._queue.seconds(view, view.up[name]) for name in view.open_ids}
        if len(queues) < 2:
            return []
        # The lower median of two queues: no queue is longer than twice the mean of itself and another.
        median_s = statistics.median_low(queues.values())
        limit_s = max(given.most_delay_ratio * median_s, given.least_delay_s)
        by_queue = sorted(queues, key=lambda name: (-queues[name], name))
        over = [name for name in by_queue if queues[name] > limit_s or self._is_full(view.up[name])]
        over = [name for name in over if view.up[name].requests][: given.most_replicas]
        under = [name for name in reversed(by_queue) if name not in over][: given.most_replicas]
        if not over or not under:
            return []
        return [view.up[name] for name in sorted(over + under)]

    def _is_full(self, replica: ReplicaState) -> bool:
        return replica.free_pages < (1 - self._reactive.most_kv_use) * replica.facts.num_pages


def wishes_of(problem: Solve, plan: dlora_plan.Plan, bound_s: float = 0.0) -> list[Wish]:
    """Turn a plan into its moves and a record of its value. Each move gets the gain of the whole plan."""
    sources = [request.source for request in problem.requests]
    before_s = dlora_plan.PlanState(problem, sources).value_s()
    value_s = dlora_plan.PlanState(problem, plan).value_s()
    gain_s = before_s - value_s
    moves: list[Wish] = [
        Relocation(
            request.request,
            request.attempt,
            problem.replicas[request.source].replica,
            problem.replicas[place].replica,
            "plan",
            gain_s,
            request.move_s,
        )
        for request, place in zip(problem.requests, plan, strict=True)
        if place != request.source
    ]
    return [*moves, Planned(problem.number, len(plan), len(moves), value_s, before_s, bound_s)]
