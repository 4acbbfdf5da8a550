"""What happens to nodes when room is short, policy by policy, one thing at a time."""

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.policy.tree import Node
from manylora.protocol.commands import AdapterFreed, Decided, ReadAdapter, Ready, SetTimer, SwapPages
from manylora.protocol.events import Abort, AdapterAdded, AdapterRemoved
from manylora.types import BASE
from tests.policy.invariants import all_nodes
from tests.policy.reports import counters, gauges
from tests.policy.rig import PAGE, Rig, prompt

WITH_HISTORY = [name for name in ALL_CACHE_POLICIES if name not in ("s-lora", "lru-drop")]
DEPENDENT = ["manylora", "fastlibra", "fastlibra-wos", "fastlibra-wol", "lru", "lru-ahead", "lru-drop"]


@pytest.mark.parametrize("policy", WITH_HISTORY)
def test_history_leaves_by_way_of_the_host_and_comes_back(policy: str) -> None:
    rig = Rig(policy, num_pages=16, low_mark=0.1)
    rig.serve("a", BASE, prompt(1, 6))
    for seed in (2, 3, 4):
        rig.serve(f"b{seed}", BASE, prompt(seed, 6))
    assert rig.swaps(to_device=False) >= 6, "what left was saved"
    before = rig.computed_tokens()
    rig.serve("again", BASE, prompt(1, 6))
    assert rig.computed_tokens() - before == 1, "only the last token is computed again"
    assert counters(rig.replica).kv_hit_tokens_host >= 5 * PAGE


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_without_a_host_pool_history_is_computed_again(policy: str) -> None:
    rig = Rig(policy, num_pages=16, num_host_pages=0)
    for name, seed in (("a", 1), ("b", 2), ("c", 3), ("again", 1)):
        rig.serve(name, BASE, prompt(seed, 7))
    assert not rig.of(SwapPages)
    assert counters(rig.replica).history_drops > 0


def test_a_host_copy_is_kept_so_that_leaving_again_costs_nothing() -> None:
    rig = Rig("lru", num_pages=10)
    for name, seed in (("a", 1), ("b", 2), ("a2", 1), ("b2", 2), ("a3", 1), ("b3", 2)):
        rig.serve(name, BASE, prompt(seed, 7))
    assert rig.swaps(to_device=False) <= 14, "no page is written twice"
    assert rig.swaps(to_device=True) > rig.swaps(to_device=False)


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_adapters_are_read_once_and_never_written_back(policy: str) -> None:
    rig = Rig(policy, num_pages=10, num_host_pages=30)
    for adapter in (1, 2, 3, 4):
        rig.add(adapter, 3)
    for turn in range(3):
        for adapter in (1, 2, 3, 4):
            rig.serve(f"r{turn}-{adapter}", adapter, prompt(adapter * 10 + turn, 1))
    assert len(rig.of(ReadAdapter)) == 4, "from the host afterwards"
    assert all(read.tier == "host" for read in rig.of(ReadAdapter))
    assert {swap.adapter for swap in rig.of(SwapPages) if swap.adapter is not None} == {1, 2, 3, 4}
    assert all(swap.to_device for swap in rig.of(SwapPages) if swap.adapter is not None)
    counted = counters(rig.replica)
    assert counted.adapter_misses == 4
    assert counted.adapter_hits_host + counted.adapter_hits_device == 8


def test_a_host_pool_too_small_for_an_adapter_is_passed_by() -> None:
    rig = Rig(num_pages=12, num_host_pages=2)
    rig.add(1, 3)
    rig.serve("a", 1, prompt(1, 1))
    assert [read.tier for read in rig.of(ReadAdapter)] == ["device"]


def test_a_source_that_is_gone_fails_its_requests_only() -> None:
    rig = Rig(num_pages=10, num_host_pages=4)
    for adapter in (1, 2):
        rig.add(adapter, 4)
    rig.serve("a", 1, prompt(1, 1))
    rig.serve("b", 2, prompt(2, 4))  # the host has room for one adapter only
    rig.serve("c", BASE, prompt(3, 8))
    rig.sources_gone.add(1)
    rig.ask("gone", 1, prompt(1, 1))
    rig.ask("fine", BASE, prompt(4, 2))
    rig.settle()
    end = rig.ends["gone"]
    assert (end.reason, end.error.status) == ("error", 503)
    assert "the folder is gone" in end.error.message
    rig.check_answer("fine")
    rig.sources_gone.clear()
    rig.serve("back", 1, prompt(1, 1))


def test_others_run_while_one_waits_for_its_copy() -> None:
    rig = Rig(num_pages=16)
    rig.add(1, 3)
    rig.ask("cold", 1, prompt(1, 1), 2)
    assert rig.device.reads
    rig.ask("warm", BASE, prompt(2, 1), 3)
    while rig.device.steps:
        rig.now += 0.5
        rig.end_step()
    rig.check_answer("warm")
    assert "cold" not in rig.tokens
    rig.now += 1.0
    rig.land_read()
    rig.now += 0.25
    rig.land_copy()
    rig.settle()
    rig.check_answer("cold")
    parts = {ready.request: (ready.adapter_s, ready.kv_s) for ready in rig.of(Ready)}
    assert parts["warm"] == (0.0, 0.0)
    assert parts["cold"] == (pytest.approx(3 * 0.5 + 1.0 + 0.25), 0.0)


def test_two_requests_share_one_swap_in() -> None:
    rig = Rig("lru", num_pages=16, max_num_seqs=8)
    rig.serve("a", BASE, prompt(1, 5))
    for seed in (2, 3, 4):
        rig.serve(f"b{seed}", BASE, prompt(seed, 5))
    before = rig.swaps(to_device=True)
    rig.ask("c", BASE, prompt(1, 5))
    rig.ask("d", BASE, prompt(1, 5, extra=2))
    rig.settle()
    rig.check_answer("c")
    rig.check_answer("d")
    assert rig.swaps(to_device=True) - before == 5


def test_a_failed_copy_in_is_computed_instead() -> None:
    rig = Rig("lru", num_pages=12)
    rig.serve("a", BASE, prompt(1, 5))
    rig.serve("b", BASE, prompt(2, 9))
    rig.ask("again", BASE, prompt(1, 5), 3)
    while rig.device.copies and not any(copy.to_device for copy, _ in rig.device.copies.values()):
        rig.land_copy()
    rig.land_copy(ok=False)
    rig.settle()
    rig.check_answer("again")
    assert counters(rig.replica).swaps_failed == 1


def test_copies_of_an_adapter_that_keep_failing_end_in_503() -> None:
    rig = Rig(num_pages=12)
    rig.add(1, 3)
    rig.ask("a", 1, prompt(1, 1))
    for _ in range(10):
        if "a" in rig.ends:
            break
        rig.land_read()
        rig.land_copy(ok=False)
    assert rig.ends["a"].error.status == 503
    rig.serve("later", 1, prompt(1, 1))


def test_a_failed_save_loses_history_and_nothing_else() -> None:
    rig = Rig("lru", num_pages=10)
    rig.serve("a", BASE, prompt(1, 5))
    rig.ask("b", BASE, prompt(2, 8))
    assert any(not copy.to_device for copy, _ in rig.device.copies.values())
    rig.land_copy(ok=False)
    rig.settle()
    rig.check_answer("b")
    rig.serve("again", BASE, prompt(1, 5))


def test_what_is_about_to_leave_can_be_kept() -> None:
    rig = Rig("lru", num_pages=12, max_num_seqs=8)
    rig.serve("a", BASE, prompt(1, 6))
    rig.ask("b", BASE, prompt(2, 7))  # three of a's pages are being saved
    assert rig.device.copies
    rig.feed(Abort("b"))
    before = rig.swaps(to_device=True)
    rig.ask("again", BASE, prompt(1, 6))
    rig.settle()
    rig.check_answer("again")
    assert rig.swaps(to_device=True) == before, "its pages never left"


def test_preemption_swaps_out_rather_than_computing_again() -> None:
    rig = Rig(num_pages=14, max_num_seqs=2)
    rig.ask("old", BASE, prompt(1, 4), 24)
    rig.ask("new", BASE, prompt(2, 4), 24)
    rig.settle()
    rig.check_answer("old")
    rig.check_answer("new")
    assert counters(rig.replica).preemptions >= 1
    needed = 2 * (4 * PAGE + 1 + 23)
    again = rig.computed_tokens() - needed
    assert again <= 2 * PAGE * counters(rig.replica).preemptions, (
        "at most the partial page and the last token"
    )


def test_history_that_is_cheaper_to_compute_than_to_copy_is_not_saved() -> None:
    rig = Rig(num_pages=16, copy_page_s=1.0)
    for turn, seed in enumerate((1, 2, 3, 1)):
        rig.serve(f"first {turn}", BASE, prompt(seed, 7))
    assert rig.swaps(to_device=True), "at first nobody knows, then a copy shows how slow they are here"
    rig.commands.clear()
    for seed in (1, 2, 3):
        rig.serve(f"then {seed}", BASE, prompt(seed, 7))
    assert not rig.of(SwapPages)
    assert counters(rig.replica).history_drops > 0


def test_one_slow_copy_does_not_end_saving_for_ever() -> None:
    rig = Rig(num_pages=16, copy_page_s=0.0005)  # a page computes in 0.2 ms, it believes
    for turn in range(600):
        rig.serve(f"r{turn}", BASE, prompt(turn % 3, 7))
        if rig.swaps(to_device=True):
            rig.copy_page_s = 1e-5
    assert len([swap for swap in rig.of(SwapPages) if swap.to_device]) > 100


def test_a_slow_lane_does_not_keep_adapters_on_the_host() -> None:
    rig = Rig(num_pages=10, copy_page_s=1.0)
    for adapter in (1, 2, 1, 2):
        if adapter not in {read.adapter for read in rig.of(ReadAdapter)}:
            rig.add(adapter, 4)
        rig.serve(f"r{len(rig.commands)}", adapter, prompt(adapter, 4))
    assert counters(rig.replica).adapter_reads == 2, "an adapter cannot be computed"


def test_unloading_during_a_copy_frees_everything() -> None:
    rig = Rig("lru", num_pages=12)
    rig.add(1, 3)
    rig.serve("a", 1, prompt(1, 3))
    rig.ask("b", BASE, prompt(2, 9))
    assert rig.device.copies, "history of adapter 1 is being saved"
    rig.feed(AdapterRemoved(1))
    assert not rig.of(AdapterFreed)
    rig.settle()
    assert [freed.adapter for freed in rig.of(AdapterFreed)] == [1]
    rig.check_answer("b")
    snapshot = gauges(rig.replica)
    assert snapshot.host_pages_adapters == 0
    assert [use.adapter for use in snapshot.adapters] == [BASE]


# ---------------------------------------------------------------- the swapper


@pytest.mark.parametrize("policy", ["manylora", "fastlibra", "fastlibra-wos"])
def test_above_the_high_mark_nodes_leave_until_it_is_met(policy: str) -> None:
    rig = Rig(policy, num_pages=40, num_host_pages=80, low_mark=0.5, high_mark=0.75)
    for seed in range(1, 6):
        rig.serve(f"r{seed}", BASE, prompt(seed, 7))
    if policy != "manylora":  # which looks after every step
        assert gauges(rig.replica).pages_free < 10
    rig.ask("x", BASE, prompt(9, 1), 2)
    rig.settle(rings=1)
    rig.settle()
    free = gauges(rig.replica).pages_free
    assert 10 <= free <= 12, "down to the mark, and no further"


def test_room_is_kept_for_twice_what_a_step_took_lately() -> None:
    """Of 200 pages: a tenth at first, a fiftieth while little is asked for, more when more is."""
    rig = Rig(num_pages=200, num_host_pages=400)

    def free_after(first_seed: int, num_prompts: int, pages_each: int) -> int:
        for seed in range(first_seed, first_seed + num_prompts):
            rig.serve(f"r{seed}", BASE, prompt(seed, pages_each))
        rig.settle()
        snapshot = gauges(rig.replica)
        return snapshot.pages_total - rig.replica._residency.pages_used

    slack = 200 // 64
    assert 20 <= free_after(1, 30, 7) <= 20 + slack
    rig.now += 600.0
    assert 4 <= free_after(100, 120, 1) <= 4 + slack
    assert 14 <= free_after(300, 1, 6) <= 14 + slack, "the last token's page was the seventh"
    assert 14 <= free_after(400, 20, 1) <= 14 + slack, "and is not forgotten at once"
    rig.now += 600.0
    assert 4 <= free_after(500, 20, 1) <= 4 + slack


@pytest.mark.parametrize("policy", ["manylora", "fastlibra"])
def test_below_the_low_mark_nodes_come_back_until_it_is_met(policy: str) -> None:
    rig = Rig(policy, num_pages=40, num_host_pages=80, max_num_seqs=8)
    for adapter in range(1, 9):
        rig.add(adapter, 4)
        rig.serve(f"r{adapter}", adapter, prompt(adapter, 3))
    rig.serve("large", BASE, prompt(20, 36))
    for adapter in (7, 8):  # frees what they hold on the device; the others' nodes wait on the host
        rig.feed(AdapterRemoved(adapter))
    rig.feed(AdapterRemoved(1))
    rig.settle(rings=50)
    snapshot = gauges(rig.replica)
    used = snapshot.pages_total - snapshot.pages_free
    assert used <= 38, "never past the high mark"


def sent_away() -> tuple[Rig, list[Node]]:
    """Nodes that the swapper has just sent to the host, with room on the device since."""
    rig = Rig("fastlibra", num_pages=20, num_host_pages=80, low_mark=0.8, high_mark=0.8)
    for seed in (1, 2, 3):
        rig.serve(f"r{seed}", BASE, prompt(seed, 5))
    rig.ask("x", BASE, prompt(9, 4), 50)
    rig.settle_copies()
    rig.ring()  # above the mark: some leave
    rig.settle_copies()
    swapper = rig.replica._swapper
    sent = [node for node in all_nodes(rig.replica._tree) if node.evicted_in == swapper.interval]
    assert sent
    rig.feed(Abort("x"))
    rig.end_step()
    rig.settle_copies()
    assert rig.replica._residency.pages_used < 16, "below the low mark: nodes could come in"
    assert all(not node.pages for node in sent), "not in the interval after"
    return rig, sent


def test_what_the_swapper_sent_away_is_not_brought_back_at_once() -> None:
    rig, sent = sent_away()
    rig.settle(rings=3)
    assert any(node.pages for node in sent), "later, while room is left"


def test_what_was_held_back_and_has_come_with_a_request_is_no_candidate_any_more() -> None:
    rig, sent = sent_away()
    assert rig.replica._swapper._held_back
    for seed in (1, 2, 3):
        rig.serve(f"again{seed}", BASE, prompt(seed, 5))
    assert any(node.pages for node in sent), "a request brings it back at once"
    rig.ring()
    assert not rig.replica._swapper._held_back


def test_the_timer_rests_when_there_is_nothing_to_watch() -> None:
    rig = Rig()
    rig.serve("a", BASE, prompt(1, 2), 3)
    assert len(rig.of(SetTimer)) == 1
    rig.ring()
    assert rig.timer is None
    assert len(rig.of(SetTimer)) == 1


def test_prefetch_brings_what_the_queue_waits_for() -> None:
    rig = Rig("s-lora", num_pages=30, max_num_seqs=1)
    rig.add(1, 3)
    rig.ask("running", BASE, prompt(1, 1), 20)
    rig.ask("queued", 1, prompt(2, 1))
    assert [read.adapter for read in rig.of(ReadAdapter)] == [1], "read before it is its turn"
    rig.land_read()
    rig.land_copy()
    assert counters(rig.replica).prefetches == 1
    rig.settle()
    rig.check_answer("queued")
    parts = {ready.request: ready.adapter_s for ready in rig.of(Ready)}
    assert parts["queued"] == 0.0


@pytest.mark.parametrize("policy", ["fastlibra", "lru", "static-lru"])
def test_policies_without_prefetch_do_not_read_ahead(policy: str) -> None:
    rig = Rig(policy, num_pages=30, max_num_seqs=1)
    rig.add(1, 3)
    rig.ask("running", BASE, prompt(1, 1), 4)
    rig.ask("queued", 1, prompt(2, 1))
    assert not rig.of(ReadAdapter)


def test_a_snapshot_of_changes_looks_at_nothing_else() -> None:
    """Whatever the number of adapters: of ten thousand only those that something has happened to."""
    rig = Rig("manylora", num_pages=60, max_num_seqs=2)
    for adapter in range(1, 10_001):
        rig.replica.handle(AdapterAdded(adapter, 3), 0.0)
    assert [use.adapter for use in gauges(rig.replica, "changed").adapters] == [BASE]
    rig.serve("idle again", 7, prompt(7, 3))
    rig.ask("running", 8, prompt(8, 1), 4)
    rig.settle_copies()
    looked_at: list[int] = []
    node, adapters = rig.replica._tree.node, rig.replica._tree.adapters
    rig.replica._tree.node = lambda adapter: looked_at.append(adapter) or node(adapter)  # type: ignore[method-assign, func-returns-value]
    rig.replica._tree.adapters = lambda: pytest.fail("all were looked at")  # type: ignore[method-assign]
    snapshot = gauges(rig.replica, "changed")
    assert [use.adapter for use in snapshot.adapters] == looked_at == [BASE, 7, 8]
    assert [(use.state, use.running) for use in snapshot.adapters[1:]] == [("resident", 0), ("resident", 1)]
    rig.replica._tree.node, rig.replica._tree.adapters = node, adapters  # type: ignore[method-assign]
    rig.settle()
    assert [use.adapter for use in gauges(rig.replica, "changed").adapters] == [BASE, 8]
    assert [use.adapter for use in gauges(rig.replica, "changed").adapters] == [BASE]


# ---------------------------------------------------------------- what distinguishes the baselines


def test_s_lora_keeps_nothing_that_is_not_in_use() -> None:
    rig = Rig("s-lora", num_pages=30)
    rig.add(1, 3)
    rig.serve("a", 1, prompt(1, 3))
    snapshot = gauges(rig.replica)
    assert (snapshot.pages_history, snapshot.pages_adapters, snapshot.pages_free) == (0, 0, 30)
    assert snapshot.host_pages_adapters == 3
    assert snapshot.host_pages_history == 0
    rig.serve("b", 1, prompt(1, 3))
    assert counters(rig.replica).prefix_hits_tokens == 0


def test_static_lru_keeps_adapters_and_kv_in_parts() -> None:
    rig = Rig("static-lru", num_pages=20, num_host_pages=80)  # 8 pages for adapters
    for adapter in (1, 2, 3):
        rig.add(adapter, 4)
        rig.serve(f"r{adapter}", adapter, prompt(adapter, 2))
    snapshot = gauges(rig.replica)
    assert snapshot.pages_adapters == 8, "two of three, though pages are free"
    assert snapshot.pages_free >= 6
    assert snapshot.invalid_pages == 2, "the first one's history stays behind"
    rig.ask("x", BASE, [1], 3)
    rig.settle(rings=1)
    assert counters(rig.replica).invalid_share_sum > 0
    rig.ask("too long", BASE, prompt(1, 12))
    assert rig.ends["too long"].error.status == 400, "KV has 12 pages"


@pytest.mark.parametrize("policy", DEPENDENT)
def test_dependent_policies_hold_no_invalid_history(policy: str) -> None:
    rig = Rig(policy, num_pages=20, num_host_pages=80)
    for turn in range(3):
        for adapter in (1, 2, 3, 4):
            if turn == 0:
                rig.add(adapter, 4)
            rig.serve(f"r{turn}-{adapter}", adapter, prompt(adapter, 2 + turn), 3)
            assert gauges(rig.replica).invalid_pages == 0


def test_decisions_are_told_when_asked_for() -> None:
    rig = Rig("fastlibra", num_pages=10, trace=True)
    rig.add(1, 3)
    rig.serve("a", 1, prompt(1, 3))
    rig.serve("b", BASE, prompt(2, 8))
    rig.serve("c", 1, prompt(1, 3))
    actions = {decided.action for decided in rig.of(Decided)}
    assert {"read", "load", "save", "evict"} <= actions
    assert all(d.value is not None for d in rig.of(Decided) if d.action == "save")
    assert not Rig("fastlibra").of(Decided)
