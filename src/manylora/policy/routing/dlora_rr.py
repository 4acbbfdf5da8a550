"""dLoRA's placement with a round robin over the replicas that have the adapter (its baseline, §7.3)."""

from __future__ import annotations

from manylora.config.routing import DloraParameters
from manylora.policy.routing.dlora_proactive import DloraProactive
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest
from manylora.types import BASE


class DloraRoundRobin(DloraProactive):
    """Each request to the next replica that has its adapter, of all where none has."""

    name = "dlora-rr"

    def __init__(self, parameters: DloraParameters) -> None:
        super().__init__(parameters)
        self._last = -1

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        self._placement.saw(request, view.now)
        homes = [] if request.adapter == BASE else self._placement.homes(view, request.adapter)
        for names in (homes, view.open_ids):
            can = [name for name in names if view.fits_ever(view.up[name], request)]
            if can:
                self._last = next((name for name in can if name > self._last), can[0])
                return view.up[self._last]
        return None
