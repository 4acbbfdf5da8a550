"""The simulator: the engine's own policy on a device that only takes time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from manylora.config import CACHE_POLICIES, CacheConfig, ConfigError, PolicyConfig
from manylora.protocol import Command, CopyDone, RunStep, SequenceStart, StepRow, SwapPages
from manylora.sim.costs import DeviceCosts
from manylora.sim.device import SimulatedDevice
from manylora.sim.replay import Load, Replay
from manylora.sim.summary import summarize
from manylora.types import SamplingParams
from manylora.workloads.chat import Turn

PAGE_TOKENS = 4
PAGE_BYTES = 1000
COSTS = DeviceCosts(copy_bytes_s=1e6, copy_base_s=0.0, read_bytes_s=1e5)


def chat(num_conversations: int = 12, num_turns: int = 3, gap_s: float = 0.05) -> list[Turn]:
    """Conversations that take turns, over four adapters."""
    turns = []
    for number in range(num_conversations * num_turns):
        turn, conversation = divmod(number, num_conversations)
        user, reply = 5 + conversation % 3, 4 + conversation % 5
        turns.append(
            Turn(number * gap_s, conversation, turn, conversation % 4, 8, turn * (user + reply), user, reply)
        )
    return turns


def load_of(turns: list[Turn]) -> Load:
    return Load(turns, dict.fromkeys(range(5), 4))


def config_of(policy: str = "manylora", num_pages: int = 40, num_host_pages: int = 80) -> PolicyConfig:
    cache = CacheConfig(policy, adapter_share=0.4)
    return PolicyConfig(num_pages, PAGE_TOKENS, 200, 8, 64, num_host_pages, PAGE_BYTES, cache)


def run(policy: str = "manylora", load: Load | None = None, config: PolicyConfig | None = None) -> Replay:
    replay = Replay(load or load_of(chat()), config or config_of(policy), COSTS)
    replay.run()
    return replay


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_invariants_hold_after_every_event_and_every_turn_ends(policy: str) -> None:
    replay = Replay(load_of(chat()), config_of(policy), COSTS)
    while replay.advance():
        replay.replica.check()
    assert [o.num_tokens for o in replay.outcomes] == [o.turn.reply_tokens for o in replay.outcomes]
    assert len(replay.outcomes) == 36
    assert replay.replica.counters.pages_swapped_in > 0, "the run is under pressure"


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_nothing_is_left_in_flight(policy: str) -> None:
    after = run(policy).replica.snapshot()
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert (after.pages_loading, after.pages_saving, after.pages_running) == (0, 0, 0)


def commands_of() -> list[tuple[float, Command]]:
    seen: list[tuple[float, Command]] = []
    Replay(load_of(chat()), config_of(), COSTS, lambda now, command: seen.append((now, command))).run()
    return seen


def test_same_inputs_give_the_same_run() -> None:
    assert commands_of() == commands_of()
    assert summarize(run()) == summarize(run())


def test_a_second_turn_finds_its_history() -> None:
    first, second = Turn(0.0, 0, 0, 2, 8, 0, 10, 9), Turn(9.0, 0, 1, 2, 8, 19, 7, 3)
    replay = run(load=load_of([first, second]), config=config_of(num_pages=100))
    # The reply's last token was drawn but never computed: 18 of 19 tokens, four full pages of them.
    assert [outcome.num_cached for outcome in replay.outcomes] == [0, 16]
    assert summarize(replay)["prefix_hit"] == pytest.approx(16 / (10 + 26), abs=1e-4)


def test_a_turn_waits_for_the_reply_before_it() -> None:
    turns = [Turn(0.0, 0, 0, 2, 8, 0, 10, 50), Turn(0.01, 0, 1, 2, 8, 60, 7, 3)]
    first, second = run(load=load_of(turns), config=config_of(num_pages=100)).outcomes
    assert second.handed_s == first.end_s > 50 * COSTS.step_base_s
    assert first.ttft_s < second.handed_s


def test_what_comes_while_a_step_runs_is_handed_over_at_its_end() -> None:
    seen: list[tuple[float, Command]] = []
    turns = [Turn(0.0, 0, 0, 2, 8, 0, 10, 3), Turn(0.001, 1, 0, 3, 8, 0, 10, 2)]
    load = load_of(turns)
    replay = Replay(load, config_of(), DeviceCosts(step_base_s=1.0), lambda now, c: seen.append((now, c)))
    replay.run()
    steps = [(now, len(command.rows)) for now, command in seen if isinstance(command, RunStep)][-3:]
    assert [num_rows for _, num_rows in steps] == [1, 2, 2], "the second joins the first's second step"
    assert [round(later - now) for (now, _), (later, _) in itertools.pairwise(steps)] == [1, 1]
    assert [round(outcome.ttft_s, 1) for outcome in replay.outcomes] == [1.0, 2.0]


def test_a_faster_trace_arrives_faster() -> None:
    load = dataclasses.replace(load_of(chat()), rate_scale=2.0)
    handed = [outcome.handed_s for outcome in run(load=load).outcomes if outcome.turn.turn == 0]
    assert handed == pytest.approx([0.025 * number for number in range(12)])


def test_copies_of_a_direction_queue_and_directions_do_not() -> None:
    device = SimulatedDevice(COSTS, PAGE_BYTES, {})

    def copy(number: int, to_device: bool, pages: int, now: float) -> tuple[float, float]:
        pairs = tuple((page, page) for page in range(pages))
        answer = device.obey(SwapPages(number, to_device, pairs), now)
        assert answer is not None
        assert isinstance(answer[1], CopyDone)
        return answer[0], answer[1].copy_s

    assert copy(1, True, 10, 1.0) == pytest.approx((1.010, 0.010))
    assert copy(2, True, 1, 1.001) == pytest.approx((1.011, 0.001)), "behind the first"
    assert copy(3, False, 20, 1.001) == pytest.approx((1.021, 0.020)), "on a lane of its own"
    assert copy(4, True, 1, 2.0) == pytest.approx((2.001, 0.001)), "the lane was idle"


def test_a_step_is_priced_by_what_it_computes() -> None:
    costs = DeviceCosts(1.0, 0.1, 0.01, 0.001, adapter_bytes_s=1e6)
    device = SimulatedDevice(costs, PAGE_BYTES, {7: 3})
    params = SamplingParams(max_tokens=1, seed=0)
    starts = tuple(
        SequenceStart(number, 0, 7, tuple(range(100)), 100, 0, (), params, ()) for number in (1, 2)
    )
    rows = (StepRow(1, 99, 1, 1), StepRow(2, 10, 20, 0))
    answer = device.obey(RunStep(1, starts, rows), 5.0)
    assert answer is not None
    at, done = answer
    assert at == pytest.approx(5.0 + 1.0 + 0.1 + 20 * 0.01 + (100 + 30) * 0.001 + 0.003)
    assert done.tokens == ((1, (100,)),)  # type: ignore[union-attr]  # the answer to a step


def test_a_policy_that_forgets_somebody_is_found_out() -> None:
    # No adapter takes no page, so nothing ever brings this one.
    with pytest.raises(RuntimeError, match="1 requests wait"):
        run(load=Load([Turn(0.0, 0, 0, 2, 8, 0, 10, 3)], {2: 0}, is_warm=False))


def test_bad_input_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="copy_bytes_s must be more than 0"):
        DeviceCosts(copy_bytes_s=0)
    with pytest.raises(ConfigError, match="read_base_s must be a number"):
        DeviceCosts(read_base_s=-1)
    with pytest.raises(ConfigError, match="no turns"):
        load_of([])
    with pytest.raises(ConfigError, match="rate_scale must be above 0"):
        Load(chat(), dict.fromkeys(range(4), 4), rate_scale=0)
    with pytest.raises(ConfigError, match="how many pages adapter 3 takes"):
        Load(chat(), dict.fromkeys(range(3), 4))
    with pytest.raises(ConfigError, match=r"the trace does not fit: .*maximum context"):
        run(load=load_of([Turn(0.0, 0, 0, 2, 8, 0, 300, 9)]))
