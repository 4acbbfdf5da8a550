"""Replays a chat trace against a target, turn by turn, and notes when each turn's tokens came.

Arrivals are open loop between conversations and closed loop within one: a turn is handed over at its time in
the trace or when the reply before it has ended, whichever is later. Its prompt is the conversation so far, the
target's own replies included, and random new tokens that depend on seed, conversation and turn alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Sequence

from manylora.bench.targets import Call, Target, check_names
from manylora.config import ConfigError
from manylora.workloads.chat import Turn, conversations

_FIRST_TOKEN = 3
"""Ids below it are special tokens in most vocabularies."""
_WARM_TOKENS = 8
_WARM_AT_ONCE = 8
_PROGRESS_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to replay. ``rate_scale`` 2: twice as fast. Tokens are drawn below ``vocab_size``."""

    rate_scale: float = 1.0
    seed: int = 0
    vocab_size: int = 1000
    adapter_name: str = "adapter-{}"
    """The name of adapter 7 is this with 7 in the braces."""
    show: Callable[[str], None] | None = None
    """Told of the progress, in a line, every two seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.rate_scale < float("inf"):
            raise ConfigError(f"--rate-scale must be above 0, got {self.rate_scale}")
        if self.vocab_size <= _FIRST_TOKEN:
            raise ConfigError(f"--vocab-size must be above {_FIRST_TOKEN}, got {self.vocab_size}")
        try:
            names = {self.name_of(0), self.name_of(1)}
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(f"--adapter-name {self.adapter_name!r} is no template: {error}") from None
        if len(names) < 2:
            raise ConfigError(f"--adapter-name must hold {{}} for the number, got {self.adapter_name!r}")

    def name_of(self, adapter: int) -> str:
        """The name under which the target serves this adapter."""
        return self.adapter_name.format(adapter)


@dataclasses.dataclass(frozen=True, slots=True)
class TurnResult:
    """What came of one turn. Times in seconds, counted from the start of the replay where they are moments.

    ``ttft_s`` counts from ``handed_s``; ``waited_s``: how long the turn had to wait for the reply before it;
    ``lag_s``: how late the client itself was. ``tpot_s`` is the mean time between tokens after the first; None
    where there was only one. Where ``error`` is set, all after ``prompt_tokens`` means nothing.
    """

    conversation: int
    turn: int
    adapter: str
    rank: int
    arrival_s: float
    handed_s: float
    waited_s: float
    lag_s: float
    prompt_tokens: int
    error: str | None = None
    reply_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float | None = None
    end_s: float = 0.0
    cached_tokens: int | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)


def check_fit(target: Target, turns: Sequence[Turn], settings: ReplaySettings) -> None:
    """Raise ConfigError where the target could not serve the trace whatever its load."""
    check_names(target, {settings.name_of(turn.adapter) for turn in turns})
    longest = max(turn.prompt_tokens + turn.reply_tokens for turn in turns)
    if target.max_model_len is not None and longest > target.max_model_len:
        raise ConfigError(
            f"the trace has a turn of {longest} tokens, reply included, but the target serves at most "
            f"{target.max_model_len}"
        )
    if target.vocab_size is not None and settings.vocab_size > target.vocab_size:
        raise ConfigError(f"--vocab-size must be at most the model's {target.vocab_size}")


async def warm_adapters(target: Target, names: Sequence[str], settings: ReplaySettings) -> None:
    """Request each adapter once, one token, eight at a time; raises ConfigError where that fails."""
    gate = asyncio.Semaphore(_WARM_AT_ONCE)

    async def request(name: str) -> None:
        async with gate:
            answer = await target.generate(Call(_random_tokens(settings, name, _WARM_TOKENS), 1, name))
        if answer.error is not None:
            raise ConfigError(f"adapter {name!r} could not be used: {answer.error}")

    await asyncio.gather(*map(request, names))


async def replay(target: Target, turns: Sequence[Turn], settings: ReplaySettings) -> list[TurnResult]:
    """All turns' results in order of arrival. Nothing is raised for what fails: results tell.

    Once a turn has failed the rest of its conversation fails with it, since their history does not exist.
    """
    # Made before the clock starts: it must not cost time during the run.
    texts = {
        (turn.conversation, turn.turn): _random_tokens(
            settings, f"{turn.conversation}/{turn.turn}", turn.user_tokens
        )
        for turn in turns
    }
    results: list[TurnResult] = []
    start_s = time.monotonic()
    progress = asyncio.create_task(_report(results, len(turns), start_s, settings.show))
    try:
        await asyncio.gather(
            *(
                _converse(target, its_turns, texts, settings, start_s, results)
                for its_turns in conversations(turns).values()
            )
        )
    finally:
        progress.cancel()
    return sorted(results, key=lambda result: result.arrival_s)


async def _converse(
    target: Target,
    turns: Sequence[Turn],
    texts: dict[tuple[int, int], tuple[int, ...]],
    settings: ReplaySettings,
    start_s: float,
    results: list[TurnResult],
) -> None:
    """One conversation, turn after turn."""
    history: tuple[int, ...] = ()
    failure: str | None = None
    free_s = 0.0  # when the reply before has ended
    for turn in turns:
        arrival_s = turn.arrival_s / settings.rate_scale
        due_s = max(arrival_s, free_s)
        if failure is None:
            await asyncio.sleep(start_s + due_s - time.monotonic())
        handed_s = time.monotonic() - start_s
        prompt = history + texts[turn.conversation, turn.turn]
        result = TurnResult(
            turn.conversation, turn.turn, settings.name_of(turn.adapter), turn.rank,
            arrival_s, handed_s, due_s - arrival_s, handed_s - due_s, len(prompt),
            error=failure and "an earlier turn of its conversation failed",
        )  # fmt: skip
        if failure is None:
            result, reply = await _ask(target, result, prompt, turn.reply_tokens, start_s)
            history, free_s, failure = prompt + reply, result.end_s, result.error
        results.append(result)


async def _ask(
    target: Target, asked: TurnResult, prompt: tuple[int, ...], num_tokens: int, start_s: float
) -> tuple[TurnResult, tuple[int, ...]]:
    """The turn's result, and its reply."""
    answer = await target.generate(Call(prompt, num_tokens, asked.adapter))
    error = answer.error
    if error is None and len(answer.tokens) != num_tokens:
        error = f"{len(answer.tokens)} tokens came instead of {num_tokens}"
    if error is not None or answer.first_s is None:
        return dataclasses.replace(asked, error=error, end_s=time.monotonic() - start_s), ()
    spread_s = answer.last_s - answer.first_s
    result = dataclasses.replace(
        asked,
        reply_tokens=num_tokens,
        ttft_s=answer.first_s - start_s - asked.handed_s,
        tpot_s=spread_s / (num_tokens - 1) if num_tokens > 1 else None,
        end_s=answer.last_s - start_s,
        cached_tokens=answer.cached_tokens,
        parts=answer.parts,
    )
    return result, tuple(answer.tokens)


def _random_tokens(settings: ReplaySettings, what: str, count: int) -> tuple[int, ...]:
    generator = random.Random(f"{settings.seed}/{what}")
    return tuple(generator.choices(range(_FIRST_TOKEN, settings.vocab_size), k=count))


async def _report(
    results: Sequence[TurnResult], total: int, start_s: float, show: Callable[[str], None] | None
) -> None:
    while show is not None:
        await asyncio.sleep(_PROGRESS_S)
        failed = sum(result.error is not None for result in results)
        show(f"{time.monotonic() - start_s:6.1f} s: {len(results)} of {total} turns done, {failed} failed")


def show_on_stderr(line: str) -> None:
    """For ``ReplaySettings.show``."""
    print(line, file=sys.stderr, flush=True)
