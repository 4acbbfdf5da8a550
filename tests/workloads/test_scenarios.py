"""FastLibra's scenarios from the data that ships: rates, conversations, adapters, notes; and what is refused."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from manylora_lab.workloads import extracts
from manylora_lab.workloads.extracts import Round, fitting
from manylora_lab.workloads.interleaving import Arrival, Script, interleave
from manylora_lab.workloads.scenarios import SCENARIOS, scenario
from manylora_lab.workloads.stream import prompt_tokens

from manylora.config.declaring import ConfigError


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_its_rate_ranks_and_seed(name: str) -> None:
    stream = scenario(name, 2.0, 50, 600.0, seed=7)
    assert len(stream.requests) == 1200
    assert stream.duration_s < 600
    assert len(stream.ranks) == 50
    assert set(stream.ranks) == {32, 64}
    assert stream == scenario(name, 2.0, 50, 600.0, seed=7)
    assert stream != scenario(name, 2.0, 50, 600.0, seed=8)
    for what in ("lengths:", "arrivals:", "popularity:"):
        assert sum(note.startswith(what) for note in stream.notes) == 1


def test_the_chatbot_talks_as_the_data_does() -> None:
    stream = scenario("chatbot", 3.0, 20, 1800.0, seed=1)
    turns = Counter(request.conversation for request in stream.requests)
    assert 3 < len(stream.requests) / len(turns) < 5.5
    lengths = [p + r.output_tokens for p, r in zip(prompt_tokens(stream.requests), stream.requests)]
    assert max(lengths) <= 4096
    known = {fitting(rounds, 4096) for rounds in extracts.sharegpt_conversations()}
    had = defaultdict(list)
    for request in stream.requests:
        had[request.conversation].append(Round(request.new_tokens, request.output_tokens))
    for rounds in list(had.values())[:200]:
        assert any(whole[: len(rounds)] == tuple(rounds) for whole in known)
    # zipf(1) over 20: the first has 1 / H(20) = 27.8 % of conversations.
    firsts = [request.adapter for request in stream.requests if request.turn == 0]
    assert firsts.count(0) / len(firsts) == pytest.approx(0.278, abs=0.04)


def test_translation_is_one_sentence_a_request() -> None:
    stream = scenario("translation", 2.0, 100, 600.0, seed=1)
    assert all(request.turn == 0 for request in stream.requests)
    assert max(request.new_tokens for request in stream.requests) < 500
    # The busiest functions go to the first adapters.
    by_calls = [sum(function) for function in extracts.azure_functions()]
    assert by_calls == sorted(by_calls, reverse=True)
    counts = Counter(request.adapter for request in stream.requests)
    assert sum(counts[number] for number in range(10)) > sum(counts[number] for number in range(50, 100))


def test_agents_have_turns_and_tools() -> None:
    stream = scenario("agent", 4.0, 20, 1800.0, seed=1, think_s=20.0)
    longest = max(Counter(request.conversation for request in stream.requests).values())
    assert longest > 8
    films = extracts.taskmaster_dialogs()["films"]
    assert any(said.by_tool for rounds in films for said in rounds)
    # A conversation's adapter and its own function's arrivals go together.
    assert len({(r.conversation, r.adapter) for r in stream.requests}) == len(
        {r.conversation for r in stream.requests}
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_popularity_and_arrivals_can_be_others(name: str) -> None:
    stream = scenario(
        name, 2.0, 5, 100.0, seed=1, popularity="identical", arrivals="even", ranks="cycle(8,16)"
    )
    assert [request.arrival_s for request in stream.requests] == [index / 2 for index in range(200)]
    assert {request.adapter for request in stream.requests} == {0}
    assert stream.ranks == (8, 16, 8, 16, 8)
    # Other arrivals alone leave the popularity of the source.
    counts = Counter(r.adapter for r in scenario(name, 20.0, 5, 600.0, seed=1, arrivals="poisson").requests)
    assert counts[0] > counts[4] > 0


def test_thousands_of_adapters() -> None:
    """FastLibra §6.9: the chatbot with 1,000 adapters, Distinct: conversations take them in turn."""
    stream = scenario("chatbot", 5.0, 1000, 600.0, seed=1, popularity="round-robin")
    firsts = [request.adapter for request in stream.requests if request.turn == 0]
    assert firsts == [index % 1000 for index in range(len(firsts))]


def test_a_popularity_takes_more_adapters_than_there_are_functions() -> None:
    few, many = (
        scenario("agent", 5.0, count, 600.0, seed=1, popularity="round-robin") for count in (100, 200)
    )
    assert {r.adapter for r in many.requests if r.turn == 0} == set(range(200))
    assert [r.arrival_s for r in many.requests] == [r.arrival_s for r in few.requests]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "chatbott"}, "no scenario 'chatbott'; did you mean chatbot"),
        ({"name": "agent", "num_adapters": 101}, "has 100 functions: for 101 adapters name a popularity"),
        ({"name": "translation", "num_adapters": 249, "popularity": "uniform"}, "248 language pairs"),
        ({"num_adapters": 0}, "number of adapters"),
        ({"rate": 0.0}, "rate must be"),
        ({"duration_s": -1.0}, "duration must be"),
        ({"max_tokens": 1}, "no conversation of the data fits into 1 tokens"),
        ({"name": "agent", "max_tokens": 1}, "no conversation of the data fits into 1 tokens"),
        ({"think_s": float("nan")}, "time between turns"),
        ({"popularity": "zip(1)"}, "did you mean zipf"),
        ({"arrivals": "gama(1)"}, "did you mean gamma"),
        ({"ranks": "0"}, "rank must be"),
    ],
)
def test_what_is_refused(options: dict[str, object], words: str) -> None:
    given: dict[str, object] = {
        "name": "chatbot",
        "rate": 1.0,
        "num_adapters": 5,
        "duration_s": 10.0,
        "seed": 0,
    }
    with pytest.raises(ConfigError, match=words):
        scenario(**(given | options))  # type: ignore[arg-type]


def test_interleaving_by_hand() -> None:
    """Gaps of 10 s: an arrival at 9 begins anew, those at 10 and 19 go on where it has waited longest."""
    scripts = iter([Script(0, (Round(5, 1), Round(6, 2))), Script(1, (Round(7, 3), Round(8, 4)))])
    arrivals = [Arrival(0.0), Arrival(9.0), Arrival(19.5), Arrival(19.6)]
    found = interleave("w", arrivals, lambda _: next(scripts), lambda coming: 10.0)
    assert [(r.arrival_s, r.conversation, r.turn, r.adapter) for r in found] == [
        (0.0, 0, 0, 0),
        (9.0, 1, 0, 1),
        (19.5, 0, 1, 0),
        (19.6, 1, 1, 1),
    ]
    assert [(r.new_tokens, r.output_tokens) for r in found] == [(5, 1), (7, 3), (6, 2), (8, 4)]


def test_arrivals_of_an_adapter_take_its_conversations_only() -> None:
    arrivals = [Arrival(0.0, 0), Arrival(50.0, 1), Arrival(60.0, 0), Arrival(61.0, 1)]
    found = interleave(
        "w", arrivals, lambda adapter: Script(adapter or 0, (Round(1, 1),) * 3), lambda coming: 10.0
    )
    assert [(r.adapter, r.conversation, r.turn) for r in found] == [
        (0, 0, 0),
        (1, 1, 0),
        (0, 0, 1),
        (1, 1, 1),
    ]


def test_conversations_are_cut_to_a_context() -> None:
    rounds = (Round(10, 5), Round(10, 5), Round(1, 1))
    assert fitting(rounds, 30) == rounds[:2]
    assert fitting(rounds, 29) == rounds[:1]
    assert fitting(rounds, 14) == ()


def test_the_extracts_are_what_their_readme_says() -> None:
    conversations = extracts.sharegpt_conversations()
    assert len(conversations) == 2000
    assert all(said.new > 0 and said.generated > 0 for rounds in conversations for said in rounds)
    gaps_s = extracts.azure_chat_gaps_s()
    assert len(gaps_s) == 19_365
    assert sum(gaps_s) == pytest.approx(3502, abs=1)
    functions = extracts.azure_functions()
    assert len(functions) == 100
    assert {len(function) for function in functions} == {1440}
    sentences = extracts.sentence_bytes()
    assert len(sentences) == 125
    assert {len(lengths) for lengths in sentences.values()} == {250}
    assert {agent: len(dialogs) for agent, dialogs in extracts.taskmaster_dialogs().items()} == {
        "films": 271,
        "coffee": 1000,
    }
