"""The invariants of design §4, checked over the whole state. For tests: O(everything)."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from manylora.policy.queues import RequestState, Scheduled, Stage, WaitingQueue
from manylora.policy.reservations import Reservations
from manylora.policy.tree import DependencyTree, Node, Residence
from manylora.types import RequestId


def check(
    tree: DependencyTree,
    held: Reservations,
    waiting: WaitingQueue,
    requests: Mapping[RequestId, RequestState],
    in_flight: tuple[Scheduled, ...] | None,
) -> None:
    """Raise AssertionError, naming the invariant, where one does not hold."""
    nodes = list(tree.all_nodes())
    _check_nodes(nodes)
    _check_counts(tree, nodes)
    _check_pins(nodes, held)
    _check_ownership(nodes, held)
    _check_sequences(held, waiting, requests)
    for row in in_flight or ():
        if row.sequence.stage is Stage.RUNNING:
            assert tree.node(row.sequence.adapter).residence is Residence.RESIDENT, (
                "a step reads resident pages"
            )


def _check_nodes(nodes: list[Node]) -> None:
    for node in nodes:
        assert node.pins >= 0, "pins never go below zero"
        assert node.busy == node.pins + sum(child.busy for child in node.children.values()), (
            "busy counts pins"
        )
        if node.parent is not None:
            assert node.residence is Residence.RESIDENT, "KV nodes exist only while resident"
            assert node.parent.residence is Residence.RESIDENT, "a resident node's parent is resident"
            assert node.parent.children.get(node.key) is node, "parents know their children"
        if node.residence is Residence.ABSENT:
            assert not node.pages, "absent nodes hold no pages"
            assert node.busy == 0, "pinned nodes stay"


def _check_counts(tree: DependencyTree, nodes: list[Node]) -> None:
    evictable = sum(len(n.pages) for n in nodes if n.busy == 0 and n.residence is Residence.RESIDENT)
    assert tree.evictable_pages == evictable, "evictable pages are counted"
    assert tree.adapter_pages == sum(len(n.pages) for n in nodes if n.is_adapter), "adapter pages are counted"
    assert tree.history_pages == sum(len(n.pages) for n in nodes if not n.is_adapter), "KV pages are counted"


def _check_pins(nodes: list[Node], held: Reservations) -> None:
    wanted = collections.Counter(id(s.node) for s in held.holders)
    for node in nodes:
        assert node.pins == wanted[id(node)], "each holder pins its deepest node, nobody else pins"


def _check_ownership(nodes: list[Node], held: Reservations) -> None:
    owners: collections.Counter[int] = collections.Counter(held.ledger.unowned())
    for node in nodes:
        owners.update(node.pages)
    for sequence in held.holders:
        owners.update(sequence.pages[sequence.num_shared :])
    assert owners == collections.Counter(range(held.ledger.num_pages)), "every page has exactly one owner"
    if not held.step_in_flight:
        assert held.ledger.num_deferred == 0, "nothing stays deferred without a step in flight"


def _check_sequences(
    held: Reservations, waiting: WaitingQueue, requests: Mapping[RequestId, RequestState]
) -> None:
    members = waiting.members()
    assert len(members) == len(waiting), "the queue knows its length"
    orders = [s.order for s in members]
    assert orders == sorted(orders), "the queue is in arrival order"
    assert [s.order for s in held.holders] == sorted(s.order for s in held.holders), "holders are sorted"
    known = {id(s) for state in requests.values() for s in state.sequences.values()}
    assert known == {id(s) for s in [*members, *held.holders]}, "each live sequence waits or holds"
    for state in requests.values():
        assert state.open_samples, "an ended request is forgotten"
    for sequence in held.holders:
        assert sequence.stage in (Stage.RUNNING, Stage.LOADING), "holders run or load"
        path = []
        node = sequence.node
        while node is not None and not node.is_adapter:
            path.append(node.pages[0])
            node = node.parent
        assert node is not None, "paths end in an adapter"
        assert node.adapter == sequence.adapter, "KV is never shared between adapters"
        assert sequence.pages[: sequence.num_shared] == path[::-1], "shared pages are the path's"
        assert sequence.num_computed < len(sequence.tokens), "the last token is always computed again"
