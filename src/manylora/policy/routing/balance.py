"""Which requests should leave the fullest replica for the emptiest: what a move gains against what it costs."""

from __future__ import annotations

from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import Relocation
from manylora.policy.routing.queueing import load_s, wait_s
from manylora.policy.routing.replicas import ReplicaState


def balance(view: Fleet, most_moves: int, least_ratio: float) -> list[Relocation]:
    """At most so many requests from the replica with the longest wait to that with the shortest, newest first.

    A request that has not begun gains the difference of the waits, one that runs the difference of its remaining
    steps. It costs what is to be computed again there, and its adapter. Moves gain ``least_ratio`` times their
    cost.
    """
    waits = {name: wait_s(view, view.up[name], 1, 0) for name in view.open_ids}
    if len(waits) < 2:
        return []
    source = view.up[max(waits, key=lambda name: (waits[name], -name))]
    target = view.up[min(waits, key=lambda name: (waits[name], name))]
    gap_s = waits[source.id] - waits[target.id]
    if gap_s <= 0:
        return []
    moves: list[Relocation] = []
    for request in source.movable():
        if len(moves) == most_moves:
            break
        if not view.fits_ever(target, request) or not target.has_room(request):
            continue
        cached = min(view.num_cached(target, request), request.num_tokens - 1)
        prefill_s = (request.num_tokens - cached) * target.kind.token_s
        cost_s = prefill_s + load_s(target, request.adapter, request.adapter_pages)
        gain_s = gap_s
        if request.num_generated:
            gain_s = min(gap_s, view.remaining_tokens(request) * step_gap_s(source, target))
        if gain_s > least_ratio * cost_s:
            moves.append(
                Relocation(
                    request.id, request.attempt, source.id, target.id, "balance", gain_s, least_ratio * cost_s
                )
            )
            gap_s -= prefill_s + request.num_tokens * source.kind.token_s
    return moves


def step_gap_s(source: ReplicaState, target: ReplicaState) -> float:
    """How much longer a decode step takes on one replica than on another."""
    return max(source.step_s - target.step_s, 0.0)
