"""The invariants of a replica's policy, checked over the whole state: O(everything)."""

from __future__ import annotations

import array
import collections
from collections.abc import Iterator, Mapping

from manylora.policy.cache_policies import CachePolicy
from manylora.policy.candidates import CandidateList
from manylora.policy.cold_start import ColdStarts
from manylora.policy.merging.dlora import DloraMerging
from manylora.policy.merging.state import MergeState
from manylora.policy.pages import PageLedger
from manylora.policy.queue import WaitingQueue
from manylora.policy.replica import Replica
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import RequestState, Scheduled, Sequence, Stage
from manylora.policy.tree import DependencyTree, HostState, Node, Residence
from manylora.types import BASE, AdapterId, PageId, RequestId

_ON_DEVICE = (Residence.LOADING, Residence.RESIDENT)


def check(replica: Replica) -> None:
    """Raise AssertionError, naming the invariant, where one does not hold."""
    residency, held, waiting = replica._residency, replica._held, replica._waiting
    merging, cold = replica._merging, replica._cold
    nodes = list(all_nodes(residency.tree))
    for node in nodes:
        _check_node(node, node in residency.transfers.current)
        if residency.tree.keeps_dependencies:
            _check_dependencies(node, residency.policy)
    _check_turns(residency, nodes)
    _check_counts(residency, nodes)
    _check_candidates(residency, nodes)
    _check_pins(nodes, held, [*([] if merging is None else merging.pinned()), *replica._pinned.pinned])
    _check_ownership(residency, nodes, held)
    _check_capacity(residency, held)
    _check_sequences(residency, held, waiting, replica._requests.by_id)
    _check_queue(waiting)
    if waiting.adapter_limit is not None and waiting.adapter_limit[1]:
        running = {sequence.adapter for sequence in held.admitted} - {BASE}
        assert len(running) <= waiting.adapter_limit[0], "no more adapters run than may"
    steps = list(replica._in_flight)
    _check_in_flight(held, [row for rows in steps for row in rows])
    _check_awaiting(residency, held, cold)
    _check_paused(held, merging)
    if merging is not None:
        _check_merging(residency, merging, steps)


def all_nodes(tree: DependencyTree) -> Iterator[Node]:
    """Every node that was asked for, parents first."""
    stack = [node for node in tree._adapters.values() if not isinstance(node, int)]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def members(waiting: WaitingQueue) -> list[Sequence]:
    """All that wait: those that returned, then the others, each in arrival order."""
    placed = [(place.is_new, sequence) for place, line in waiting._all.lines.items() for sequence in line]
    return [sequence for _, sequence in sorted(placed, key=lambda pair: (pair[0], pair[1].order))]


def _check_queue(waiting: WaitingQueue) -> None:
    in_queue = members(waiting)
    in_line = collections.Counter(sequence.adapter for sequence in in_queue)
    assert waiting.num_by_adapter == in_line, "what waits is counted by adapter"
    assert waiting.first() is min(in_queue, key=waiting.rank, default=None), "the first in line ranks first"
    for adapter in [*in_line, -1]:
        own = [sequence for sequence in in_queue if sequence.adapter == adapter]
        first = min(own, key=waiting.rank, default=None)
        assert waiting.first_of(adapter) is first, "so does the first of each adapter"
    if waiting.shares is not None:
        clients = collections.Counter(waiting.shares.client_of(sequence) for sequence in in_queue)
        assert waiting.shares.num_waiting == clients, "waiting sequences are counted by client"


def _check_in_flight(held: Reservations, rows: list[Scheduled]) -> None:
    for sequence, _, _ in rows:
        if sequence.stage is Stage.RUNNING:
            step: Node | None = sequence.node
            while step is not None:
                assert step.residence is Residence.RESIDENT, "a step reads resident pages"
                step = step.parent
    for sequence in held.admitted:
        own = [(num_tokens, num_samples) for s, num_tokens, num_samples in rows if s is sequence]
        assert held.is_in_flight(sequence) == bool(own), "rows in flight are known"
        assert sequence.num_pending == sum(num_samples > 0 for _, num_samples in own), (
            "pending tokens are counted"
        )
        scheduled = sequence.num_computed + sum(num_tokens for num_tokens, _ in own)
        assert sequence.num_scheduled == scheduled, "what is in flight becomes computed"
        assert sequence.num_scheduled <= len(sequence.tokens) + sequence.num_pending


def _check_awaiting(residency: Residency, held: Reservations, cold: ColdStarts | None) -> None:
    for sequence in held.admitted:
        if sequence.stage is not Stage.LOADING or not held.is_in_flight(sequence):
            continue
        assert cold is not None, "where nothing is awaited no loading sequence is in a step"
        assert not residency.device.has_ended(sequence.last_step)
        step: Node | None = sequence.node
        while step is not None:
            is_there = step.residence is Residence.RESIDENT or step.has_landed
            is_coming = step.residence is Residence.LOADING and _is_awaited(cold, sequence, step)
            assert is_there or is_coming, "a step reads resident pages, or pages that it awaits"
            step = step.parent
    for step_number in () if cold is None else cold._in_flight:
        assert not residency.device.has_ended(step_number), "what ended steps awaited is forgotten"


def _is_awaited(cold: ColdStarts, sequence: Sequence, node: Node) -> bool:
    """Whether the sequence's step awaits the copy that brings the node, or the CPU serves it meanwhile."""
    move, step = cold._residency.transfers.current.get(node), cold._in_flight.get(sequence.last_step)
    if move is None or not move.to_device or step is None:
        return False
    copy = move.copy
    is_awaited = any(wait.copy == copy and sequence.id in wait.sequences for wait in step.awaits)
    return is_awaited or any(rows.copy == copy and sequence.id in rows.sequences for rows in step.cpu)


def _check_node(node: Node, is_moving: bool) -> None:
    assert node.pins >= 0, "pins never go below zero"
    assert node.busy == node.pins + sum(child.busy for child in node.children.values()), "busy counts pins"
    on_device = [child for child in node.children.values() if child.residence in _ON_DEVICE]
    assert node.num_on_device == len(on_device), "children on the device are counted"
    assert not node.is_dropped, "what was dropped is out of the tree"
    if node.parent is not None:
        assert node.parent.children.get(node.key) is node, "parents know their children"
        assert node.children or not node.is_ghost, "a node is somewhere, or others hang below it"
    if node.residence is Residence.ABSENT:
        assert not node.pages, "absent nodes hold no pages"
        assert node.busy == 0, "pinned nodes stay"
    else:
        assert len(node.pages) == node.num_pages, "nodes on the device hold their pages"
    if node.residence is Residence.OFFLOADING:
        assert node.busy == 0, "pinned nodes stay"
        assert node.host is HostState.FILLING, "a node that is offloaded is being copied"
        assert is_moving, "a node that is offloaded has a copy in flight"
    expected = 0 if node.host is HostState.NONE else node.num_pages
    assert len(node.host_pages) == expected, "host copies hold their pages"
    assert not node.has_landed or node.residence is Residence.LOADING, "only loading nodes wait for parents"


def _check_dependencies(node: Node, policy: CachePolicy) -> None:
    parent = node.parent
    if parent is None:
        return
    if node.residence is Residence.RESIDENT:
        assert parent.residence is Residence.RESIDENT, "a resident node's parent is resident"
    if node.residence is Residence.LOADING:
        assert parent.residence in _ON_DEVICE, "a loading node's parent is resident or loading"
        if node.has_landed:
            assert parent.residence is Residence.LOADING, "what has landed waits only for its parent"
    if parent.residence is Residence.OFFLOADING:
        assert node.residence not in _ON_DEVICE, "a node that leaves has no resident or loading child"
    if policy.loses_kv_with(parent.is_adapter):
        assert not parent.is_ghost, "device and host together stay connected"


def _check_turns(residency: Residency, nodes: list[Node]) -> None:
    members: collections.Counter[int] = collections.Counter()
    for node in nodes:
        turn = residency.turns.of(node)
        place = node.depth - turn[0].depth
        assert turn[place] is node, "a node is in its turn"
        if node.parent is None or not residency.turns.kept:
            assert len(turn) == 1, "an adapter is a node by itself, and so is a page where turns are not kept"
            continue
        members[id(turn)] += 1
        if place == 0:
            members[id(turn)] -= len(turn)
        if node is not turn[-1]:
            (below,) = node.children.values()
            assert below is turn[place + 1], "prefixes part from a turn at its end only"
    assert not any(members.values()), "turns share no page"


def _check_candidates(residency: Residency, nodes: list[Node]) -> None:
    lists = residency.candidates
    leaving = {*_candidates(lists.leaving), *_candidates(lists.leaving_adapters)}
    assert leaving == {n for n in nodes if residency.tree.may_leave(n)}, (
        "what may leave the device is on its list"
    )
    may_leave_host = {n for n in nodes if residency.tree.may_leave_host(n)}
    assert {*_candidates(lists.leaving_host)} == may_leave_host, "what may leave the host is on its list"


def _candidates(found: CandidateList) -> Iterator[Node]:
    return (entry[3] for heap in found._buckets.values() for entry in heap if found._is_valid(entry))


def _check_counts(residency: Residency, nodes: list[Node]) -> None:
    tree = residency.tree
    for ledger in (residency.device, residency.host):
        num_unused = ledger.num_free + ledger.num_deferred
        assert ledger.num_used == ledger.num_pages - num_unused, "pages in use are counted"

    def pages(*residences: Residence) -> int:
        return sum(len(n.pages) for n in nodes if n.residence in residences)

    evictable = [n for n in nodes if n.busy == 0 and n.residence is Residence.RESIDENT]
    assert tree.evictable_pages == sum(len(n.pages) for n in evictable), "evictable pages are counted"
    idle = [n for n in evictable if not n.is_adapter]
    assert tree.idle_kv_pages == len(idle), "idle KV is counted"
    invalid = [n for n in idle if tree.node(n.adapter).residence is not Residence.RESIDENT]
    assert tree.invalid_pages == len(invalid), "invalid KV is counted"
    assert not (invalid and tree.keeps_dependencies), "no KV is without its adapter"
    assert tree.adapter_pages == sum(len(n.pages) for n in nodes if n.is_adapter), "adapter pages are counted"
    assert tree.kv_pages == sum(len(n.pages) for n in nodes if not n.is_adapter), "KV pages are counted"
    pinned = sum(len(n.pages) for n in nodes if n.busy and not n.is_adapter)
    assert tree.pinned_kv_pages == pinned, "KV pages in use are counted"
    assert tree.offloading_pages == pages(Residence.OFFLOADING), "pages that are offloaded are counted"
    assert tree.loading_pages == pages(Residence.LOADING), "loading pages are counted"
    assert tree.host_adapter_pages == sum(len(n.host_pages) for n in nodes if n.is_adapter)
    assert tree.host_kv_pages == sum(len(n.host_pages) for n in nodes if not n.is_adapter)
    resident = sum(n.is_adapter and n.num_pages > 0 and n.residence is Residence.RESIDENT for n in nodes)
    assert tree.resident_adapters == resident, "resident adapters are counted"


def _check_pins(nodes: list[Node], held: Reservations, pinned: list[AdapterId]) -> None:
    wanted = collections.Counter(id(s.node) for s in held.admitted)
    times = collections.Counter(pinned)
    wanted.update({id(node): times[node.adapter] for node in nodes if node.parent is None})
    for node in nodes:
        assert node.pins == wanted[id(node)], (
            "an admitted sequence pins its deepest node, merged and kept adapters are pinned, and no others"
        )


def _check_paused(held: Reservations, merging: MergeState | None) -> None:
    paused = [sequence for sequence in held.admitted if sequence.paused_s is not None]
    assert held.num_paused == len(paused), "paused sequences are counted"
    assert not paused or merging is not None, "where nothing is merged nothing is paused"
    for sequence in paused:
        assert sequence.stage is Stage.RUNNING, "what is paused could run"


def _check_merging(residency: Residency, merging: MergeState, steps: list[list[Scheduled]]) -> None:
    for adapter in merging.pinned():
        node = residency.tree.node(adapter)
        assert node.residence is Residence.RESIDENT, "a merged adapter is resident"
    shapes = list(merging.in_flight)
    assert len(shapes) == len(steps), "steps in flight are known by what they run on"
    for shape, rows in zip(shapes, steps, strict=True):
        own = {sequence.adapter for sequence, _, _ in rows}
        assert shape.rows.keys() == own, "a step's shape is its rows'"
        assert shape.merged == BASE or own == {shape.merged}, "beside a merged adapter's rows no others run"
    if isinstance(merging.policy, DloraMerging):
        credits = merging.policy.credits
        beyond = sum(credit - credits.start for credit in credits.changed.values())
        assert beyond + credits.left_over == 0, "what one adapter pays another gets"


def _check_ownership(residency: Residency, nodes: list[Node], held: Reservations) -> None:
    owners: collections.Counter[int] = collections.Counter(_unowned(residency.device))
    host_owners: collections.Counter[int] = collections.Counter(_unowned(residency.host))
    for node in nodes:
        owners.update(node.pages)
        host_owners.update(node.host_pages)
    for move in residency.transfers.moves():
        owners.update(move.pages if move.owns_pages else ())
        host_owners.update(move.host_pages if move.owns_host_pages else ())
    for sequence in held.admitted:
        owners.update(sequence.pages[sequence.num_shared :])
    assert owners == collections.Counter(range(residency.device.num_pages)), (
        "every page has exactly one owner"
    )
    assert host_owners == collections.Counter(range(residency.host.num_pages)), (
        "every host page has one owner"
    )
    if residency.device.has_ended(residency.device._last_started):
        assert residency.device.num_deferred == 0, "nothing stays deferred without a step in flight"


def _unowned(ledger: PageLedger) -> list[PageId]:
    """List every page that no node, sequence or copy owns."""
    return ledger._free + [page for _, pages in ledger._deferred for page in pages]


def _check_capacity(residency: Residency, held: Reservations) -> None:
    tree = residency.tree
    assert tree.adapter_pages <= residency.adapter_limit, "adapters stay within their part"
    if residency.has_parts:
        own_pages = sum(len(s.pages) - s.num_shared for s in held.admitted)
        assert tree.kv_pages + own_pages <= residency.device.num_pages - residency.adapter_limit, (
            "KV stays within its part"
        )
    if not residency.policy.keeps_prefixes and residency.device.has_ended(residency.device._last_started):
        assert tree.idle_kv_pages == 0, "no prefix is kept"
    coming = sum(len(move.pages) for move in residency.transfers.moves() if move.to_device)
    assert residency.transfers.pages_loading_now == coming, "pages on their way are counted"


def _check_sequences(
    residency: Residency,
    held: Reservations,
    waiting: WaitingQueue,
    requests: Mapping[RequestId, RequestState],
) -> None:
    in_queue = members(waiting)
    assert len(in_queue) == len(waiting), "the queue knows its length"
    for was_admitted in (True, False):
        orders = [s.order for s in in_queue if s.state.admitted is was_admitted]
        assert orders == sorted(orders), "each part of the queue is in arrival order"
    orders = [s.order for s in held.admitted]
    assert orders == sorted(orders), "admitted sequences are sorted"
    loading = [s for s in held.admitted if s.stage is Stage.LOADING]
    assert held.num_loading == len(loading), "admitted sequences that load are counted"
    known = {id(s) for state in requests.values() for s in state.sequences.values()}
    leaving = [s for state in requests.values() if state.is_leaving for s in state.sequences.values()]
    placed = {id(s) for s in [*in_queue, *held.admitted, *leaving]}
    assert known == placed, "each live sequence waits, is admitted, or is about to be let go"
    for sequence in leaving:
        assert sequence.stage is Stage.LEAVING, "a request is let go as a whole"
        assert sequence.node is None, "what is about to be let go holds nothing"
        assert not sequence.pages, "what is about to be let go holds nothing"
        assert not sequence.is_known_to_executor, "nor does the executor know it any more"
    for state in requests.values():
        assert state.open_samples, "an ended request is forgotten"
        in_flight = any(held.is_in_flight(sequence) for sequence in state.sequences.values())
        assert in_flight or not state.is_leaving, "a request is let go when its last step has ended"
        born = state.open_samples & state.sequences.keys()
        assert not born & state.later.keys(), "a sample has one sequence"
        has_carrier = any(sequence.num_forks for sequence in state.sequences.values())
        is_whole = state.open_samples <= born | state.later.keys()
        assert is_whole or has_carrier or state.is_leaving, "each open sample has a sequence, or will have"
        assert state.sequences, "a live request has a sequence"
    for sequence in held.admitted:
        assert sequence.stage in (Stage.RUNNING, Stage.LOADING), "admitted sequences run or load"
        path = []
        node = sequence.node
        while node is not None and not node.is_adapter:
            path.append(node)
            node = node.parent
        assert node is not None, "paths end in an adapter"
        assert node.adapter == sequence.adapter, "KV is never shared between adapters"
        if path:
            scope, first = sequence.scope, path[-1].key
            tokens = array.array("q", sequence.tokens[: (len(first) - len(scope)) // 8])
            assert first == scope + tokens.tobytes(), "KV is never shared between cache scopes"
        is_ready = all(n.residence is Residence.RESIDENT for n in [node, *path])
        is_running = sequence.stage is Stage.RUNNING
        is_awaiting = not is_running and held.is_in_flight(sequence)
        assert is_running == is_ready or is_awaiting, "a sequence runs when all it reuses is there"
        if is_running:
            shared = sequence.pages[: sequence.num_shared]
            assert shared == [n.pages[0] for n in reversed(path)], "shared pages are the path's"
        assert sequence.num_computed < len(sequence.tokens), "the last token is always computed again"
