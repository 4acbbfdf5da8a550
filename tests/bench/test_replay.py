"""What the client hands over, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest

from manylora.bench.replay import ReplaySettings, TurnResult, check_fit, replay, warm_adapters
from manylora.bench.serve import measure
from manylora.bench.summary import as_rows, difference, summarize, table
from manylora.config import ConfigError
from tests.bench.fakes import FakeTarget, reply_to, turn

NAMES = {"adapter-0", "adapter-1", "adapter-2"}
TURNS = (turn(0, 0, 0.0, 0), turn(1, 0, 0.01, 0), turn(0, 1, 0.02, 7), turn(0, 2, 0.3, 14))


def test_prompts_carry_the_targets_own_replies() -> None:
    target = FakeTarget(NAMES)
    results = asyncio.run(replay(target, TURNS, ReplaySettings()))
    mine = [call for _, call in target.calls if call.adapter == "adapter-0"]
    assert [len(call.prompt) for call in mine] == [4, 4 + 3 + 4, 4 + 3 + 4 + 3 + 4]
    assert all(call.max_tokens == 3 for call in mine)
    for before, after in itertools.pairwise(mine):
        assert after.prompt[: len(before.prompt) + 3] == before.prompt + tuple(reply_to(before))
    assert [(r.conversation, r.turn, r.prompt_tokens) for r in results] == [
        (0, 0, 4), (1, 0, 4), (0, 1, 11), (0, 2, 18),
    ]  # fmt: skip
    assert all(result.error is None and result.reply_tokens == 3 for result in results)


def test_a_turn_waits_for_the_reply_before_it_and_counts_from_its_handing_over() -> None:
    target = FakeTarget(NAMES)
    first, _, second, third = asyncio.run(replay(target, TURNS, ReplaySettings()))
    assert second.handed_s >= first.end_s > second.arrival_s
    assert second.waited_s == pytest.approx(first.end_s - second.arrival_s)
    assert second.ttft_s < second.handed_s + second.ttft_s - second.arrival_s  # the wait is not in it
    assert third.waited_s == 0
    assert third.handed_s >= third.arrival_s
    assert target.most_running == 2
    for result in (first, second, third):
        assert result.ttft_s >= target.delay_s
        assert result.tpot_s is not None
        assert result.tpot_s >= target.delay_s / 2  # two gaps between three tokens


def test_seeds_and_rate_scale() -> None:
    def prompts(settings: ReplaySettings) -> dict[tuple[str | None, int], tuple[int, ...]]:
        target = FakeTarget(NAMES)
        asyncio.run(replay(target, TURNS, settings))
        return {(call.adapter, len(call.prompt)): call.prompt for _, call in target.calls}

    base = prompts(ReplaySettings())
    assert base == prompts(ReplaySettings(rate_scale=3.0))
    assert all(base[key] != other for key, other in prompts(ReplaySettings(seed=1)).items())
    assert all(3 <= token < 6 for token in prompts(ReplaySettings(vocab_size=6))["adapter-1", 4])
    results = asyncio.run(replay(FakeTarget(NAMES), TURNS, ReplaySettings(rate_scale=2.0)))
    assert [result.arrival_s for result in results] == [0.0, 0.005, 0.01, 0.15]


def test_a_failed_turn_takes_the_rest_of_its_conversation_along() -> None:
    def fails(call: object) -> str | None:
        return "refused" if len(getattr(call, "prompt", ())) == 11 else None

    target = FakeTarget(NAMES, fails)
    results = asyncio.run(replay(target, TURNS, ReplaySettings()))
    assert [result.error for result in results] == [
        None, None, "refused", "an earlier turn of its conversation failed",
    ]  # fmt: skip
    assert len(target.calls) == 3
    summary = summarize(TURNS, results)
    assert (summary["requests"], summary["failed"], summary["first_error"]) == (4, 2, "refused")
    assert "refused" in table(summary)


def test_too_few_tokens_are_a_failure() -> None:
    target = FakeTarget(NAMES)
    whole = target.generate

    async def cut(call):  # type: ignore[no-untyped-def]
        answer = await whole(call)
        answer.tokens.pop()
        return answer

    target.generate = cut  # type: ignore[method-assign]
    results = asyncio.run(replay(target, TURNS[:1], ReplaySettings()))
    assert results[0].error == "2 tokens came instead of 3"


def test_warming_asks_for_every_adapter_once() -> None:
    target = FakeTarget({f"adapter-{i}" for i in range(20)})
    asyncio.run(warm_adapters(target, sorted(target.adapters), ReplaySettings()))
    assert sorted(call.adapter or "" for _, call in target.calls) == sorted(target.adapters)
    assert all(call.max_tokens == 1 for _, call in target.calls)
    assert target.most_running == 8
    target = FakeTarget(NAMES, lambda call: "no good")
    with pytest.raises(ConfigError, match="adapter-1' could not be used: no good"):
        asyncio.run(warm_adapters(target, ["adapter-1"], ReplaySettings()))


def test_measuring_counts_nothing_of_the_warm_up() -> None:
    target = FakeTarget(NAMES)
    found = asyncio.run(measure(target, TURNS, ReplaySettings(), is_warm=True, extra_adapters=["adapter-2"]))
    assert len(target.calls) == 4 + 3
    assert found.engine == {"calls": 4}
    assert found.summary["requests"] == len(found.results) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"adapters": frozenset({"adapter-0"})}, "adapter 'adapter-1', which is not served"),
        ({"max_model_len": 20}, "a turn of 21 tokens"),
        ({"vocab_size": 999}, "at most the model's 999"),
    ],
)
def test_what_cannot_be_served_is_refused_before(change: dict[str, object], words: str) -> None:
    target = FakeTarget(NAMES)
    for name, value in change.items():
        setattr(target, name, value)
    with pytest.raises(ConfigError, match=words):
        check_fit(target, TURNS, ReplaySettings())
    assert target.calls == []


@pytest.mark.parametrize(
    "bad",
    [
        {"rate_scale": 0}, {"rate_scale": float("inf")}, {"rate_scale": float("nan")}, {"vocab_size": 3},
        {"adapter_name": "same"}, {"adapter_name": "{0}{1}"}, {"adapter_name": "{"},
    ],
)  # fmt: skip
def test_bad_replay_settings(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ReplaySettings(**bad)  # type: ignore[arg-type]


def result(**changes: object) -> TurnResult:
    plain = TurnResult(
        conversation=0, turn=0, adapter="adapter-0", rank=8, arrival_s=1.0, handed_s=1.0, waited_s=0.0,
        lag_s=0.001, prompt_tokens=100, reply_tokens=11, ttft_s=0.1, tpot_s=0.02, end_s=1.3,
        cached_tokens=50, parts={"queue_s": 0.01, "adapter_s": 0.0},
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_the_summary_by_hand() -> None:
    results = [
        result(),
        result(arrival_s=2.0, ttft_s=0.3, tpot_s=0.04, end_s=4.0, cached_tokens=0,
               parts={"queue_s": 0.03, "adapter_s": 0.2}),
        result(arrival_s=1.5, reply_tokens=1, ttft_s=0.2, tpot_s=None, cached_tokens=None, parts={}),
    ]  # fmt: skip
    summary = summarize(TURNS, results)
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
    assert "0.25 (0.57)" in text
    assert as_rows(results)[0]["parts"] == {"queue_s": 0.01, "adapter_s": 0.0}


def test_a_summary_of_failures_alone_has_no_numbers_made_up() -> None:
    summary = summarize(TURNS, [result(error="gone", end_s=0.0)])
    assert summary["ttft_ms"] is None
    assert summary["prefix_hit"] is None
    assert summary["adapter_hit"] is None
    assert "unknown" in table(summary)


def test_difference() -> None:
    assert difference({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 2.0, "new": 5.0}) == {"a": 3.0, "new": 5.0}
