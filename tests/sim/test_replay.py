"""The simulator: the engine's own policy on a device that only takes time."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.pricing.costs import IDLE_S, DeviceCosts
from manylora_lab.sim.device import SimulatedDevice
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.summary import summarize
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.declaring import ConfigError
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.protocol.commands import Command, RunStep, SequenceStart, StepRow, SwapPages
from manylora.protocol.events import CopyDone, StepDone
from manylora.types import BASE, SamplingParams
from tests.policy.invariants import check

PAGE_TOKENS = 4
PAGE_BYTES = 1000
COSTS = DeviceCosts(copy_bytes_s=1e6, copy_base_s=0.0, read_bytes_s=1e5)


def request(
    arrival_s: float, conversation: int, turn: int, adapter: int | None, new: int, reply: int
) -> StreamRequest:
    return StreamRequest(arrival_s, adapter, conversation, turn, (Piece((conversation, turn), new),), reply)


def stream_of(*requests: StreamRequest) -> Stream:
    return Stream("made up", requests, (8,) * 5)


def chat(num_conversations: int = 12, num_turns: int = 3, gap_s: float = 0.05) -> Stream:
    """Conversations that take turns, over four adapters."""
    requests = []
    for number in range(num_conversations * num_turns):
        turn, conversation = divmod(number, num_conversations)
        user, reply = 5 + conversation % 3, 4 + conversation % 5
        requests.append(request(number * gap_s, conversation, turn, conversation % 4, user, reply))
    return stream_of(*requests)


def config_of(policy: str = "manylora", num_pages: int = 40, num_host_pages: int = 80) -> PolicyConfig:
    cache = CacheConfig(policy, adapter_share=0.4)
    return PolicyConfig(num_pages, PAGE_TOKENS, 200, 8, 64, num_host_pages, PAGE_BYTES, cache)


def replay_of(
    policy: str = "manylora",
    stream: Stream | None = None,
    config: PolicyConfig | None = None,
    costs: DeviceCosts = COSTS,
    **kwargs: Any,
) -> Replay:
    return Replay(stream or chat(), config or config_of(policy), costs, [4] * 5, **kwargs)


def run(policy: str = "manylora", **kwargs: Any) -> Replay:
    replay = replay_of(policy, **kwargs)
    replay.run()
    return replay


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_invariants_hold_after_every_event_and_every_turn_ends(policy: str) -> None:
    replay = replay_of(policy)
    while replay.advance():
        check(replay.replica)
    assert [o.num_tokens for o in replay.outcomes] == [o.request.output_tokens for o in replay.outcomes]
    assert len(replay.outcomes) == 36
    assert replay.report().counters.pages_swapped_in > 0, "the run is under pressure"


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_nothing_is_left_in_flight(policy: str) -> None:
    after = run(policy).report().gauges
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert (after.pages_loading, after.pages_saving, after.pages_running) == (0, 0, 0)


def commands_of() -> list[tuple[float, Command]]:
    seen: list[tuple[float, Command]] = []
    replay_of(watch=lambda now, command: seen.append((now, command))).run()
    return seen


def test_same_inputs_give_the_same_run() -> None:
    assert commands_of() == commands_of()
    assert summarize(run()) == summarize(run())


def test_a_second_turn_finds_its_history() -> None:
    turns = stream_of(request(0.0, 0, 0, 2, 10, 9), request(9.0, 0, 1, 2, 7, 3))
    replay = run(stream=turns, config=config_of(num_pages=100))
    # The reply's last token was drawn but never computed: 18 of 19 tokens, four full pages of them.
    assert [outcome.num_cached for outcome in replay.outcomes] == [0, 16]
    assert [outcome.prompt_tokens for outcome in replay.outcomes] == [10, 26]
    assert summarize(replay)["prefix_hit"] == pytest.approx(16 / (10 + 26), abs=1e-4)


def test_prompts_that_begin_alike_share_pages() -> None:
    def asking(arrival_s: float, adapter: int | None, *pieces: Piece) -> StreamRequest:
        return StreamRequest(arrival_s, adapter, int(arrival_s), 0, pieces, 2)

    common, ids = Piece("system", 8), Piece("real", 8, (5, 6, 7, 8, 9, 10, 11, 12))
    stream = stream_of(
        asking(0.0, 1, common, Piece("a", 9)), asking(1.0, 1, common, Piece("b", 9)),
        asking(2.0, 2, common, Piece("a", 9)), asking(3.0, 1, Piece("a", 9)), asking(4.0, None, ids, common),
        asking(5.0, None, Piece("other", 8, ids.tokens), Piece("c", 3)),
    )  # fmt: skip
    cached = [o.num_cached for o in run(stream=stream, config=config_of(num_pages=100)).outcomes]
    assert cached == [0, 8, 0, 0, 0, 8], "by adapter, by what came before, by the ids themselves"


def test_a_turn_waits_for_the_reply_before_it() -> None:
    turns = stream_of(*(request(0.01 * turn, 0, turn, 2, 7, reply) for turn, reply in enumerate((50, 3, 4))))
    first, second, third = run(stream=turns, config=config_of(num_pages=100)).outcomes
    assert second.handed_s == first.end_s > 50 * COSTS.step_base_s
    assert third.handed_s == second.end_s
    assert first.ttft_s < second.handed_s


def test_an_answer_is_seen_a_little_after_its_step() -> None:
    turns = stream_of(*(request(0.0, 0, turn, 2, 7, reply) for turn, reply in enumerate((5, 3))))
    at_once = run(stream=turns, config=config_of(num_pages=100)).outcomes
    costs = dataclasses.replace(COSTS, answer_s=0.5)
    first, second = run(stream=turns, config=config_of(num_pages=100), costs=costs).outcomes
    assert first.ttft_s == pytest.approx(at_once[0].ttft_s + 0.5)
    assert first.tpot_s == pytest.approx(at_once[0].tpot_s), "each of its tokens"
    assert second.handed_s == first.end_s == pytest.approx(at_once[0].end_s + 0.5)
    assert second.ttft_s == pytest.approx(at_once[1].ttft_s + 0.5)


def test_what_comes_while_a_step_runs_is_handed_over_at_its_end() -> None:
    seen: list[tuple[float, Command]] = []
    stream = stream_of(request(0.0, 0, 0, 2, 10, 3), request(0.001, 1, 0, 3, 10, 2))
    replay = replay_of(
        stream=stream, costs=DeviceCosts(step_base_s=1.0), watch=lambda now, c: seen.append((now, c))
    )
    replay.run()
    steps = [(now, len(command.rows)) for now, command in seen if isinstance(command, RunStep)][-3:]
    assert [num_rows for _, num_rows in steps] == [1, 2, 2], "the second joins the first's second step"
    assert [round(later - now) for (now, _), (later, _) in itertools.pairwise(steps)] == [1, 1]
    assert [round(outcome.ttft_s, 1) for outcome in replay.outcomes] == [1.0, 2.0]


def test_the_parts_of_the_time_to_the_first_token() -> None:
    """One that waits for a slot, one for its adapter, one for its history: each notes where its time went."""
    replay = run("lru", config=config_of("lru", num_pages=28))
    for outcome in replay.outcomes:
        parts = (outcome.queue_s, outcome.adapter_s, outcome.kv_s)
        assert min(parts) >= 0
        assert sum(parts) + COSTS.step_base_s <= outcome.ttft_s + 1e-9
    for name in ("queue_s", "adapter_s", "kv_s"):
        assert any(getattr(outcome, name) > 0 for outcome in replay.outcomes), name


def pressed(num_requests: int, num_turns: int) -> Replay:
    """Conversations of 20 tokens each way, whose next turns come at once, on a small device and a large host."""
    requests = [
        request(0.05 * number, number // num_turns, number % num_turns, number // num_turns % 4, 20, 20)
        for number in range(num_requests)
    ]
    config = dataclasses.replace(config_of(num_pages=60, num_host_pages=2000), max_model_len=300)
    # A page comes in 0.13 ms and, so the policy assumes, is computed in 0.2.
    costs = DeviceCosts(copy_bytes_s=8e6, copy_base_s=0.0)
    return replay_of(stream=stream_of(*requests), config=config, costs=costs)


def test_nothing_is_fetched_below_what_leaves() -> None:
    replay = pressed(30, num_turns=5)
    while replay.advance():
        check(replay.replica)
    assert replay.report().counters.prefetches > 0


def test_history_that_nobody_asks_for_again_is_copied_no_more() -> None:
    """A service of single turns learns it; one of conversations goes on saving."""

    def saved_of(num_turns: int) -> tuple[int, int]:
        """Pages saved, and pages that left the device."""
        replay = pressed(1300, num_turns)
        replay.run()
        counters = replay.report().counters
        return counters.pages_swapped_out, counters.history_evictions

    saved, left = saved_of(num_turns=1)
    assert saved < 0.3 * left
    saved, left = saved_of(num_turns=5)
    assert saved > 0.5 * left


def test_a_faster_stream_arrives_faster() -> None:
    handed = [o.handed_s for o in run(stream=chat().with_rate(2.0)).outcomes if o.request.turn == 0]
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


def test_a_step_after_idling_takes_more() -> None:
    device = SimulatedDevice(DeviceCosts(1.0, 0.0, 0.0, 0.0, wake_s=0.25), PAGE_BYTES, {})
    start = SequenceStart(1, 0, BASE, (1, 2, 3), 3, 2, (), SamplingParams(max_tokens=1, seed=0), ())

    def ended(number: int, now: float) -> float:
        answer = device.obey(RunStep(number, (start,), (StepRow(1, 2, 1, 1),)), now)
        assert answer is not None
        assert isinstance(answer[1], StepDone)
        assert answer[0] - max(now, before) == pytest.approx(answer[1].device_s)
        return answer[0]

    before = 0.0
    before = ended(1, 5.0)
    assert before == pytest.approx(6.25), "nothing came before"
    before = ended(2, 5.5)
    assert before == pytest.approx(7.25), "while the first ran"
    before = ended(3, before + 0.5 * IDLE_S)
    assert before == pytest.approx(8.25 + 0.5 * IDLE_S), "shortly after"
    assert ended(4, before + IDLE_S) == pytest.approx(9.5 + 1.5 * IDLE_S)


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
    for to_device, begins_at in ((True, 5.0), (False, at)):  # the step may still write what leaves
        copied = device.obey(SwapPages(1, to_device, ((1, 1),)), 5.0)
        assert copied is not None
        assert copied[0] == pytest.approx(begins_at + costs.copy_s(PAGE_BYTES, to_device))


def test_a_policy_that_forgets_somebody_is_found_out() -> None:
    # No adapter takes no page, so nothing ever brings this one.
    with pytest.raises(RuntimeError, match="1 requests wait"):
        Replay(stream_of(request(0.0, 0, 0, 2, 10, 3)), config_of(), COSTS, [0] * 5, is_warm=False).run()


def test_bad_input_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="copy_bytes_s must be more than 0"):
        DeviceCosts(copy_bytes_s=0)
    with pytest.raises(ConfigError, match="read_base_s must be a number"):
        DeviceCosts(read_base_s=-1)
    with pytest.raises(ConfigError, match="made up has 5 adapters, not 3"):
        Replay(chat(), config_of(), COSTS, [4] * 3)
    with pytest.raises(ConfigError, match=r"the workload does not fit: .*maximum context"):
        run(stream=stream_of(request(0.0, 0, 0, 2, 300, 9)))


def test_history_that_nobody_asks_for_does_not_push_adapters_out_of_the_host() -> None:
    """One request of each adapter in turn, again and again: by last use each would be gone when it is needed."""
    num_adapters, rounds = 12, 8
    requests = [
        request(0.2 * number, number, 0, number % num_adapters, 24, 4)
        for number in range(num_adapters * rounds)
    ]
    stream = Stream("one after the other", tuple(requests), (8,) * num_adapters)
    misses = {}
    for policy in ("manylora", "lru"):
        config = config_of(policy, num_pages=30, num_host_pages=4 * num_adapters + 8)
        replay = Replay(stream, config, COSTS, [4] * num_adapters)
        replay.run()
        misses[policy] = (
            replay.report().counters.adapter_misses - num_adapters
        )  # each is read once to be warm
    assert misses["manylora"] < num_adapters < misses["lru"]
