"""How long a request would wait at a replica: estimates in seconds from what the router knows."""

from __future__ import annotations

from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.replicas import ReplicaState
from manylora.protocol.routing import NOWHERE, ON_DEVICE, ReplicaId
from manylora.types import AdapterId


def load_s(replica: ReplicaState, adapter: AdapterId, num_pages: int) -> float:
    """Until the adapter is on the replica's device; 0 where it is."""
    tier = replica.tier_of(adapter)
    if tier == ON_DEVICE:
        return 0.0
    page_s = replica.kind.page_in_s + (replica.kind.page_read_s if tier == NOWHERE else 0.0)
    return num_pages * page_s


class QueueBySteps:
    """What is left to generate on a replica, shared by its slots, and the prompts that it has yet to compute.

    dLoRA (§5.2) gives no estimate; this one is ours. It is made anew where requests or reports have come.
    """

    def __init__(self) -> None:
        self._known: dict[ReplicaId, tuple[ReplicaState, int, float]] = {}

    def seconds(self, view: Fleet, replica: ReplicaState) -> float:
        """Until all that is there now is done."""
        found = self._known.get(replica.id)
        if found is None or found[0] is not replica or found[1] != replica.num_changes:
            steps = sum(each.samples * view.remaining_tokens(each) for each in replica.requests.values())
            seconds = (
                steps * replica.step_s / replica.max_seqs + replica.waiting_tokens * replica.kind.token_s
            )
            found = self._known[replica.id] = replica, replica.num_changes, seconds
        return found[2]


def wait_s(view: Fleet, replica: ReplicaState, rows: int, pages: int) -> float:
    """Until a request of so many sequences, which needs so many pages, would begin: the prompts before it, and
    the requests that must end first where no slot or no page is left for it."""
    seconds = replica.waiting_tokens * replica.kind.token_s
    too_many = replica.rows + rows - replica.max_seqs
    too_large = pages - replica.free_pages
    if too_many > 0 or too_large > 0:
        running = min(replica.rows, replica.max_seqs) or 1
        if too_large > 0:
            too_many = max(too_many, too_large * running // replica.facts.num_pages + 1)
        # Of those that run one ends each time that a mean reply has been shared by all.
        seconds += too_many * view.lengths.mean * replica.step_s / running
    return seconds
