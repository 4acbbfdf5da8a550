"""Defines two simple routing policies: replicas in turn, and the replica with most of the prompt's prefix."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from manylora.config.routing import CacheAwareParameters
from manylora.protocol.routing import BLOCK_TOKENS
from manylora.router.fleet import Fleet
from manylora.router.policies.policy import RoutingPolicy
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest


class RoundRobin(RoutingPolicy):
    """A policy that takes replicas in the order of ids. A replica that can never hold the request is skipped."""

    def __init__(self, parameters: Any) -> None:
        self._last = -1

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        ids = view.open_ids
        place = bisect_right(ids, self._last)
        for name in map(ids.__getitem__, range(place - len(ids), place)):
            if view.fits_ever(view.up[name], request):
                self._last = name
                return view.up[name]
        return None


class CacheAware(RoutingPolicy):
    """A policy that balances the load, or else takes the replica that has most of the prompt.

    The load is unequal where the fullest replica has ``most_difference`` more sequences than the emptiest and
    ``most_ratio`` times as many. Then the emptiest replica is taken. Otherwise it is the one that has most of
    the prompt, if that is more than ``least_share``, else the emptiest. Among equal replicas the lowest id
    wins.
    """

    parameters = CacheAwareParameters

    def __init__(self, parameters: CacheAwareParameters) -> None:
        self._given = parameters

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        if not view.open_ids:
            return None
        given = self._given
        least, largest = view.by_load.loads[0], view.by_load.loads[-1]
        is_unequal = largest - least > given.most_difference and largest > given.most_ratio * least
        if request.prefix and not is_unequal:
            for replica, blocks in view.prefixes.match(request.prefix, 1).items():
                has_most = blocks * BLOCK_TOKENS > given.least_share * request.prompt_tokens
                if has_most and view.fits_ever(replica, request):
                    return replica
        for name in view.by_load.ascending():
            replica = view.up[name]
            if view.fits_ever(replica, request):
                return replica
        return None
