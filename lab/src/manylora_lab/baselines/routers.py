"""The routers that papers compare theirs with, and dLoRA's dispatch as its authors' code has it."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Annotated

from manylora.config.declaring import setting
from manylora.config.routing import BatchParameters, DloraParameters, Number
from manylora.protocol.routing import ON_DEVICE
from manylora.router.fleet import Fleet
from manylora.router.policies.dlora import DloraProactive
from manylora.router.policies.policy import RoutingPolicy
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.rules import FINITE, more_than
from manylora.types import BASE


class RandomReplica(RoutingPolicy):
    """Any open replica, all equally likely, by a hash of the request's id and attempt. Where that one can never
    hold the request, the next by id has it."""

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        count = len(view.open_ids)
        first = hash_text(request.id, request.attempt)
        for offset in range(count):
            replica = view.up[view.open_ids[(first + offset) % count]]
            if view.fits_ever(replica, request):
                return replica
        return None


def hash_text(text: str, counter: int = 0) -> int:
    """64 bits for a text; ``counter`` gives others for the same one."""
    digest = hashlib.blake2b(f"{counter} {text}".encode("utf-8", "replace"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


class MostIdle(RoutingPolicy):
    """The replica with the fewest running and waiting sequences, of equal ones the lowest id (CaraServe §7.5)."""

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        for name in view.by_load.ascending():
            replica = view.up[name]
            if view.fits_ever(replica, request):
                return replica
        return None


class FirstFit(RoutingPolicy):
    """The lowest id with fewer than ``max_batch`` sequences and enough free pages: what CaraServe §7.5 calls
    Punica's."""

    parameters = BatchParameters

    def __init__(self, parameters: BatchParameters) -> None:
        self._max_batch = parameters.max_batch

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        for name in view.open_ids:
            replica = view.up[name]
            if (
                replica.rows < self._max_batch
                and replica.has_room(request)
                and view.fits_ever(replica, request)
            ):
                return replica
        return None


class DloraRoundRobin(DloraProactive):
    """dLoRA's placement with a round robin over the replicas that have the adapter, over all where none has (its
    baseline, §7.3)."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class AuthorsParameters(DloraParameters):
    """Of dlora-authors."""

    batch_s: Number = setting(0.6, "seconds of a full batch of one adapter")
    load_bytes_s: Annotated[float, more_than(0), FINITE] = setting(
        32 * 2.0**30, "bytes of an adapter that are loaded in a second"
    )


class DloraAuthors(DloraProactive):
    """dLoRA's dispatch as in its authors' code: queueing counts batches. A request goes only to replicas that have
    the adapter, or an idle one that another replica has too."""

    parameters = AuthorsParameters

    def __init__(self, parameters: AuthorsParameters) -> None:
        super().__init__(parameters)
        self._batch_s, self._load_bytes_s = parameters.batch_s, parameters.load_bytes_s

    def candidates(self, view: Fleet, request: LiveRequest) -> list[ReplicaState]:
        """See DloraProactive."""
        can = super().candidates(view, request)
        return [replica for replica in can if self._is_candidate(view, replica, request)] or can

    def _is_candidate(self, view: Fleet, replica: ReplicaState, request: LiveRequest) -> bool:
        if replica.id in self._placement.homes(view, request.adapter):
            return True
        idle = (each for each in replica.residency if each not in replica.adapters)
        return any(len(view.homes(each)) > 1 for each in idle)

    def pending_s(self, view: Fleet, replica: ReplicaState, request: LiveRequest) -> float:
        """See DloraProactive. Full batches of one adapter run merged, at less than those of what is left over."""
        is_there = replica.tier_of(request.adapter) == ON_DEVICE
        bytes_in = 0 if is_there else request.adapter_pages * replica.facts.page_bytes
        size = replica.max_seqs
        merged = sum(count // size for count in replica.adapters.values())
        left = sum(count % size for count in replica.adapters.values())
        left += len(replica.requests) - sum(replica.adapters.values())
        return bytes_in / self._load_bytes_s + merged * self._batch_s + left // size
