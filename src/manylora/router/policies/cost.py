"""Computes the cost of a request at a replica, in seconds: its own time and that of the other requests.

There is one loop, without calls, since it runs some twenty times for every request that arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from manylora.protocol.routing import BLOCK_TOKENS, NOWHERE, ON_DEVICE, ReplicaId, StepPlane
from manylora.router.fleet import Fleet
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest, Shape
from manylora.types import BASE, AdapterId


def load_s(replica: ReplicaState, adapter: AdapterId, num_pages: int) -> float:
    """Estimate the seconds until the adapter is on the replica's device; 0 where it is there."""
    tier = replica.tier_of(adapter)
    if tier == ON_DEVICE:
        return 0.0
    page_s = replica.kind.page_in_s + (replica.kind.page_read_s if tier == NOWHERE else 0.0)
    return num_pages * page_s


class QueueBySteps:
    """An estimate of a replica's queue: the tokens left to generate, shared by its slots, and the prompts
    left to compute.

    dLoRA (§5.2) gives no estimate; this one is ours. It is computed again after requests or reports have
    arrived.
    """

    def __init__(self) -> None:
        self._known: dict[ReplicaId, tuple[ReplicaState, int, float]] = {}

    def seconds(self, view: Fleet, replica: ReplicaState) -> float:
        """Estimate the seconds until the replica has finished all its present requests."""
        found = self._known.get(replica.id)
        if found is None or found[0] is not replica or found[1] != replica.num_changes:
            steps = sum(each.samples * view.remaining_tokens(each) for each in replica.requests.values())
            seconds = (
                steps * replica.step_s / replica.max_seqs + replica.waiting_tokens * replica.kind.token_s
            )
            found = self._known[replica.id] = replica, replica.num_changes, seconds
        return found[2]


def wait_s(view: Fleet, replica: ReplicaState, rows: int, pages: int) -> float:
    """Estimate the seconds until a request of ``rows`` sequences and ``pages`` pages would begin. It waits
    for the prompts before it, and for requests that must end first where no slot or no page is free."""
    seconds = replica.waiting_tokens * replica.kind.token_s
    too_many = replica.rows + rows - replica.max_seqs
    too_large = pages - replica.free_pages
    if too_many > 0 or too_large > 0:
        running = min(replica.rows, replica.max_seqs) or 1
        if too_large > 0:
            too_many = max(too_many, too_large * running // replica.facts.num_pages + 1)
        # One running request ends in the time of a mean reply, divided by the number that run.
        seconds += too_many * view.lengths.mean * replica.step_s / running
    return seconds


def cheapest(
    view: Fleet, request: LiveRequest, candidates: Sequence[ReplicaState], blocks: Mapping[ReplicaState, int]
) -> ReplicaState | None:
    """Return the candidate of least cost, the first among equal ones. Returns None if none can ever hold the
    request.

    ``blocks``: the number of the prompt's blocks that a replica is believed to have. The cost is the time
    until the first token (the wait, the prefill, the adapter), plus the value of the pages that are pushed
    out. It includes the time that running requests wait for this prompt, and the added time of decode steps.
    The added time counts for all running requests, this one included, for its expected number of steps. The
    first ``steps_until_even`` steps are computed with the replica's present load, the later ones with the
    mean load of all replicas. The adapter makes steps longer as long as no other request on the replica uses
    it.
    """
    best, least_s = None, float("inf")
    remaining = view.remaining_tokens(request)
    mean_rows, mean_kv_tokens, mean_adapters, mean_adapter_pages, mean_ranks = view.mean_load
    soon = steps_until_even(remaining, view.lengths.mean, mean_rows)
    later = remaining - soon
    samples, num_tokens = request.samples, request.num_tokens
    kv_tokens = samples * num_tokens
    adapter, adapter_pages, rank = request.adapter, request.adapter_pages, request.rank
    has_adapter, lacking = adapter != BASE, view.lacking(adapter)
    shape: Shape | None = None
    fits, kv_pages = False, 0
    plane: StepPlane | None = None
    row_s = padded_s = own_s = adapter_all_s = even_s = 0.0
    for replica in candidates:
        if replica.shape is not shape:
            shape = replica.shape
            fits, kv_pages = request.can_ever_fit(shape), request.pages_now(shape[1])
        if not fits or replica.id in lacking:
            continue
        num_computed, pages, rows, kind = num_tokens, kv_pages, replica.rows, replica.kind
        token_s, reused_pages = kind.token_s, 0
        if replica in blocks:
            num_computed = max(num_tokens - blocks[replica] * BLOCK_TOKENS, 1)
            reused_pages = (num_tokens - num_computed) // shape[1]
        is_full = rows + samples > replica.max_seqs
        cost_s = num_computed * token_s
        num_alike = replica.adapters.get(adapter, 0)
        if has_adapter and not num_alike:
            tier = replica.residency.get(adapter, NOWHERE)
            if tier != ON_DEVICE:
                pages += adapter_pages
                page_s = kind.page_in_s + kind.page_read_s if tier == NOWHERE else kind.page_in_s
                cost_s += adapter_pages * page_s
        if is_full or pages > replica.free_pages:
            cost_s += wait_s(view, replica, samples, pages)
        else:
            cost_s += replica.waiting_tokens * token_s
        new_pages = pages - reused_pages
        if new_pages > replica.spare_pages:
            cost_s += (new_pages - max(replica.spare_pages, 0)) * replica.report.page_price_s
        added = samples
        if is_full:  # all slots are taken from then on
            rows = min(rows, replica.max_seqs)
            added = min(samples, replica.max_seqs - rows)
        cost_s += rows * num_computed * token_s  # the running requests wait for the prefill
        if cost_s >= least_s:
            continue
        # The plane that bounds a step now: within it, each row, token and page adds a constant time.
        now_s, bounding = replica.step_now or replica.present_step()
        if bounding is not plane:
            plane = bounding
            base_s, row_s, kv_token_s, adapter_s, adapter_page_s, rank_s, padded_s = plane
            own_s = kv_tokens * kv_token_s + rank * rank_s
            adapter_all_s = adapter_s + adapter_pages * adapter_page_s if has_adapter else 0.0
            even_s = base_s + mean_rows * row_s + mean_kv_tokens * kv_token_s + mean_ranks * rank_s
            even_s += mean_adapters * adapter_s + mean_adapter_pages * adapter_page_s
        # The adapter's time counts until its last request ends, and each is equally likely to be that.
        added_s = own_s + added * row_s + adapter_all_s / (1 + num_alike)
        later_s = even_s
        if padded_s:
            largest = replica.rank_max
            added_s += ((rows + added) * max(largest, rank) - rows * largest) * padded_s
            later_s += mean_rows * largest * padded_s
        cost_s += added_s * (rows * soon + mean_rows * later)
        cost_s += samples * (now_s * soon + later_s * later + added_s * remaining)
        if cost_s < least_s:
            best, least_s = replica, cost_s
    return best


def steps_until_even(remaining: float, output_tokens: float, mean_rows: float) -> float:
    """Estimate the number of a request's steps for which its replica's load differs from the mean as it does now.

    If nothing evened the load out, the present requests would end one by one, over half of the request's
    life. If all requests went to the least loaded replica, it would be even as soon as every replica has had
    one more. That takes as many steps as a reply has tokens, divided by a replica's sequences. The router's
    other criteria keep it between the two; this is their geometric mean.
    """
    half = remaining / 2
    return min(half, math.sqrt(half * output_tokens / max(mean_rows, 1.0)))
