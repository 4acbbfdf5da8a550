"""Which copies of adapters the cluster keeps, by dLoRA's burst tolerance: planned anew from time to time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manylora.config.routing import DloraParameters
from manylora.policy.routing.burst_tolerance import plan_copies
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.rates import AdapterRates
from manylora.policy.routing.requests import LiveRequest
from manylora.protocol.routing import ON_DEVICE, Place, ReplicaId, Unplace
from manylora.types import AdapterId

_PROMPT_TOKENS = 256.0
"""Of a mean request, before the first."""
_KEEP = 0.99
"""How much of the mean prompt survives one request."""

Placed = Place | Unplace


class Placement:
    """Copies are added only; a copy goes when its adapter has no rate any more, is unlisted, or its replica is
    gone. What is evicted is each replica's own business."""

    def __init__(self, parameters: DloraParameters) -> None:
        self._given = parameters
        self._rates = AdapterRates(parameters.half_life_s)
        self._prompt_tokens = _PROMPT_TOKENS
        self._last_order = 0
        self._due_s: float | None = None
        self._copies: dict[AdapterId, dict[ReplicaId, int]] = {}  # with the epoch of each replica

    def saw(self, request: LiveRequest, now: float) -> None:
        """A request is to be routed; it counts the first time."""
        order = request.key[1]
        if order > self._last_order:
            self._last_order = order
            self._rates.saw(request.adapter, now)
            self._prompt_tokens = _KEEP * self._prompt_tokens + (1 - _KEEP) * request.prompt_tokens

    def homes(self, view: Fleet, adapter: AdapterId) -> list[ReplicaId]:
        """Open replicas that have the adapter, get it with a request, or are to keep it, by id."""
        found = {*view.homes(adapter), *self._copies.get(adapter, ())}
        return sorted(replica for replica in found if replica in view.up and view.up[replica].is_open)

    def on_timer(self, view: Fleet) -> Sequence[Placed]:
        """What is to be kept, and what need not be any more, where a new plan is due."""
        if self._due_s is not None and view.now < self._due_s:
            return ()
        loads = self._rates.rates(view.now)
        loads = {adapter: rate for adapter, rate in loads.items() if adapter in view.adapters}
        if not view.open_ids or not (loads or self._copies):
            return ()
        self._due_s = view.now + self._given.replan_s
        return [*self._drop(view, loads), *self._plan(view, loads)]

    def _drop(self, view: Fleet, loads: Mapping[AdapterId, float]) -> list[Placed]:
        """Copies that are not wanted any more, or have gone with their replica."""
        dropped: list[Placed] = []
        for adapter, copies in list(self._copies.items()):
            for name, epoch in list(copies.items()):
                replica = view.up.get(name)
                is_there = replica is not None and replica.epoch == epoch
                if is_there and adapter in loads:
                    continue
                del copies[name]
                if is_there:
                    dropped.append(Unplace(adapter, name))
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
            wishes.append(Place(adapter, replica))
        return wishes
