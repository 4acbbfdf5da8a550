"""FastLibra's nodes of turns: KV that leaves and comes back as a whole, and parts where prefixes do."""

from __future__ import annotations

import pytest

from manylora.policy.tree import Node, Residence
from manylora.policy.value import KvTurns
from manylora.protocol.commands import SwapPages
from manylora.types import BASE
from tests.policy.invariants import all_nodes
from tests.policy.reports import counters, gauges
from tests.policy.rig import PAGE, Rig, prompt

ALL = ["fastlibra", "fastlibra-wom", "fastlibra-wos", "fastlibra-wol"]


def chain(turns: KvTurns, above: Node, keys: str, begins: bool = True) -> list[Node]:
    """Pages below a node, one for each letter, as one sequence computes them."""
    nodes: list[Node] = []
    for key in keys:
        node = Node(above.adapter, above, key.encode(), 1)
        above.children[node.key] = node
        turns.add(node, begins and not nodes)
        nodes.append(node)
        above = node
    return nodes


def spelt(turns: KvTurns, node: Node) -> str:
    return "".join(each.key.decode() for each in turns.of(node))


def test_a_turn_is_what_one_sequence_computed_until_others_part_from_it() -> None:
    turns, root = KvTurns(kept=True), Node(1, None, b"", 8)
    assert list(turns.of(root)) == [root]
    assert turns.num_pages(root) == 8
    first = chain(turns, root, "abcd")
    second = chain(turns, first[-1], "ef")
    assert [spelt(turns, node) for node in (*first, *second)] == ["abcd"] * 4 + ["ef"] * 2
    chain(turns, first[1], "xy")
    assert [spelt(turns, node) for node in first] == ["ab", "ab", "cd", "cd"]
    more = chain(turns, second[-1], "gh", begins=False)
    assert spelt(turns, more[0]) == "efgh", "the same sequence goes on"
    assert [node.key for node in turns.part(second[0])] == [b"f", b"g", b"h"]
    assert turns.num_pages(second[0]) == 1
    turns.forget(more[-1])
    assert spelt(turns, second[1]) == "fg"


def test_without_turns_a_page_is_a_node() -> None:
    turns, root = KvTurns(kept=False), Node(1, None, b"", 8)
    assert [spelt(turns, node) for node in chain(turns, root, "ab")] == ["a", "b"]


def resident(rig: Rig) -> int:
    return sum(node.residence is Residence.RESIDENT for node in all_nodes(rig.replica._tree)) - 1


def written(rig: Rig) -> int:
    return sum(len(swap.pairs) for swap in rig.of(SwapPages) if not swap.to_device)


@pytest.mark.parametrize("variant", ["", "-wom", "-wos", "-wol"])
def test_a_turn_leaves_as_a_whole(variant: str) -> None:
    """One page would do; by pages one goes, by turns all of them."""
    for policy, expected in ((f"fastlibra{variant}", 6), (f"fastlibra-pages{variant}", 1)):
        rig = Rig(policy, num_pages=12, high_mark=1.0, low_mark=0.01)
        rig.serve("a", BASE, prompt(1, 6))
        rig.serve("b", BASE, prompt(2, 6, 1))
        assert written(rig) == expected
        assert rig.check_answers() == 2


@pytest.mark.parametrize("policy", ["fastlibra", "fastlibra-wom", "fastlibra-wos"])
def test_a_turn_comes_back_as_a_whole(policy: str) -> None:
    rig = Rig(policy, num_pages=20, num_host_pages=80, low_mark=0.75, high_mark=0.8)
    for seed in (1, 2, 3):
        rig.serve(f"r{seed}", BASE, prompt(seed, 5))
    rig.ask("x", BASE, prompt(9, 5), 1)
    while rig.device.steps:
        rig.end_step()
    rig.settle(rings=6)
    sizes = {len([node for node in rig.replica._residency.turns.of(top) if node.pages]) for top in tops(rig)}
    assert sizes <= {0, 5}, "none is there in part"
    assert rig.swaps(to_device=True) % 5 == 0


def tops(rig: Rig) -> list[Node]:
    turns = rig.replica._residency.turns
    return [node for node in all_nodes(rig.replica._tree) if node.parent and turns.of(node)[0] is node]


@pytest.mark.parametrize("policy", ALL)
def test_what_a_request_shares_stays_when_the_rest_leaves(policy: str) -> None:
    rig = Rig(policy, num_pages=14, high_mark=1.0, low_mark=0.01)
    shared = prompt(1, 3)
    rig.serve("a", BASE, [*shared, *prompt(2, 3)])
    rig.ask("b", BASE, [*shared, *prompt(3, 2)], 8 * PAGE - 2)  # takes the pool
    while rig.device.steps:
        rig.end_step()
    rig.settle()
    assert rig.check_answers() == 2
    tree = rig.replica._tree
    sizes = sorted(len(rig.replica._residency.turns.of(top)) for top in tops(rig))
    assert sizes[:2] == [3, 3], "the prefix, and what of the first request comes after it"
    assert written(rig) >= 3
    assert counters(rig.replica).kv_hit_tokens_device == 3 * PAGE
    assert len(list(all_nodes(tree))) > 7, "beside the base"


def test_a_turn_that_can_never_fit_comes_in_part() -> None:
    rig = Rig("fastlibra", num_pages=20, num_host_pages=80, low_mark=0.5, high_mark=0.5)
    rig.serve("long", BASE, prompt(1, 14))
    rig.ring()
    rig.settle_copies()
    assert resident(rig) == 0, "above the high mark: it left as a whole"
    rig.settle(rings=6)
    now = gauges(rig.replica)
    assert now.pages_total - now.pages_free == 10, "as much as there may be"
    rig.serve("again", BASE, prompt(1, 14))
    assert rig.check_answers() == 2


@pytest.mark.parametrize("policy", ALL)
def test_a_full_host_drops_turns_as_wholes(policy: str) -> None:
    rig = Rig(policy, num_pages=12, num_host_pages=12, high_mark=1.0, low_mark=0.01)
    for seed in range(6):
        rig.serve(f"r{seed}", BASE, prompt(seed, 5))
        lengths = [len(rig.replica._residency.turns.of(top)) for top in tops(rig)]
        assert set(lengths) == {5}
    assert counters(rig.replica).history_drops % 5 == 0
    assert counters(rig.replica).history_drops > 0
    assert rig.check_answers() == 6
