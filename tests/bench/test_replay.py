"""What the client hands over, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from manylora_lab.bench.prompts import joined
from manylora_lab.bench.replay import (
    Halt,
    Replayed,
    ReplaySettings,
    RequestResult,
    check_fit,
    replay,
    warm_adapters,
)
from manylora_lab.bench.serve import measure
from manylora_lab.bench.summary import (
    Objective,
    as_rows,
    difference,
    fairness,
    jain,
    merging,
    summarize,
    table,
    warnings,
)
from manylora_lab.bench.targets import Prompt, TargetRequest, TargetResult, has_ids
from manylora_lab.workloads.stream import Piece, StreamRequest

from manylora.config.declaring import ConfigError
from tests.bench.fakes import FakeTarget, reply_to, run_in_own_time, stream_of, turn

NAMES = {"adapter-0", "adapter-1", "adapter-2"}
OwnTime = Callable[[Coroutine[Any, Any, Any]], Any]
STREAM = stream_of(turn(0, 0, 0.0), turn(1, 0, 0.01), turn(0, 1, 0.02), turn(0, 2, 0.3))


@pytest.fixture
def in_own_time(monkeypatch: pytest.MonkeyPatch) -> OwnTime:
    """Instead of ``asyncio.run``."""
    return functools.partial(run_in_own_time, monkeypatch)


def test_prompts_carry_the_targets_own_replies(in_own_time: OwnTime) -> None:
    target = FakeTarget(NAMES)
    results = in_own_time(replay(target, STREAM, ReplaySettings())).results
    mine = [call for _, call in target.calls if call.adapter == "adapter-0"]
    assert [len(call.prompt) for call in mine] == [4, 4 + 3 + 4, 4 + 3 + 4 + 3 + 4]
    assert all(call.max_tokens == 3 for call in mine)
    for before, after in itertools.pairwise(mine):
        assert after.prompt[: len(before.prompt) + 3] == joined(before.prompt, tuple(reply_to(before)))
    assert [(r.conversation, r.turn, r.prompt_tokens) for r in results] == [
        (0, 0, 4), (1, 0, 4), (0, 1, 11), (0, 2, 18),
    ]  # fmt: skip
    assert all(result.error is None and result.reply_tokens == 3 for result in results)


def test_a_turn_waits_for_the_reply_before_it_and_counts_from_its_handing_over(in_own_time: OwnTime) -> None:
    target = FakeTarget(NAMES)
    first, _, second, third = in_own_time(replay(target, STREAM, ReplaySettings())).results
    assert second.handed_s >= first.end_s > second.arrival_s
    assert second.waited_s == pytest.approx(first.end_s - second.arrival_s)
    assert second.ttft_s < second.handed_s + second.ttft_s - second.arrival_s  # the wait is not in it
    assert third.waited_s == 0
    assert third.handed_s >= third.arrival_s
    assert target.most_running == 2
    for result in (first, second, third):
        assert result.ttft_s == pytest.approx(target.delay_s)
        assert result.tpot_s == pytest.approx(target.delay_s / 2)  # two gaps between three tokens


def test_prompts_depend_on_seed_and_identity_alone(in_own_time: OwnTime) -> None:
    def prompts(settings: ReplaySettings, rate: float = 1.0) -> dict[tuple[str | None, int], Prompt]:
        target = FakeTarget(NAMES)
        in_own_time(replay(target, STREAM.with_rate(rate), settings))
        return {(call.adapter, len(call.prompt)): call.prompt for _, call in target.calls}

    base = prompts(ReplaySettings())
    assert base == prompts(ReplaySettings(), rate=3.0)
    assert all(base[key] != other for key, other in prompts(ReplaySettings(seed=1)).items())
    assert all(3 <= int(token) < 6 for token in prompts(ReplaySettings(vocab_size=6))["adapter-1", 4])


def test_equal_pieces_give_equal_tokens_and_named_ones_are_used(in_own_time: OwnTime) -> None:
    shared, named = Piece("system", 6), Piece("mine", 2, (900, 901))
    requests = [
        StreamRequest(0.0, None, 0, 0, (shared, named), 1),
        StreamRequest(0.0, 2, 1, 0, (shared, Piece("yours", 3)), 1),
        StreamRequest(0.0, 2, 2, 0, (Piece("system", 9),), 1),
    ]
    target = FakeTarget(NAMES)
    results = in_own_time(replay(target, stream_of(*requests), ReplaySettings())).results
    one, two, longer = (tuple(call.prompt) for _, call in target.calls)
    assert one[:6] == two[:6] == longer[:6]
    assert one[6:] == (900, 901)
    assert (len(two), len(longer)) == (9, 9)
    assert two[6:] != longer[6:]
    assert [(result.adapter, result.workload_rank) for result in results] == [
        (None, 0), ("adapter-2", 8), ("adapter-2", 8),
    ]  # fmt: skip


def test_words_for_servers_without_tokens() -> None:
    prompts = ReplaySettings(kind="text").prompts()
    first, second = prompts.new(turn(0, 0, 0.0)), prompts.new(turn(0, 1, 0.0))
    assert isinstance(first, str)
    assert isinstance(second, str)
    assert len(first.split()) == len(second.split()) == 4
    assert first != second
    assert first == ReplaySettings(kind="text").prompts().new(turn(0, 0, 5.0))


def test_a_chat_is_what_was_said_in_turn() -> None:
    prompts = ReplaySettings(kind="chat").prompts()
    words = ReplaySettings(kind="text").prompts()
    first, second = turn(0, 0, 0.0), turn(0, 1, 0.0)
    said = joined(prompts.nothing(), prompts.new(first))
    said = joined(joined(said, prompts.reply(TargetResult(text="Well. "))), prompts.new(second))
    assert said == (words.new(first), "Well. ", words.new(second))
    assert not has_ids(said)
    assert not has_ids(words.new(first))
    assert has_ids(ReplaySettings().prompts().new(first))


def test_a_failed_turn_takes_the_rest_of_its_conversation_along(in_own_time: OwnTime) -> None:
    def fails(call: object) -> str | None:
        return "refused" if len(getattr(call, "prompt", ())) == 11 else None

    target = FakeTarget(NAMES, fails)
    results = in_own_time(replay(target, STREAM, ReplaySettings())).results
    assert [result.error for result in results] == [
        None, None, "refused", "an earlier turn of its conversation failed",
    ]  # fmt: skip
    assert len(target.calls) == 3
    summary = summarize(STREAM, results)
    assert (summary["requests"], summary["failed"], summary["first_error"]) == (4, 2, "refused")
    assert "refused" in table(summary)


def test_a_lost_target_ends_the_replay_and_what_came_is_kept(in_own_time: OwnTime) -> None:
    target = FakeTarget(NAMES, lambda call: "broke off" if call.adapter == "adapter-1" else None)
    target.death = "the server is gone"
    stream = stream_of(turn(0, 0, 0.0), turn(1, 0, 0.15), turn(2, 0, 600.0), turn(0, 1, 900.0))
    done = in_own_time(replay(target, stream, ReplaySettings()))
    assert done.error == "the server is gone"
    assert [(result.conversation, result.error) for result in done.results] == [(0, None), (1, "broke off")]
    summary = summarize(stream, done.results)
    assert (summary["planned"], summary["requests"], summary["failed"]) == (4, 2, 1)
    assert "2 (1 failed), 2 of 4 not made" in table(summary)


def test_what_was_merged_by_an_engines_numbers_or_a_servers() -> None:
    stats = {
        "steps": 100.0, "steps_merged": 70.0, "switches_merged": 3.0, "merge_switch_s": 0.5,
        "longest_pause_s": 1.5,
    }  # fmt: skip
    figures = {
        'manylora:steps_total{mode="unmerged",model_name="base"}': 30.0,
        'manylora:steps_total{mode="merged",model_name="base"}': 70.0,
        'manylora:merge_switches_total{to="merged"}': 3.0, "manylora:merge_switch_seconds_total": 0.5,
        "manylora:longest_pause_seconds": 1.5,
    }  # fmt: skip
    shares = {"steps_unmerged": 0.3, "steps_merged": 0.7}
    expected = {**shares, "switches_merged": 3, "switches_base": 0, "switch_s": 0.5, "paused_s": 0}
    assert merging(stats) == merging(figures) == pytest.approx({**expected, "longest_pause_s": 1.5})
    before = {"manylora:longest_pause_seconds": 1.0, "manylora:merge_switch_seconds_total": 0.2}
    grown = difference(before, figures)
    assert (grown["manylora:longest_pause_seconds"], grown["manylora:merge_switch_seconds_total"]) == (
        1.5,
        0.3,
    )
    known = merging(difference({"manylora:longest_pause_seconds": 1.5}, figures))
    assert known == pytest.approx(expected), "that one was before"
    assert merging({"steps": 100.0, "steps_unmerged": 100.0}) is None
    assert merging({}) is None


def test_a_halted_replay_keeps_what_it_has(in_own_time: OwnTime) -> None:
    target = FakeTarget(NAMES)
    whole = target.generate

    async def for_ever(call: TargetRequest):  # type: ignore[no-untyped-def]
        if call.adapter == "adapter-1":
            await asyncio.sleep(3600)
        return await whole(call)

    target.generate = for_ever  # type: ignore[method-assign]

    async def run_all() -> Replayed:
        halt = Halt()
        asyncio.get_running_loop().call_later(0.3, halt.call, "interrupted")
        stream = stream_of(turn(0, 0, 0.0), turn(1, 0, 0.0), turn(2, 0, 3600.0))
        return await replay(target, stream, ReplaySettings(), halt)

    done = in_own_time(run_all())
    assert done.error == "interrupted"
    assert {(result.conversation, result.error) for result in done.results} == {(0, None), (1, "interrupted")}


def test_too_few_tokens_are_a_failure(in_own_time: OwnTime) -> None:
    target = FakeTarget(NAMES)
    whole = target.generate

    async def cut(call):  # type: ignore[no-untyped-def]
        answer = await whole(call)
        answer.tokens.pop()
        return answer

    target.generate = cut  # type: ignore[method-assign]
    results = in_own_time(replay(target, STREAM.first(1), ReplaySettings())).results
    assert results[0].error == "2 tokens came instead of 3"


def test_warming_asks_for_every_adapter_once(in_own_time: OwnTime) -> None:
    target = FakeTarget({f"adapter-{i}" for i in range(20)})
    in_own_time(warm_adapters(target, sorted(target.adapters), ReplaySettings()))
    assert sorted(call.adapter or "" for _, call in target.calls) == sorted(target.adapters)
    assert all(call.max_tokens == 1 for _, call in target.calls)
    assert target.most_running == 8
    target = FakeTarget(NAMES, lambda call: "no good")
    with pytest.raises(ConfigError, match="adapter-1' could not be used: no good"):
        in_own_time(warm_adapters(target, ["adapter-1"], ReplaySettings()))


def test_measuring_counts_nothing_of_the_warm_up(in_own_time: OwnTime) -> None:
    target = FakeTarget(NAMES)
    found = in_own_time(measure(target, STREAM, ReplaySettings(), is_warm=True, extra_adapters=["adapter-2"]))
    assert len(target.calls) == 4 + 3
    assert found.engine == {"calls": 4}
    assert found.summary["requests"] == len(found.results) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"adapters": frozenset({"adapter-0"})}, "adapter 'adapter-1', .*served: adapter-0"),
        ({"max_model_len": 20}, "a turn of 21 tokens"),
        ({"vocab_size": 999}, "at most the model's 999"),
    ],
)
def test_what_cannot_be_served_is_refused_before(change: dict[str, object], words: str) -> None:
    target = FakeTarget(NAMES)
    for name, value in change.items():
        setattr(target, name, value)
    with pytest.raises(ConfigError, match=words):
        check_fit(target, STREAM, ReplaySettings())
    assert target.calls == []


@pytest.mark.parametrize(
    "bad",
    [
        {"vocab_size": 3}, {"adapter_name": "{{same}}"}, {"adapter_name": "{0}{1}"}, {"adapter_name": "{"},
    ],
)  # fmt: skip
def test_bad_replay_settings(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ReplaySettings(**bad)  # type: ignore[arg-type]


def test_adapters_called_by_names_in_turn() -> None:
    settings = ReplaySettings(adapter_name="german, french")
    assert [settings.name_of(0), settings.name_of(1)] == ["german", "french"]
    check_fit(FakeTarget({"german", "french"}), STREAM, settings)
    with pytest.raises(ConfigError, match="names only 1"):
        check_fit(FakeTarget({"german"}), STREAM, ReplaySettings(adapter_name="german"))


def result(**changes: object) -> RequestResult:
    plain = RequestResult(
        conversation=0, turn=0, adapter="adapter-0", workload_rank=8, arrival_s=1.0, handed_s=1.0, waited_s=0.0,
        lag_s=0.001, prompt_tokens=100, reply_tokens=11, ttft_s=0.1, tpot_s=0.02, end_s=1.3,
        cached_tokens=50, parts={"queue_s": 0.01, "adapter_s": 0.0}, itls_s=[0.01, 0.03], text="abc",
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_the_summary_by_hand() -> None:
    results = [
        result(),
        result(arrival_s=2.0, ttft_s=0.3, tpot_s=0.04, end_s=4.0, cached_tokens=0,
               parts={"queue_s": 0.03, "adapter_s": 0.2}),
        result(arrival_s=1.5, reply_tokens=1, ttft_s=0.2, tpot_s=None, cached_tokens=None, parts={}),
    ]  # fmt: skip
    summary = summarize(STREAM, results)
    assert summary["wall_s"] == 4.0
    assert summary["done_per_s"] == 3 / 4
    assert summary["offered_per_s"] == 3 / 2
    assert summary["output_tokens_per_s"] == 23 / 4
    assert summary["ttft_ms"]["mean"] == pytest.approx(200)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["ttft_ms"]["p99"] == pytest.approx(298)
    assert summary["tpot_ms"]["mean"] == pytest.approx(30)
    assert summary["prefix_hit"] == 50 / 200
    assert summary["prefix_bound"] == (7 + 14) / (4 + 4 + 11 + 18)
    assert summary["adapter_hit"] == 0.5
    assert summary["ttft_parts_ms"]["queue_s"]["max"] == pytest.approx(30)
    text = table(summary)
    assert "mean 200.0  p50 200.0" in text
    assert summary["itl_ms"]["mean"] == pytest.approx(20)
    assert summary["itl_ms"]["max"] == pytest.approx(30)
    assert summary["e2e_ms"]["max"] == pytest.approx(3000)
    assert summary["total_tokens_per_s"] == (300 + 23) / 4
    assert summary["goodput_per_s"] is None
    assert "0.25 (0.57)" in text
    row = as_rows(results)[0]
    assert row["parts"] == {"queue_s": 0.01, "adapter_s": 0.0}
    assert not row.keys() & {"text", "itls_s"}


def test_a_summary_of_failures_alone_has_no_numbers_made_up() -> None:
    summary = summarize(STREAM, [result(error="gone", end_s=0.0)])
    assert summary["ttft_ms"] is None
    assert summary["prefix_hit"] is None
    assert summary["adapter_hit"] is None
    assert "unknown" in table(summary)


def test_difference() -> None:
    assert difference({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 2.0, "new": 5.0}) == {"a": 3.0, "new": 5.0}


def test_goodput_by_hand() -> None:
    results = [
        result(),  # 100, 20, 300 ms
        result(ttft_s=0.2),
        result(tpot_s=None, reply_tokens=1),
        result(tpot_s=0.03),
        result(end_s=6.5),
        result(error="gone"),
    ]
    objective = Objective.parse(["ttft:100", "tpot:25", "e2el:5000"])
    assert [objective.is_met(each) for each in results] == [True, False, True, False, False, False]
    summary = summarize(STREAM, results, objective)
    assert summary["goodput_per_s"] == pytest.approx(2 / 6.5)
    assert summary["good_share"] == 2 / 6
    assert all(map(Objective.parse(["ttft:250"]).is_met, results[:5]))


@pytest.mark.parametrize("bad", ["ttft", "ttft:", "ttft:x", "ttft:-1", "itl:5", ":5", "ttft:nan", "ttft:inf"])
def test_bad_objectives(bad: str) -> None:
    with pytest.raises(ConfigError, match="write ttft:MS"):
        Objective.parse([bad])


def test_fairness_by_hand() -> None:
    results = [
        result(), result(ttft_s=0.3), result(adapter="adapter-1", ttft_s=0.4, reply_tokens=2),
        result(adapter=None, error="gone"),
    ]  # fmt: skip
    found = fairness(results)
    assert found is not None
    assert found["adapters"]["adapter-0"] == {
        "requests": 2, "failed": 0, "output_tokens": 22, "mean_ttft_ms": pytest.approx(200),
    }  # fmt: skip
    assert found["adapters"]["(base)"] == {
        "requests": 1, "failed": 1, "output_tokens": 0, "mean_ttft_ms": None,
    }  # fmt: skip
    assert found["jain_ttft"] == pytest.approx(600**2 / (2 * (200**2 + 400**2)))
    assert found["jain_output_tokens"] == pytest.approx(24**2 / (3 * (22**2 + 2**2)))
    assert found["best"]["adapter"] == "adapter-0"
    assert found["worst_over_best"] == pytest.approx(2)
    assert fairness([result(error="gone")]) is None
    assert jain([5, 5, 5]) == pytest.approx(1)
    assert jain([5, 0, 0, 0]) == pytest.approx(1 / 4)


def test_a_late_client_is_warned_of() -> None:
    assert warnings(summarize(STREAM, [result(lag_s=0.009)])) == []
    (line,) = warnings(summarize(STREAM, [result(lag_s=0.011)]))
    assert "p99 lag of 11.0 ms" in line
    assert warnings(summarize(STREAM, [result(error="gone")])) == []
