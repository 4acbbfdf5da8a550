"""FastLibra's three scenarios (§6.2), from data that comes with manylora; what stands for what is in the notes.

The paper: a chatbot (LMSYS-33k: its times, its models as adapters), translation (OPUS-100, an adapter for each
language pair) and personal agents (Taskmaster, an adapter for each task), the latter two with arrivals of the n
most called functions of the Azure Functions trace mapped to the n adapters. Ranks are 32 or 64 at random (§6.1).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from random import Random

from manylora.config.declaring import ConfigError
from manylora_lab.workloads import extracts
from manylora_lab.workloads.arrivals import check_load, from_gaps, parse_process
from manylora_lab.workloads.assembly import BYTES_PER_TOKEN
from manylora_lab.workloads.extracts import Round
from manylora_lab.workloads.interleaving import Arrival, Script, interleave
from manylora_lab.workloads.popularity import Popularity, check_adapters, parse_ranks
from manylora_lab.workloads.stream import Stream, in_order
from manylora_lab.workloads.terms import suggestion

THINK_S = 60.0
"""Mean time from a turn to the next, where a person has to read and write: our assumption (the papers name none).
In Mooncake's conversation trace the median from a request to one that extends it is some 126 s."""
TOOL_S = 1.0
"""Time from a model's call of a tool to its next turn: our assumption."""
MAX_TOKENS = 4096
"""Conversations end before they outgrow this context, Llama 2's."""
RANKS = "random(32,64)"
"""FastLibra §6.1."""
CHATBOT_POPULARITY = "zipf(1)"
"""A log-log fit to the request shares of ChatLMSYS's 16 models (as MuxServe publishes them) has exponent 1.02."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """How much is asked of how many, and the dice."""

    rate: float
    num_adapters: int
    duration_s: float
    max_tokens: int
    seed: int

    def dice(self, purpose: str) -> Random:
        """A generator of its own for each purpose, so that one choice does not move the others."""
        return Random(f"{self.seed} {purpose}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Talk:
    """``begin`` draws the next conversation of an adapter; ``notes`` say from what."""

    begin: Callable[[int], tuple[Round, ...]]
    notes: tuple[str, ...]


def scenario(
    name: str,
    rate: float,
    num_adapters: int,
    duration_s: float,
    seed: int,
    *,
    popularity: str | None = None,
    arrivals: str | None = None,
    ranks: str = RANKS,
    think_s: float = THINK_S,
    max_tokens: int = MAX_TOKENS,
) -> Stream:
    """'chatbot', 'translation' or 'agent': ``rate`` turns a second for ``duration_s`` seconds.

    ``popularity`` and ``arrivals``: instead of the recorded ones, in the words of ``Popularity`` and
    ``parse_process``. Where both are an Azure function's, an adapter's turns come when its function is called;
    otherwise a conversation draws its adapter when it begins. ``think_s``: mean of the exponential time from one
    turn to the next. ``max_tokens``: no conversation grows longer. Raises ConfigError.
    """
    if name not in SCENARIOS:
        raise ConfigError(f"there is no scenario {name!r}{suggestion(name, SCENARIOS)}")
    check_load(rate, duration_s)
    check_adapters(num_adapters)
    if not 0 <= think_s < math.inf:
        raise ConfigError(f"the time between turns must be a number of seconds, got {think_s:g}")
    load = _Load(rate, num_adapters, duration_s, max_tokens, seed)
    talk = SCENARIOS[name](load)
    moments, arrival_note = _arrivals(name, load, popularity, arrivals)
    draws, popularity_note = _adapters(name, load, popularity)
    gaps = load.dice("gaps")

    def begin(adapter: int | None) -> Script:
        number = next(draws) if adapter is None else adapter
        return Script(number, talk.begin(number))

    def gap_s(coming: Round) -> float:
        return TOOL_S if coming.by_tool else gaps.expovariate(1) * think_s

    requests = interleave(name, moments, begin, gap_s)
    notes = (*talk.notes, f"arrivals: {arrival_note}", f"popularity: {popularity_note}", f"seed: {seed}")
    if name != "translation":
        notes += (
            f"from one turn to the next: {think_s:g} s, exponential; {TOOL_S:g} s for a tool (assumed)",
        )
    return in_order(name, requests, parse_ranks(ranks, num_adapters, load.dice("ranks")), notes)


def _arrivals(
    name: str, load: _Load, popularity: str | None, arrivals: str | None
) -> tuple[list[Arrival], str]:
    dice = load.dice("arrivals")
    if arrivals is not None:
        moments = parse_process(arrivals)(load.rate, load.duration_s, dice)
        return [Arrival(moment) for moment in moments], arrivals
    if name == "chatbot":
        gaps_s = extracts.azure_chat_gaps_s()
        moments = from_gaps(gaps_s, load.rate, load.duration_s, dice.randrange(len(gaps_s)))
        return [Arrival(moment) for moment in moments], (
            "Azure's chat service, November 2023 (CC BY 4.0), stretched to the rate; for those of LMSYS-33k"
        )
    if popularity is None:
        calls = _function_calls(load, load.num_adapters, dice)
    else:  # whose call it is does not matter, so that there may be more adapters than functions
        num_functions = min(load.num_adapters, len(extracts.azure_functions()))
        calls = [Arrival(call.at_s) for call in _function_calls(load, num_functions, dice)]
    return calls, (
        "drawn from the calls by minute of the Azure Functions trace 2019 (CC BY 4.0), from a day's sample"
    )


def _function_calls(load: _Load, num_functions: int, dice: Random) -> list[Arrival]:
    """Calls of the most called functions, function i for adapter i, in a window as long as the stream.

    Each of rate * duration arrivals draws its function and minute by the recorded calls and a moment within.
    """
    functions = _functions(num_functions)
    minutes = math.ceil(load.duration_s / 60)
    cells = list(itertools.product(range(len(functions)), range(minutes)))
    calls: list[int] = []
    while not any(calls):  # a short window of few functions may be silent
        start = dice.randrange(len(functions[0]))
        calls = [functions[function][(start + minute) % len(functions[0])] for function, minute in cells]
    drawn = dice.choices(cells, weights=calls, k=max(1, round(load.rate * load.duration_s)))
    scale = load.duration_s / minutes
    return sorted(Arrival((minute + dice.random()) * scale, function) for function, minute in drawn)


def _functions(num_adapters: int) -> list[tuple[int, ...]]:
    functions = extracts.azure_functions()
    if num_adapters > len(functions):
        raise ConfigError(
            f"the extract of the Azure Functions trace has {len(functions)} functions: "
            f"for {num_adapters} adapters name a popularity, such as zipf(1)"
        )
    return functions[:num_adapters]


def _adapters(name: str, load: _Load, popularity: str | None) -> tuple[Iterator[int], str]:
    """Adapters of new conversations, where arrivals do not say them."""
    dice = load.dice("adapters")
    if popularity is None and name != "chatbot":
        calls = [sum(function) for function in _functions(load.num_adapters)]
        numbers = range(load.num_adapters)
        draws = (dice.choices(numbers, weights=calls)[0] for _ in itertools.repeat(None))
        return (
            draws,
            f"the {load.num_adapters} most called functions of the Azure Functions trace 2019, as mapped",
        )
    given = Popularity.parse(popularity or CHATBOT_POPULARITY)
    note = str(given) if popularity else f"{given}, near to ChatLMSYS's; for that of LMSYS-33k's models"
    return given.draws(load.num_adapters, dice), note


def _chatbot(load: _Load) -> _Talk:
    cut = (extracts.fitting(rounds, load.max_tokens) for rounds in extracts.sharegpt_conversations())
    conversations = [rounds for rounds in cut if rounds]
    _check_any(conversations, load)
    dice = load.dice("talk")
    note = (
        "lengths: conversations of ShareGPT in Llama-2 tokens (Apache-2.0), for LMSYS-33k's; "
        f"cut at {load.max_tokens} tokens"
    )
    return _Talk(lambda _adapter: dice.choice(conversations), (note,))


def _translation(load: _Load) -> _Talk:
    sentences = extracts.sentence_bytes()
    pairs = [pair for other in sentences if other != "eng" for pair in (("eng", other), (other, "eng"))]
    if load.num_adapters > len(pairs):
        raise ConfigError(
            f"there are {len(pairs)} language pairs, fewer than {load.num_adapters} adapters; "
            "the chatbot takes any number"
        )
    dice = load.dice("talk")
    chosen = dice.sample(pairs, load.num_adapters)

    def begin(adapter: int) -> tuple[Round, ...]:
        source, target = chosen[adapter]
        line = dice.randrange(len(sentences[source]))
        return (Round(_tokens(sentences[source][line]), _tokens(sentences[target][line])),)

    shown = ", ".join(f"{source}-{target}" for source, target in chosen[:3])
    return _Talk(
        begin,
        (
            "lengths: sentences of NTREX-128 (CC BY-SA 4.0) for OPUS-100's, an adapter for each pair of English "
            f"and another language ({shown}, ...), {BYTES_PER_TOKEN} UTF-8 bytes a token (assumed)",
        ),
    )


def _agent(load: _Load) -> _Talk:
    dialogs: dict[str, list[tuple[Round, ...]]] = {}
    for agent, its_dialogs in extracts.taskmaster_dialogs().items():
        in_tokens = (
            tuple(Round(_tokens(r.new), _tokens(r.generated), r.by_tool) for r in rounds)
            for rounds in its_dialogs
        )
        cut = (extracts.fitting(rounds, load.max_tokens) for rounds in in_tokens)
        dialogs[agent] = [rounds for rounds in cut if rounds]
        _check_any(dialogs[agent], load)
    dice = load.dice("talk")
    tasks = [dice.choice(sorted(dialogs)) for _ in range(load.num_adapters)]
    note = (
        "lengths: dialogs of Taskmaster TM-3 (film tickets, with tools) and TM-4 (coffee) (CC BY 4.0), for "
        f"Taskmaster's tasks; each adapter has one of the two, {tasks.count('films')} of {len(tasks)} the first; "
        f"{BYTES_PER_TOKEN} characters a token (assumed)"
    )
    return _Talk(lambda adapter: dice.choice(dialogs[tasks[adapter]]), (note,))


def _check_any(conversations: list[tuple[Round, ...]], load: _Load) -> None:
    if not conversations:
        raise ConfigError(f"no conversation of the data fits into {load.max_tokens} tokens")


def _tokens(count: int) -> int:
    """The tokens of a text of so many bytes or characters."""
    return max(1, math.ceil(count / BYTES_PER_TOKEN))


SCENARIOS: dict[str, Callable[[_Load], _Talk]] = {
    "chatbot": _chatbot,
    "translation": _translation,
    "agent": _agent,
}
"""What is said in each, by name."""
