"""The cluster as people see it: one JSON, for ``manylora cluster status`` and ``GET /cluster``.

Holds no prompts, no keys, no paths.
"""

from __future__ import annotations

import os
import time
from typing import Any

from manylora.cluster import messages
from manylora.cluster.members import Members, ReplicaMember
from manylora.cluster.timing import Decisions
from manylora.policy.router import Router
from manylora.protocol.routing import ON_DEVICE, ON_HOST, ReplicaId, ScaleHint

STATES = ("starting", "running", "suspect", "draining", "drained", "waiting", "stopping")
"""What a replica may be: coming up; serving; silent; letting go of its requests; empty, and to stay so; about to
be started again; about to end."""


def state_of(slot: messages.Slot, router: Router) -> str:
    """The state of what runs at a place."""
    if slot.state != "running":
        return slot.state
    replica = router.fleet.up.get(slot.id)
    if replica is None or replica.epoch != slot.epoch:
        return "starting"
    if slot.drains_to:
        return "draining" if replica.requests else "drained"
    return "suspect" if replica.is_suspect else "running"


def status(
    router: Router,
    members: Members,
    table: messages.ProcessTable,
    *,
    policy: str,
    epoch: int,
    is_settled: bool,
    revision: int,
    num_adapters: int,
    hint: ScaleHint | None,
    moved: dict[str, int],
    decisions: Decisions,
    lacks: dict[ReplicaId, list[str]],
) -> dict[str, Any]:
    """The whole of it, as JSON has it. ``lacks``: names of adapters that a replica cannot serve."""
    frontends = []
    started = {child.id for child in table.frontends}
    joined = [
        messages.ChildProcess(each.id, each.link.peer.pid)
        for each in members.frontends.values()
        if each.id not in started
    ]
    for child in (*table.frontends, *joined):
        member = members.frontends.get(child.id)
        frontends.append(
            {
                "id": child.id,
                "pid": child.pid,
                "state": "starting" if member is None else "running",
                "stale_tokens": 0 if member is None else member.stale_tokens,
                "recomputed_tokens": 0 if member is None else member.recomputed_tokens,
            }
        )
    return {
        "replicas": [
            _replica(slot, state_of(slot, router), router, members.replicas.get(slot.id), lacks)
            for slot in sorted(table.slots, key=lambda slot: slot.id)
        ],
        "router": {
            "pid": os.getpid(),
            "epoch": epoch,
            "policy": policy,
            "state": "running" if is_settled else "settling",
            "requests": len(router.requests()),
            "waiting": router.num_waiting,
            "moved": moved,
            "decisions": decisions.as_json(),
        },
        "frontends": frontends,
        "supervisor": {"pid": table.supervisor, "launcher": table.launcher},
        "adapters": {"revision": revision, "listed": num_adapters},
        "scale_hint": {"delta": 0, "reason": ""}
        if hint is None
        else {"delta": hint.delta, "reason": hint.reason},
    }


def _replica(
    slot: messages.Slot,
    state: str,
    router: Router,
    member: ReplicaMember | None,
    lacks: dict[ReplicaId, list[str]],
) -> dict[str, Any]:
    found: dict[str, Any] = {"id": slot.id, "pid": slot.pid, "epoch": slot.epoch, "state": state}
    known = router.fleet.up.get(slot.id)
    if known is not None and known.epoch != slot.epoch:
        known = None
    if member is not None and member.epoch != slot.epoch:
        member = None
    report = known.report if known is not None else None
    tiers = list(known.residency.values()) if known is not None else []
    return found | {
        "requests": len(known.requests) if known is not None else 0,
        "running": report.running if report else 0,
        "waiting": report.waiting if report else 0,
        "waiting_tokens": report.waiting_tokens if report else 0,
        "pages": known.facts.num_pages if known is not None else 0,
        "free_pages": report.free_pages if report else 0,
        "reclaimable_pages": report.reclaimable_pages if report else 0,
        "adapters_on_device": sum(tier == ON_DEVICE for tier in tiers),
        "adapters_on_host": sum(tier == ON_HOST for tier in tiers),
        "cold_start": member.cold_start if member is not None else "",
        "adapters_lacking": lacks.get(slot.id, []) if member is not None else [],
        "heard_s_ago": round(time.monotonic() - member.heard_s, 3) if member is not None else None,
    }
