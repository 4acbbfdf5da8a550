"""Keeps the processes that are linked to the router, and describes the cluster for people.

The description is one JSON, for ``manylora cluster status`` and ``GET /cluster``. It has no prompts, no keys
and no paths. This module owns no decision: the router knows which replicas are up, and what they have.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from manylora.cluster import messages
from manylora.cluster.link import Link
from manylora.protocol.routing import ON_DEVICE, ON_HOST, ReplicaId, ScaleHint
from manylora.router.replicas import ReplicaState
from manylora.router.router import Router
from manylora.types import AdapterId

if TYPE_CHECKING:
    from manylora.cluster.switchboard import Switchboard

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""The first and the longest pause before a replica is asked again for an adapter that it could not have. Each
pause is twice the one before."""

BOUNDS_S = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1)

STATES = ("starting", "running", "suspect", "draining", "drained", "waiting", "stopping")
"""The states of a replica: starting; serving; silent; releasing its requests; empty, and to stay so; about to
be started again; about to end."""


@dataclasses.dataclass(slots=True, eq=False)
class ReplicaMember:
    """An epoch of a replica. ``answers``: its last answer for each adapter version that it was asked to
    serve; ``pauses``: for versions that it could not have, the length and the end of the pause before it is
    asked again; ``reported``: those that the router knows to be lacking."""

    id: ReplicaId
    epoch: int
    link: Link
    up: messages.Up | None = None
    answers: dict[AdapterId, messages.AdapterReady] = dataclasses.field(default_factory=dict)
    asked: set[AdapterId] = dataclasses.field(default_factory=set)
    pauses: dict[AdapterId, tuple[float, float]] = dataclasses.field(default_factory=dict)
    reported: set[AdapterId] = dataclasses.field(default_factory=set)
    received_s: float = dataclasses.field(default_factory=time.monotonic)

    def ask(self, listing: messages.Listing, *, verify: bool) -> None:
        """Ask it to serve a version, unless it was asked already."""
        if listing.id not in self.asked:
            self.asked.add(listing.id)
            self.link.send(messages.AddAdapter(listing, verify))

    def receive_answer(self, answer: messages.AdapterReady) -> None:
        """Note that it serves the version, or that it cannot."""
        if answer.id not in self.asked:
            return
        self.answers[answer.id] = answer
        last_s, _ = self.pauses.pop(answer.id, (FIRST_PAUSE_S / 2, 0.0))
        if answer.card is None:
            pause_s = min(2 * last_s, LONGEST_PAUSE_S)
            self.pauses[answer.id] = pause_s, time.monotonic() + pause_s

    def why_not(self, adapter: AdapterId) -> str:
        """Return the reason that it gave for not serving a version, or "?"."""
        answer = self.answers.get(adapter)
        return "?" if answer is None or answer.error is None else answer.error.message

    def ask_again(self, listing: messages.Listing) -> None:
        """Ask it again for a version that it could not have, if the pause is over and it was not asked since."""
        pause_s, until_s = self.pauses[listing.id]
        if time.monotonic() >= until_s:
            self.pauses[listing.id] = pause_s, float("inf")
            self.link.send(messages.AddAdapter(listing, verify=False))

    def drop(self, adapter: AdapterId) -> None:
        """Ask it to free a version; AdapterGone follows."""
        self.link.send(messages.DropAdapter(adapter))

    def forget(self, adapter: AdapterId) -> None:
        """Forget a version of which the replica has nothing any more."""
        self.asked.discard(adapter)
        self.answers.pop(adapter, None)
        self.pauses.pop(adapter, None)

    @property
    def has_answered(self) -> bool:
        """Whether it has answered for every version that it was asked to serve."""
        return len(self.asked) == len(self.answers)


@dataclasses.dataclass(slots=True, eq=False)
class FrontendMember:
    """A front end. ``revision``: the revision of the registry that it has."""

    id: int
    link: Link
    revision: int = 0
    is_synced: bool = False
    stale_tokens: int = 0
    recomputed_tokens: int = 0


def can_serve(up: Mapping[ReplicaId, ReplicaState]) -> bool:
    """Return whether a replica takes requests, or will when it has room."""
    return any(not each.is_suspect and each.drains_from_s is None for each in up.values())


class Members:
    """The processes that are linked now, by id."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, ReplicaMember] = {}
        self.frontends: dict[int, FrontendMember] = {}
        self.supervisor: Link | None = None

    def endpoints(self, up: Mapping[ReplicaId, ReplicaState]) -> messages.Endpoints:
        """Return the addresses of the replicas that are up, for front ends."""
        return messages.Endpoints(
            [
                messages.Endpoint(each.id, each.epoch, each.up.host, each.up.port)
                for each in self.replicas.values()
                if each.up is not None and each.id in up and up[each.id].epoch == each.epoch
            ],
            can_serve(up),
        )

    def send_to_frontends(self, message: messages.ToFrontendFromRouter) -> None:
        """Send the same message to all front ends."""
        for each in self.frontends.values():
            each.link.send(message)

    def send_to_supervisor(self, message: messages.ToSupervisorFromRouter) -> None:
        """Send a message. Without a link the cluster is ending, and the message is dropped."""
        if self.supervisor is not None:
            self.supervisor.send(message)


class Decisions:
    """A histogram of the times that one router's decisions have taken since its start."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one decision."""
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def as_json(self) -> dict[str, Any]:
        """Return the histogram as JSON. ``buckets``: the number of decisions that took no longer than each
        bound, and of all."""
        below, buckets = 0, []
        for bound, count in zip((*BOUNDS_S, None), self._counts, strict=True):
            below += count
            buckets.append([bound, below])
        return {"count": below, "sum_s": self._sum_s, "buckets": buckets}


def state_of(slot: messages.Slot, router: Router) -> str:
    """Return the state of the replica at a place."""
    if slot.state != "running":
        return slot.state
    replica = router.fleet.find(slot.id, slot.epoch)
    if replica is None:
        return "starting"
    if slot.drains_to:
        return "draining" if replica.requests else "drained"
    return "suspect" if replica.is_suspect else "running"


def status_of(board: Switchboard) -> dict[str, Any]:
    """Describe the cluster as JSON."""
    table, members, hint = board.table, board.members, board.hint or ScaleHint(0, "")
    registry = board.registry.log
    num_listed = sum(each.state == "listed" for each in registry.current.values())
    pids = dict(table.frontends)
    for joined in members.frontends.values():
        pids.setdefault(joined.id, joined.link.peer.pid)
    frontends = []
    for number, pid in pids.items():
        member = members.frontends.get(number)
        frontends.append(
            {
                "id": number,
                "pid": pid,
                "state": "starting" if member is None else "running",
                "stale_tokens": 0 if member is None else member.stale_tokens,
                "recomputed_tokens": 0 if member is None else member.recomputed_tokens,
            }
        )
    return {
        "replicas": [_replica(board, slot) for slot in sorted(table.slots, key=lambda slot: slot.id)],
        "router": {
            "pid": os.getpid(),
            "epoch": board.launch.epoch,
            "policy": board.config.policy,
            "state": "running" if board.held_back is None else "settling",
            "requests": len(board.router.requests),
            "waiting": board.router.num_waiting,
            "moved": dict(board.moved),
            "decisions": board.decisions.as_json(),
        },
        "frontends": frontends,
        "supervisor": {"pid": table.supervisor, "launcher": table.launcher},
        "adapters": {"revision": registry.revision, "listed": num_listed},
        "scale_hint": {"delta": hint.delta, "reason": hint.reason},
    }


def _replica(board: Switchboard, slot: messages.Slot) -> dict[str, Any]:
    known, member = board.router.fleet.find(slot.id, slot.epoch), board.members.replicas.get(slot.id)
    if member is not None and member.epoch != slot.epoch:
        member = None
    report = known.report if known is not None else None
    tiers = list(known.residency.values()) if known is not None else []
    lacking = board.registry.lacking(member) if member is not None else []
    return {
        "id": slot.id,
        "pid": slot.pid,
        "epoch": slot.epoch,
        "state": state_of(slot, board.router),
        "requests": len(known.requests) if known is not None else 0,
        "running": report.running if report else 0,
        "waiting": report.waiting if report else 0,
        "waiting_tokens": report.waiting_tokens if report else 0,
        "pages": known.facts.num_pages if known is not None else 0,
        "free_pages": report.free_pages if report else 0,
        "reclaimable_pages": report.reclaimable_pages if report else 0,
        "adapters_on_device": sum(tier == ON_DEVICE for tier in tiers),
        "adapters_on_host": sum(tier == ON_HOST for tier in tiers),
        "cold_start": member.up.cold_start if member is not None and member.up is not None else "",
        "adapters_lacking": sorted(listing.name for listing in lacking),
        "heard_s_ago": round(time.monotonic() - member.received_s, 3) if member is not None else None,
    }
