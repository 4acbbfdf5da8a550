"""Policies that free pages on demand alone: who waits for them, and for how many copies."""

import pytest

from manylora.protocol.commands import Admitted, SwapPages
from manylora.types import BASE
from tests.policy.rig import PAGE, Rig, prompt

ON_DEMAND = ["lru", "static-lru"]
KV_PAGES = 35
OLD_PAGES = 8


def full_of_history(policy: str, max_num_seqs: int = 8, num_decoding: int = 1) -> Rig:
    """One request of so many tokens, its step in flight; old1 to old4 as history, the oldest first; two pages are
    free."""
    num_pages = 40 if policy == "static-lru" else KV_PAGES
    rig = Rig(policy, num_pages, 100, max_num_seqs, adapter_share=0.125)
    for seed in (1, 2, 3, 4):
        rig.serve(f"old{seed}", BASE, prompt(seed, OLD_PAGES))
    rig.ask("long", BASE, [1] * num_decoding, max_tokens=4)
    rig.commands.clear()
    return rig


def saved_by(rig: Rig) -> int:
    """The step in flight ends: pages that are then on their way to the host."""
    rig.end_step()
    return sum(len(copy.pairs) for copy in rig.of(SwapPages))


def admitted_after_copies(rig: Rig) -> list[str]:
    """Every copy of now lands during the step in flight, then that ends."""
    rig.settle_copies()
    rig.end_step()
    return [command.request for command in rig.of(Admitted)]


@pytest.mark.parametrize("policy", ON_DEMAND)
def test_all_that_wait_are_admitted_after_one_copy(policy: str) -> None:
    rig = full_of_history(policy)
    for name, seed in (("a", 5), ("b", 6), ("c", 7)):
        rig.ask(name, BASE, prompt(seed, 4))
    assert saved_by(rig) == 3 * 5 - 2
    assert len(rig.of(SwapPages)) == 1
    assert admitted_after_copies(rig) == ["a", "b", "c"]
    rig.settle()
    for name in ("a", "b", "c", "long"):
        rig.check_answer(name)


@pytest.mark.parametrize("policy", ON_DEMAND)
def test_one_that_decodes_takes_nobodys_page(policy: str) -> None:
    rig = full_of_history(policy, num_decoding=PAGE - 1)
    for name, seed in (("a", 5), ("b", 6), ("c", 7)):
        rig.ask(name, BASE, prompt(seed, 4))
    assert saved_by(rig) == 3 * 5 + 1 - 2
    assert admitted_after_copies(rig) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", ON_DEMAND)
def test_no_more_is_freed_than_could_be_admitted(policy: str) -> None:
    rig = full_of_history(policy, max_num_seqs=3)
    for name, seed in (("a", 5), ("b", 6), ("c", 7)):
        rig.ask(name, BASE, prompt(seed, 4))
    assert saved_by(rig) == 2 * 5 - 2, "the third sequence is one too many"
    rig = full_of_history(policy)
    for name, seed in (("a", 5), ("b", 6), ("c", 7)):
        rig.ask(name, BASE, prompt(seed, 9))
    assert saved_by(rig) == 10 + 7 - 2, "of 64 tokens in a step, one is decoded, 37 and 26 are prompts"
    assert admitted_after_copies(rig) == ["a", "b"]


@pytest.mark.parametrize("policy", ON_DEMAND)
def test_room_for_some_is_made_where_there_is_none_for_all(policy: str) -> None:
    rig = full_of_history(policy)
    for seed in (1, 2, 3):
        rig.ask(f"again{seed}", BASE, prompt(seed, OLD_PAGES, extra=10))
    rig.ask("too much", BASE, prompt(8, 2))
    # The first alone takes one that the second turns out to want; then all three together, of old4's eight.
    assert saved_by(rig) == 1 + 3 * 3 - 2
    assert admitted_after_copies(rig) == ["again1", "again2", "again3"]


@pytest.mark.parametrize("policy", ON_DEMAND)
def test_what_one_that_waits_will_use_makes_no_room_for_another(policy: str) -> None:
    rig = full_of_history(policy)
    rig.ask("new", BASE, prompt(5, 4))
    rig.ask("returns", BASE, prompt(1, OLD_PAGES, extra=2))
    assert saved_by(rig) >= 5 + 1 - 2
    assert admitted_after_copies(rig) == ["new", "returns"]
    assert rig.swaps(to_device=True) == 0, "its history was the oldest, and is still there"


def test_an_adapter_is_counted_once_for_all_that_wait_for_it() -> None:
    rig = full_of_history("lru")
    rig.add(1, 3)
    for name, seed in (("a", 5), ("b", 6)):
        rig.ask(name, 1, prompt(seed, 1))
    assert saved_by(rig) == 3 + 2 + 2 - 2
