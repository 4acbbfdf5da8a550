"""The merge policies by hand: thresholds and their tuning, credits, regret, turns, and what steps last."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from manylora_lab.baselines.merged import AlwaysMerged
from manylora_lab.pricing.costs import DeviceCosts
from manylora_lab.sim.clairvoyant import Clairvoyant
from manylora_lab.sim.replay import Replay
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.merging import MergeConfig, MergeTimes, StepTimes
from manylora.config.policy import PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.policy.merging import regret as regret_module
from manylora.policy.merging.choice import Choice, MergeView, StepShape
from manylora.policy.merging.dlora import MICROSECONDS, MOST_ALPHA, Credits, DloraMerging, Thresholds
from manylora.policy.merging.regret import ALLOWANCE, SHARE, RegretMerging
from manylora.policy.merging.times import StepSeconds
from manylora.policy.queue import WaitingQueue
from manylora.policy.sequences import RUNNING, Scheduled, Sequence
from manylora.types import BASE, AdapterId
from tests.policy.test_queue import sequence_of

X, Y, Z = 1, 2, 3
DLORA_TIMES = MergeTimes(False, 0.020, 0.020, (StepTimes(1, 1, 0.027, 0.015),))
"""The authors' constants."""


class Stage:
    """Sequences admitted and waiting, without a replica; they come in the order in which they are named."""

    def __init__(self, max_num_seqs: int = 4) -> None:
        self.waiting = WaitingQueue(QueueConfig())
        self.admitted: list[Sequence] = []
        self.max_num_seqs = max_num_seqs
        self.num_come = 0

    def come(self, *adapters: AdapterId, arrived_s: float = 0.0) -> list[Sequence]:
        come = []
        for adapter in adapters:
            self.num_come += 1
            come.append(sequence_of(self.num_come, adapter, arrived_s=arrived_s))
            self.waiting.arrive(come[-1])
        return come

    def admit(self, *adapters: AdapterId) -> list[Sequence]:
        admitted = self.come(*adapters)
        for sequence in admitted:
            self.waiting.admit(sequence, 0)
            sequence.stage = RUNNING
        self.admitted += admitted
        return admitted

    def view(self, merged: AdapterId = BASE, now: float = 0.0, can_switch: bool = True) -> MergeView:
        return MergeView(now, merged, can_switch, True, self.admitted, self.waiting, self.max_num_seqs)


def rows_of(sequences: SequenceOf[Sequence]) -> list[Scheduled]:
    return [(sequence, 1, 1) for sequence in sequences]


def decode(merged: AdapterId, *adapters: AdapterId) -> StepShape:
    return StepShape(merged, collections.Counter(adapters), collections.Counter(adapters))


def with_merge(mode: str, max_num_seqs: int = 4, **merge: Any) -> PolicyConfig:
    return PolicyConfig(100, 4, 100, max_num_seqs, 64, merge=MergeConfig(mode, **merge))


def dlora(max_num_seqs: int = 4, times: MergeTimes = DLORA_TIMES, **merge: Any) -> DloraMerging:
    return DloraMerging(with_merge("dlora", max_num_seqs, times=times, **merge), StepSeconds(times))


# ---------------------------------------------------------------- dLoRA, Algorithm 1


@pytest.mark.parametrize(("num_waiting", "merged"), [(0, BASE), (1, X)])
def test_dlora_merges_above_alpha(num_waiting: int, merged: AdapterId) -> None:
    """Four in a batch: 4 of 4 is not above 1, and 5 of 4 is, as requests that wait count."""
    stage = Stage()
    stage.admit(X, X, X, X)
    stage.come(*[X] * num_waiting)
    choice = dlora().choose(stage.view())
    assert (choice.adapter, choice.only) == (merged, X if merged else None)


@pytest.mark.parametrize(("adapters", "merged"), [((X, X, X, Y), X), ((X, X, Y, Y), BASE)])
def test_dlora_unmerges_below_beta(adapters: tuple[int, ...], merged: AdapterId) -> None:
    """3 of 4 is not below 0.556, and 2 of 4 is."""
    stage = Stage()
    stage.admit(*adapters)
    assert dlora().choose(stage.view(X)).adapter == merged


def test_dlora_goes_from_one_adapter_to_another() -> None:
    """Where the merged one has too few and another has enough, though none is unmerged in between."""
    stage = Stage()
    stage.admit(X, Y, Y, Y)
    stage.come(Y, Y)
    choice = dlora().choose(stage.view(X))
    assert (choice.adapter, choice.reason) == (Y, "5 of 4 requests > 1.00")
    assert dlora().choose(stage.view(X, can_switch=False)).adapter == X, (
        "not while another switch is under way"
    )


def test_dlora_admits_one_of_the_adapter_that_it_wants_to_merge() -> None:
    """What has nothing to run cannot be merged; its first one gets in before others."""
    stage = Stage(2)
    others = stage.admit(Y, Z)
    wanted = stage.come(X, X, X)
    choice = dlora(2).choose(stage.view())
    assert (choice.adapter, choice.only) == (BASE, None)
    assert choice.batch == (wanted[0], others[0])


def test_dlora_serves_first_who_came_first_while_nothing_is_merged() -> None:
    stage = Stage(3)
    first = stage.come(Y)
    admitted = stage.admit(X, Z, X)
    choice = dlora(3).choose(stage.view())
    assert choice == Choice(BASE, batch=(*first, *admitted[:2]))


def test_dlora_merges_nothing_that_cannot_pay() -> None:
    stage = Stage()
    stage.admit(X, X, X, Y)
    stage.come(X, X)
    policy = dlora(starve_s=1.0)
    assert policy.choose(stage.view()).adapter == X
    policy.credits.transfer([X], [Y], policy.credits.start - 1)
    assert policy.credits.of(X) == 1
    assert policy.choose(stage.view()).adapter == BASE, "to hold Y back for a step costs 27 ms of one request"


# ---------------------------------------------------------------- dLoRA, Algorithm 2


def tuned(is_merged: bool, merge: tuple[int, float], fcfs: tuple[int, float], **merging: Any) -> Thresholds:
    """After a period of two steps, which another's ends."""
    thresholds = Thresholds(MergeConfig("dlora", **merging))
    for adapter in (X, X, Y):
        thresholds.step(is_merged, adapter, merge, fcfs, 0.020)
    return thresholds


def test_an_unmerged_period_tunes_alpha() -> None:
    # Merged: 8 requests in 0.030 + 0.020 s, 160 a second; unmerged 8 in 0.054 s, 148.
    assert tuned(False, (4, 0.015), (4, 0.027)).alpha == pytest.approx(0.95)
    # 6 in 0.050 s: 120.
    assert tuned(False, (3, 0.015), (4, 0.027)).alpha == pytest.approx(1.1)


def test_a_merged_period_tunes_beta() -> None:
    # Unmerged: 8 requests in 0.054 + 0.020 s, 108 a second; merged 2 in 0.030 s, 67.
    assert tuned(True, (1, 0.015), (4, 0.027)).beta == pytest.approx(0.606)
    # 8 in 0.030 s: 267.
    assert tuned(True, (4, 0.015), (4, 0.027)).beta == pytest.approx(0.556 / 1.1)


def test_a_period_ends_after_a_number_of_steps_too() -> None:
    thresholds = Thresholds(MergeConfig("dlora", window=3))
    for _ in range(7):
        thresholds.step(False, X, (4, 0.015), (4, 0.027), 0.0)
    assert thresholds.alpha == pytest.approx(0.9), "two periods have ended"


def test_thresholds_stay_apart_and_within_bounds() -> None:
    low = Thresholds(MergeConfig("dlora", window=1))
    high = Thresholds(MergeConfig("dlora", window=1))
    for _ in range(100):
        low.step(False, X, (4, 0.001), (4, 0.027), 0.0)
        high.step(False, X, (1, 0.1), (4, 0.001), 0.0)
    assert low.alpha == pytest.approx(0.606), "a step above beta"
    assert high.alpha == MOST_ALPHA


def test_what_was_set_beyond_the_bounds_is_not_clipped() -> None:
    kept = Thresholds(MergeConfig("dlora", alpha=9.0, beta=0.01, window=1))
    for is_merged in (False, True):
        for _ in range(5):
            kept.step(is_merged, X, (4, 0.1) if not is_merged else (4, 0.001), (4, 0.01), 0.0)
            kept.step(not is_merged, X, (4, 0.01), (4, 0.01), 0.0)
    assert (kept.alpha, kept.beta) == (9.0, 0.01)


# ---------------------------------------------------------------- dLoRA, Algorithm 3


def test_credits_go_from_one_to_another() -> None:
    credits = Credits(1.0, 4)
    start = 8 * MICROSECONDS
    credits.transfer([X, Y], [Z, BASE, Z], 1000)
    assert credits.changed == {X: start - 2000, Z: start + 2000, Y: start - 1000, BASE: start + 1000}
    credits.transfer([X], [X], 1000)
    credits.transfer([], [X], 1000)
    assert sum(credits.changed.values()) == 4 * start
    credits.forget(X)
    assert sum(credits.changed.values()) + credits.left_over == 3 * start


def test_a_batch_that_is_held_back_starves_after_that_many_seconds() -> None:
    """Four requests of Y for two seconds, 74.07 steps of 27 ms; then it goes first until half is paid back."""
    stage = Stage()
    held = stage.admit(Y, Y, Y, Y)
    policy = dlora(starve_s=2.0)
    steps = 0
    running = [sequence_of(99, X)]
    while Y not in policy.credits.starving():
        policy._fcfs = held
        policy.started(decode(X, X), rows_of(running), 0.0)
        steps += 1
    assert steps == 75
    gained = 75 * 4 * 27_000
    assert policy.credits.of(Y) == policy.credits.start + gained
    assert policy.credits.of(X) == policy.credits.start - gained
    half = policy.credits.margin // 2
    policy.credits.transfer([Y], [X], gained - half)
    assert Y in policy.credits.starving(), "a half is left"
    policy.credits.transfer([Y], [X], 1)
    assert Y not in policy.credits.starving()


def test_one_request_that_is_held_back_too_long_goes_first_for_as_long() -> None:
    stage = Stage()
    (held,) = stage.admit(Y)
    own = stage.admit(X, X, X)
    stage.come(X, X, X)
    policy = dlora(starve_s=1.0)
    merges: list[bool] = []
    for step in range(110):
        now = 0.027 * step
        merged = X if not merges or merges[-1] else BASE
        choice = policy.choose(stage.view(merged, now))
        policy.started(decode(choice.adapter, X), rows_of(own if choice.only else [held, *own]), now)
        merges.append(choice.adapter == X)
    first = merges.index(False)
    assert first == 38, "the first step that begins a second after the first"
    assert not any(merges[first : first + 37]), "unmerged for a second"
    assert merges[first + 39], "then merged again"


# ---------------------------------------------------------------- regret


TWO_MS = MergeTimes(False, 0.005, 0.005, (StepTimes(1, 1, 0.012, 0.010, 0.011),))
"""An adapter adds 2 ms to a step, another than the merged one 1 ms; a switch there and back takes 10 ms."""


def regret(**merge: Any) -> RegretMerging:
    return RegretMerging(with_merge("manylora", times=TWO_MS, **merge), StepSeconds(TWO_MS))


def steps_until_merged(policy: RegretMerging, stage: Stage, merged: AdapterId, shape: StepShape) -> int:
    """Steps that run before the policy chooses otherwise; 100 where it does not."""
    for number in range(100):
        if policy.choose(stage.view(merged, number * 0.01)).adapter != merged:
            return number
        policy.started(shape, [], number * 0.01)
        policy.step_ended(0.012)
    return 100


def test_regret_pays_for_half_of_the_switch_there_and_back() -> None:
    stage, policy = Stage(), regret()
    stage.admit(X, X)
    assert steps_until_merged(policy, stage, BASE, decode(BASE, X, X)) == 3
    choice = policy.choose(stage.view())
    assert (choice.adapter, choice.only, choice.reason) == (X, None, "regret 6 ms >= 5 ms")


def test_no_regret_where_others_would_have_waited() -> None:
    stage, policy = Stage(), regret()
    stage.admit(X, X, Y)
    assert steps_until_merged(policy, stage, BASE, decode(BASE, X, X, Y)) == 100
    assert policy.regrets == {}
    policy.started(decode(BASE, X), [], 0.0)
    assert policy.regrets == {X: pytest.approx(0.002)}
    policy.started(decode(BASE, Z), [], 0.0)
    assert policy.regrets == {Z: pytest.approx(0.002)}, "it is another's now"
    policy.started(decode(BASE, BASE), [], 0.0)
    assert policy.regrets == {}


def test_others_end_it_at_once() -> None:
    stage, policy = Stage(), regret()
    stage.admit(X)
    assert policy.choose(stage.view(X)).adapter == X
    stage.admit(BASE)
    choice = policy.choose(stage.view(X))
    assert (choice.adapter, choice.reason) == (BASE, "others can run")


def test_others_wait_for_so_long() -> None:
    stage, policy = Stage(), regret(minority="wait", starve_s=2.0)
    stage.admit(X)
    (other,) = stage.come(Y, arrived_s=10.0)
    assert policy.choose(stage.view(X, 11.9)).line == (X,)
    assert policy.choose(stage.view(X, 12.1)).reason == "others have waited 2.10 s"
    stage.waiting.admit(other, 0)
    other.stage = RUNNING
    stage.admitted.append(other)
    other.paused_s = 20.0
    assert policy.choose(stage.view(X, 21.9)).adapter == X
    assert policy.choose(stage.view(X, 22.0)).adapter == BASE
    stage.admitted.remove(stage.admitted[0])
    assert policy.choose(stage.view(X, 20.5)).reason == "only others are left"


def test_switches_that_were_a_loss_make_others_dearer() -> None:
    stage, policy = Stage(), regret()
    stage.admit(X)
    assert steps_until_merged(policy, stage, BASE, decode(BASE, X)) == 3
    policy.switched(BASE, X, 0.005)
    policy.started(decode(X, X), [], 0.0)
    policy.switched(X, BASE, 0.005)
    assert policy.saved_s == pytest.approx(-0.008)
    assert steps_until_merged(policy, stage, BASE, decode(BASE, X)) == 5, "10 ms: twice 5"
    policy.saved_s = -(SHARE * 10.0 + ALLOWANCE * 0.010)
    policy.busy_s = 10.0 - 0.1
    policy.regrets.clear()
    steps = steps_until_merged(policy, stage, BASE, decode(BASE, X))
    assert steps == 9, "a tenth of a second more has passed"
    policy.saved_s = -1.0
    assert steps_until_merged(policy, stage, BASE, decode(BASE, X)) == 100


BATCHES = [(X, X, X, X), (Y, Y, Y, Y), (X, Y, X, X)]
PASS_S, BASE_STEP_S = 0.006, 0.005


class Course:
    """The policy beside batches of BATCHES, one step after another. A step of the base takes 5 ms, a switch 6 ms;
    first tokens do not count. ``clairvoyant`` is told of every step."""

    def __init__(self, adds_s: float) -> None:
        sizes = (StepTimes(1, 1, BASE_STEP_S + adds_s, BASE_STEP_S),)
        config = with_merge("manylora", times=MergeTimes(False, PASS_S, PASS_S, sizes))
        merge = config.merge
        self.times = StepSeconds(merge.times)
        self.policy = RegretMerging(config, self.times)
        self.policy.first_tokens_s = float("inf")
        self.clairvoyant = Clairvoyant(merge)
        self.merged: AdapterId = BASE
        self.unmerged_s = 0.0
        self.shapes: list[StepShape] = []
        self._stages = [Stage() for _ in BATCHES]
        for stage, adapters in zip(self._stages, BATCHES):
            stage.admit(*adapters)

    def step(self, kind: int) -> None:
        before, self.merged = self.merged, self.policy.choose(self._stages[kind].view(self.merged)).adapter
        if self.merged != before:
            self.policy.switched(before, self.merged, self.times.switch_s(before, self.merged))
        shape = decode(self.merged, *BATCHES[kind])
        self.shapes.append(shape)
        self.clairvoyant.ran(shape)
        self.unmerged_s += BASE_STEP_S + self.policy._cost_s(shape, BASE)
        self.policy.started(shape, [], 0.0)
        self.policy.step_ended(BASE_STEP_S + self.policy._cost_s(shape, self.merged))

    @property
    def over_unmerged_s(self) -> float:
        found = self.clairvoyant.hindsight()
        return found.taken_s + BASE_STEP_S * found.num_steps - self.unmerged_s


def phases(seed: int) -> list[int]:
    rng = random.Random(seed)
    kinds: list[int] = []
    for _ in range(rng.randint(5, 40)):
        length = int(rng.expovariate(1 / rng.choice([3, 20, 50, 100, 300]))) + 1
        kinds += [rng.randrange(3)] * length
    return kinds


@pytest.mark.parametrize("adds_s", [0.0003, 0.001, 0.003])
@pytest.mark.parametrize("seeds", [range(100, 103), pytest.param(range(103, 130), marks=pytest.mark.long)])
def test_its_loss_is_bounded_by_a_clairvoyants_and_by_unmerged(adds_s: float, seeds: range) -> None:
    """Phases of X, of Y and of both. Three times the clairvoyant's loss and two switches; of the time of unmerged
    1 % and a switch there and back."""
    for seed in seeds:
        course = Course(adds_s)
        for kind in phases(seed):
            course.step(kind)
        assert course.clairvoyant.hindsight().beyond_s <= 1e-9
        assert course.over_unmerged_s <= 0.01 * course.unmerged_s + 2 * PASS_S


def test_the_clairvoyant_is_the_best_of_all_switchers() -> None:
    """Against every sequence of weights, on courses that are short enough to try them."""
    for seed in range(20):
        rng = random.Random(seed)
        course = Course(rng.choice([0.001, 0.004, 0.02]))
        course.step(2)  # both ask, so that either may be merged from here on
        for _ in range(6):
            course.step(rng.randrange(3))

        def cost_s(shape: StepShape, merged: AdapterId, course: Course = course) -> float:
            is_fine = merged == BASE or shape.rows.keys() == {merged}
            return course.policy._cost_s(shape, merged) if is_fine else float("inf")

        least_s = min(
            sum(
                course.times.switch_s(before, state) + cost_s(shape, state)
                for before, state, shape in zip((BASE, *states), states, course.shapes)
            )
            for states in itertools.product((BASE, X, Y), repeat=len(course.shapes))
        )
        assert course.clairvoyant.hindsight().clairvoyant_s == pytest.approx(least_s)


@pytest.mark.parametrize("has_purse", [True, False])
def test_no_policy_keeps_both_bounds_on_every_stream(
    has_purse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others come right after each switch. Where an adapter adds some percent to a step, a policy within three
    times the clairvoyant's loss loses more than 1 % against unmerged, and the reverse."""
    if not has_purse:
        monkeypatch.setattr(regret_module, "SHARE", float("inf"))
    course = Course(0.0003)
    for _ in range(10_000):
        course.step(2 if course.merged != BASE else 0)
    found = course.clairvoyant.hindsight()
    is_near_unmerged = course.over_unmerged_s <= 0.01 * course.unmerged_s
    assert is_near_unmerged == has_purse
    assert (found.beyond_s <= 0) == (not has_purse)


# ---------------------------------------------------------------- turns


def test_turns_go_by_the_oldest_then_to_who_has_waited() -> None:
    stage, policy = Stage(), AlwaysMerged(with_merge("merged", starve_s=2.0), None)
    stage.admit(X, X)
    (waits,) = stage.come(Y)
    assert policy.choose(stage.view(BASE, 1.0)) == Choice(X, X, (X,), reason="its turn")
    assert policy.choose(stage.view(X, 2.9)).line == (X,)
    # Y has waited for two seconds; X goes on until Y can run, and gives it a slot.
    assert policy.choose(stage.view(X, 3.0)) == Choice(X, X, (Y,), (waits,))
    stage.waiting.admit(waits, 0)
    waits.stage = RUNNING
    stage.admitted.append(waits)
    assert policy.choose(stage.view(X, 3.125)).adapter == Y
    for sequence in stage.admitted[:2]:
        sequence.paused_s = 3.125
    stage.come(Z)
    assert policy.choose(stage.view(Y, 3.25)) == Choice(Y, Y, (Y,), reason="its turn")
    # What is paused comes before what waits.
    assert policy.choose(stage.view(Y, 5.125)) == Choice(X, X, (X,), reason="its turn")
    for sequence in stage.admitted[:2]:
        sequence.paused_s = None
    waits.paused_s = 5.125
    # Z has been first in line for two seconds: none goes before it, whichever turn it is.
    assert policy.choose(stage.view(X, 5.25)) == Choice(X, X, (), reason="its turn")


def test_the_base_has_turns_on_its_own_weights() -> None:
    stage, policy = Stage(), AlwaysMerged(with_merge("merged"), None)
    stage.admit(BASE, X)
    assert policy.choose(stage.view()) == Choice(BASE, BASE, (BASE,), reason="its turn")
    stage.admitted.pop(0)
    assert policy.choose(stage.view()).adapter == X


# ---------------------------------------------------------------- what steps last


THIRTY_TWO = collections.Counter({X: 32})
UNMERGED = StepShape(BASE, THIRTY_TWO, THIRTY_TWO)
SIZES = (StepTimes(1, 1, 0.0045, 0.004), StepTimes(32, 32, 0.0057, 0.005), StepTimes(1, 512, 0.024, 0.020))


def test_steps_last_what_lies_between_measured_ones() -> None:
    times = StepSeconds(MergeTimes(steps=SIZES))
    assert times.adapter_s(1) == pytest.approx(0.0005)
    assert times.adapter_s(32) == pytest.approx(0.0007)
    assert times.adapter_s(272) == pytest.approx((0.0007 + 0.004) / 2)
    assert times.adapter_s(5000) == pytest.approx(0.004), "no more is believed than was measured"
    assert times.adapter_s(0) == 0.0
    assert times.added_s({X: 32}, X) == 0.0
    assert times.added_s({X: 16, Y: 8, BASE: 40}, BASE) == times.adapter_s(24)
    assert times.merged_s(1) == 0.004
    assert times.unmerged_s(1) == pytest.approx(0.0045)
    assert StepSeconds(MergeTimes()).adapter_s(32) == 0.0, "what was never measured gains nothing"


def test_a_longer_context_changes_no_difference() -> None:
    times = StepSeconds(MergeTimes(steps=SIZES))
    for number in range(200):
        times.saw_step(UNMERGED, 0.0057 + 1e-5 * number)
    assert times.adapter_s(32) == pytest.approx(0.0007)
    assert times.merged_s(32) > 0.0065, "though steps take longer"


@pytest.mark.parametrize(("adds_s", "scale"), [(0.0007, 1.0), (0.00035, 0.75), (0.0, 0.5), (0.0021, 2.0)])
def test_a_switch_shows_the_difference(adds_s: float, scale: float) -> None:
    """Half of it is believed at once."""
    times = StepSeconds(MergeTimes(steps=SIZES))
    for _ in range(20):
        times.saw_step(UNMERGED, 0.006 + adds_s)
    for number in range(20):
        times.saw_step(UNMERGED._replace(merged=X), 0.012 if number == 0 else 0.006)
    assert times.scale == pytest.approx(scale)


def test_where_adapters_add_nothing_a_switch_shows_nothing() -> None:
    times = StepSeconds(MergeTimes(steps=tuple(step._replace(unmerged_s=step.merged_s) for step in SIZES)))
    for seconds, merged in ((0.007, BASE), (0.006, X)):
        for _ in range(20):
            times.saw_step(UNMERGED._replace(merged=merged), seconds)
    assert times.scale == 1.0


def test_switches_by_where_the_pristine_weights_are() -> None:
    device = StepSeconds(MergeTimes(False, 0.006, 0.007))
    host = StepSeconds(MergeTimes(True, 0.006, 0.249))
    assert [times.switch_s(X, Y) for times in (device, host)] == [0.006, pytest.approx(0.255)]
    assert [times.switch_s(X, BASE) for times in (device, host)] == [0.007, 0.249]
    assert device.switch_s(BASE, X) == 0.006
    device.saw_switch(X, Y, 0.016)
    host.saw_switch(X, Y, 1.0)
    assert device.switch_s(BASE, X) == pytest.approx(0.007)
    assert host.switch_s(X, Y) == pytest.approx(0.255), "two in one tell of neither"


# ---------------------------------------------------------------- starvation, in virtual time

SEQS, STEP_S, SWITCH_S = 8, 0.020, 0.006


@functools.cache
def overload(mode: str, starve_s: float) -> Replay:
    """99 % of the requests are one adapter's and more than the device serves; seven others ask now and then."""
    requests = []
    for number in range(700):
        adapter = 1 + (number // 100) % 7 if number % 100 == 50 else 0
        requests.append(StreamRequest(0.03 * number, adapter, number, 0, (Piece(number, 24),), 16))
    times = MergeTimes(False, SWITCH_S, SWITCH_S, (StepTimes(1, 1, STEP_S, 0.8 * STEP_S),))
    merge = MergeConfig(mode, starve_s=starve_s, times=times)
    config = PolicyConfig(4000, 4, 100, SEQS, 64, pipeline_depth=2, merge=merge)
    costs = DeviceCosts(STEP_S, 0.0, 0.0, 0.0)
    replay = Replay(Stream("overload", tuple(requests), (8,) * 8), config, costs, [1] * 8)
    replay.run()
    return replay


def longest_wait_s(replay: Replay) -> float:
    """Of a rare request, from when fewer than a batch that came before it are unfinished to its first token."""
    outcomes = sorted(replay.outcomes, key=lambda outcome: outcome.handed_s)
    longest_s = 0.0
    for number, outcome in enumerate(outcomes):
        if outcome.request.adapter:
            ends = sorted(before.end_s for before in outcomes[:number])
            due_s = ends[number - SEQS] if number >= SEQS else 0.0
            longest_s = max(longest_s, outcome.first_s - max(due_s, outcome.handed_s))
    return longest_s


@pytest.mark.parametrize("starve_s", [0.5, 2.0])
def test_nobody_starves_beside_an_overload(starve_s: float) -> None:
    replay = overload("dlora", starve_s)
    counters = replay.report().counters
    assert counters.steps_merged > 1000
    assert counters.switches_merged > 3
    # The wait, the step and the switch, and what any request takes: its adapter, and its prompt behind others.
    assert longest_wait_s(replay) < starve_s + STEP_S + 2 * SWITCH_S + 4 * STEP_S
    assert counters.longest_pause_s <= starve_s + 2 * STEP_S + SWITCH_S


def test_without_a_bound_they_do() -> None:
    assert longest_wait_s(overload("dlora", 1e6)) > 10
    assert longest_wait_s(overload("unmerged", 2.0)) < 5 * STEP_S


def test_turns_and_waits_are_bounded_too() -> None:
    merged = overload("merged", 0.5)
    assert merged.report().counters.longest_pause_s <= 0.5 + 2 * STEP_S + SWITCH_S
    assert merged.report().counters.switches_merged > 7
    manylora = overload("manylora", 0.5)
    assert manylora.report().counters.longest_pause_s <= 2 * STEP_S + SWITCH_S
