"""What a replica that merges does in situations that random histories hardly meet."""

from __future__ import annotations

from manylora.config.merging import MergeConfig, MergeTimes, StepTimes
from manylora.policy.merging.times import StepSeconds
from manylora.protocol.commands import AdapterFreed, Admitted, SetMerged
from manylora.protocol.events import AdapterRemoved, SwitchDone
from manylora.types import BASE
from tests.policy.rig import Rig, prompt

X, Y = 1, 2


def rig_of(num_pages: int, **settings: object) -> Rig:
    """``merged``, with adapters of one page."""
    merge = MergeConfig("merged", starve_s=2.0, times=MergeTimes(False, 0.01, 0.01))
    rig = Rig(num_pages=num_pages, num_host_pages=0, merge=merge, **settings)  # type: ignore[arg-type]
    rig.add(X, 1)
    rig.add(Y, 1)
    return rig


def run(rig: Rig, num_steps: int) -> None:
    """Whatever is on its way lands, and so many steps end."""
    for _ in range(num_steps):
        rig.settle_copies()
        if rig.device.switches:
            rig.end_switch()
        rig.now += 0.01
        rig.end_step()


def test_an_answer_to_no_switch_changes_nothing() -> None:
    plain, merging = Rig(), rig_of(20)
    assert plain.feed(SwitchDone(1, True, 0.1)) == []
    merging.feed(SwitchDone(1, True, 0.1))
    merging.ask("a", X, prompt(1, 1), 4)
    run(merging, 1)
    (switch,) = merging.of(SetMerged)
    merging.feed(SwitchDone(switch.switch + 1, False, 0.1, "of another"))
    merging.settle()
    merging.check_answer("a")
    assert merging.of(SetMerged) == [switch]


def test_of_those_that_need_pages_what_is_paused_gives_way_first() -> None:
    """An adapter that is older, and paused, before the newest of the merged one."""
    rig = rig_of(13)
    rig.ask("paused", Y, prompt(1, 2), 10)
    run(rig, 2)
    rig.ask("old", X, prompt(2, 1), 14)
    run(rig, 1)
    rig.now += 2.1  # the first in line has waited long enough to have its turn
    run(rig, 3)
    rig.ask("new", X, prompt(3, 1), 14)
    run(rig, 1)
    paused = {s.state.id for s in rig.replica._held.admitted if s.paused_s is not None}
    assert paused == {"paused"}
    while not rig.replica._residency.counters.preemptions:
        run(rig, 1)
    assert {s.state.id for s in rig.replica._held.admitted} == {"old", "new"}
    rig.settle()
    assert rig.check_answers() == 3


def test_pages_are_taken_from_a_paused_one_that_came_later() -> None:
    """The newest first: an older request of the merged adapter waits for pages that a paused one holds."""
    rig = rig_of(10, admission="lcfs")
    rig.ask("running", X, prompt(1, 1), 14)
    run(rig, 2)
    rig.ask("old", X, prompt(2, 5), 4)
    rig.ask("new", Y, prompt(3, 2), 8)
    assert len(rig.of(Admitted)) < 3
    rig.settle()
    assert rig.check_answers() == 3


def test_the_last_request_of_a_removed_adapter_is_refused_while_it_is_merged() -> None:
    """Nothing else happens then: the weights are restored and the adapter is freed all the same."""
    rig = rig_of(6, admission="early-abort", slo_ttft_s=3.0)
    rig.ask("running", X, prompt(1, 3), 4)
    run(rig, 3)
    assert rig.device.named == X
    rig.ask("late", X, prompt(2, 3), 4)
    rig.feed(AdapterRemoved(X))
    rig.now += 10.0
    run(rig, 1)
    assert rig.ends["late"].error.status == 503
    rig.settle()
    rig.check_answer("running")
    assert [switch.adapter for switch in rig.of(SetMerged)] == [X, BASE]
    assert len(rig.of(AdapterFreed)) == 1


def test_of_two_sizes_with_as_many_tokens_the_first_counts() -> None:
    """Four rows that decode, and a prompt of four tokens."""
    times = StepSeconds(MergeTimes(False, 0.0, 0.0, (StepTimes(4, 4, 3.0, 2.0), StepTimes(1, 4, 9.0, 8.0))))
    assert times.merged_s(4) == 8.0
