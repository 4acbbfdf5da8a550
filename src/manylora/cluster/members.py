"""What is linked to the router: replicas and front ends, with what the links have brought.

Owns no decision: which replicas are up is the router's own word.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping

from manylora.cluster import messages
from manylora.cluster.link import Link
from manylora.policy.routing.replicas import ReplicaState
from manylora.protocol.routing import ReplicaFacts, ReplicaId
from manylora.types import AdapterId

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a replica is asked again for an adapter that it could not have; each pause is twice the last."""


@dataclasses.dataclass(slots=True, eq=False)
class ReplicaMember:
    """An epoch of a replica. ``answers``: what it said of each adapter version that it was asked to serve, at
    last; ``pauses``: of those that it could not have, how long it was not asked again, and until when;
    ``told``: of those, what the router has been told."""

    id: ReplicaId
    epoch: int
    link: Link
    facts: ReplicaFacts | None = None
    address: tuple[str, int] = ("", 0)
    cold_start: str = ""
    answers: dict[AdapterId, messages.AdapterReady] = dataclasses.field(default_factory=dict)
    asked: set[AdapterId] = dataclasses.field(default_factory=set)
    pauses: dict[AdapterId, tuple[float, float]] = dataclasses.field(default_factory=dict)
    told: set[AdapterId] = dataclasses.field(default_factory=set)
    heard_s: float = dataclasses.field(default_factory=time.monotonic)

    def ask(self, listing: messages.Listing, *, verify: bool) -> None:
        """Have it serve a version, unless it was asked already."""
        if listing.id not in self.asked:
            self.asked.add(listing.id)
            self.link.send(messages.AddAdapter(listing, verify))

    def hear_answer(self, answer: messages.AdapterReady) -> None:
        """It serves the version, or says why not."""
        if answer.id not in self.asked:
            return
        self.answers[answer.id] = answer
        last_s, _ = self.pauses.pop(answer.id, (FIRST_PAUSE_S / 2, 0.0))
        if answer.card is None:
            pause_s = min(2 * last_s, LONGEST_PAUSE_S)
            self.pauses[answer.id] = pause_s, time.monotonic() + pause_s

    def why_not(self, adapter: AdapterId) -> str:
        """Why it does not serve a version, as far as it has said so."""
        answer = self.answers.get(adapter)
        return "?" if answer is None or answer.error is None else answer.error.message

    def ask_again(self, listing: messages.Listing) -> None:
        """Have it serve a version that it could not have, if the pause is over and it was not asked since."""
        pause_s, until_s = self.pauses[listing.id]
        if time.monotonic() >= until_s:
            self.pauses[listing.id] = pause_s, float("inf")
            self.link.send(messages.AddAdapter(listing, verify=False))

    def drop(self, adapter: AdapterId) -> None:
        """Have it give a version up; AdapterGone follows."""
        self.link.send(messages.DropAdapter(adapter))

    def forget(self, adapter: AdapterId) -> None:
        """It holds nothing of the version any more."""
        self.asked.discard(adapter)
        self.answers.pop(adapter, None)
        self.pauses.pop(adapter, None)

    @property
    def has_answered(self) -> bool:
        """Whether it has said of every version that it was asked for whether it serves it."""
        return len(self.asked) == len(self.answers)


@dataclasses.dataclass(slots=True, eq=False)
class FrontendMember:
    """A front end. ``revision``: of the registry, by which it goes."""

    id: int
    link: Link
    revision: int = 0
    is_synced: bool = False
    stale_tokens: int = 0
    recomputed_tokens: int = 0


def can_serve(up: Mapping[ReplicaId, ReplicaState]) -> bool:
    """Whether a replica takes requests, or will when it has room."""
    return any(not each.is_suspect and each.drains_from_s is None for each in up.values())


class Members:
    """All that are linked now, by id."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, ReplicaMember] = {}
        self.frontends: dict[int, FrontendMember] = {}
        self.supervisor: Link | None = None

    def endpoints(self, up: Mapping[ReplicaId, ReplicaState]) -> messages.Endpoints:
        """Where front ends find the replicas that are up."""
        return messages.Endpoints(
            [
                messages.Endpoint(each.id, each.epoch, *each.address)
                for each in self.replicas.values()
                if each.id in up and up[each.id].epoch == each.epoch
            ],
            can_serve(up),
        )

    def unheard(self, slots: Iterable[messages.Slot]) -> list[messages.Slot]:
        """Those that run and are not linked."""
        linked = {each.id: each.epoch for each in self.replicas.values()}
        return [slot for slot in slots if slot.state == "running" and linked.get(slot.id, 0) < slot.epoch]

    def tell_frontends(self, message: messages.ToFrontendFromRouter) -> None:
        """The same to all."""
        for each in self.frontends.values():
            each.link.send(message)
