"""A policy that moves requests for no reason, to try what moves do."""

from __future__ import annotations

from collections.abc import Sequence

from manylora_lab.baselines.routers import RandomReplica, hash_text

from manylora.router.fleet import Fleet
from manylora.router.policies.policy import Relocation, Wish
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest


class Restless(RandomReplica):
    """On every tick half of all requests should go to any replica, known or not, full or draining."""

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        wishes: list[Wish] = []
        for replica in view.up.values():
            for request in replica.requests.values():
                draw = hash_text(request.id, int(view.now * 1000))
                target = (None, *range(6))[draw // 8 % 7]
                move = Relocation(
                    request.id, request.attempt - (draw // 64 % 16 == 0), replica.id, target, "restless",
                    gain_s=float(draw // 1024 % 8), cost_s=1.0, is_forced=draw // 8192 % 2 == 0,
                )  # fmt: skip
                if draw % 2:
                    wishes.append(move)
        return wishes


class Impatient(Restless):
    """The same, and no move waits for the replica that lets go."""

    handover = "drop"


class Scripted(RandomReplica):
    """Wishes for what a test has put into ``wishes``, once; requests go to the lowest open replica."""

    def __init__(self, parameters: object) -> None:
        self.wishes: list[Wish] = []

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        return view.up[view.open_ids[0]] if view.open_ids else None

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        wishes, self.wishes = self.wishes, []
        return wishes
