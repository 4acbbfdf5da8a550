"""Routes by CaraServe's rank-aware scheduler (§5, Algorithm 1)."""

from __future__ import annotations

from manylora.config.routing import CaraServeParameters
from manylora.protocol.routing import RankCosts
from manylora.router.fleet import Fleet
from manylora.router.policies.policy import RoutingPolicy
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest


class CaraServe(RoutingPolicy):
    """A policy that takes the replica whose requests suffer least from one more.

    The cost counts the request's prefill, over a mean reply, and its addition to a decode step, with a
    penalty where that step misses the objective. This sum is multiplied by the number of sequences that the
    replica has. An empty replica costs 0; among equal replicas the lowest id wins. Where none has enough
    pages, the request waits at the router. Replicas that differ have their own coefficients.
    """

    parameters = CaraServeParameters

    def __init__(self, parameters: CaraServeParameters) -> None:
        given = parameters
        self._is_padded = given.kernel == "bgmv"
        self._costs = RankCosts(
            given.decode_slope_s or 0.0,
            given.decode_base_s or 0.0,
            given.prefill_slope_s or 0.0,
            given.prefill_base_s or 0.0,
        )
        self._slo_s = given.slo_s or 0.0
        self._penalty_s = given.penalty_s

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        best, least_s = None, float("inf")
        for replica in (view.up[name] for name in view.open_ids):
            if not (view.fits_ever(replica, request) and replica.has_room(request)):
                continue
            total_s = self.cost_s(view, replica, request)
            if total_s < least_s:
                best, least_s = replica, total_s
        return best

    def cost_s(self, view: Fleet, replica: ReplicaState, request: LiveRequest) -> float:
        """Compute Algorithm 1's total cost: seconds per token, times the sequences that the replica has."""
        before = replica.rows
        decode_s = self.decode_s(before + request.samples, replica, request)
        added_s = decode_s - self.decode_s(before, replica, None)
        costs = replica.facts.rank_costs or self._costs
        prefill_s = costs.prefill_slope_s * request.num_tokens
        if not replica.waiting_tokens:
            prefill_s += costs.prefill_base_s
        cost_s = prefill_s / view.lengths.mean + added_s
        if decode_s > self._slo_s:
            cost_s += self._penalty_s
        return cost_s * before

    def decode_s(self, rows: int, replica: ReplicaState, more: LiveRequest | None) -> float:
        """Compute the time of a decode step of the replica's sequences, with one more request. bgmv pads
        every row to the largest rank; mbgmv does not pad. Each request counts its rank once, as printed in
        the paper."""
        largest, total = replica.rank_max, replica.rank_sum
        if more is not None:
            largest, total = max(largest, more.rank), total + more.rank
        units = rows * largest if self._is_padded else total
        costs = replica.facts.rank_costs or self._costs
        return costs.decode_slope_s * units + costs.decode_base_s
