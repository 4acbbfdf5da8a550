"""Replays a request stream against a target and notes when each request's tokens came.

Arrivals are open loop between conversations and closed loop within one: a turn is handed over at its time in
the stream or when the reply before it has ended, whichever is later. Its prompt is the conversation so far, the
target's own replies included, and the turn's own pieces (``bench.prompts``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

from manylora.config.declaring import ConfigError
from manylora_lab.bench.prompts import FIRST_TOKEN, Prompts, joined
from manylora_lab.bench.targets import (
    Prompt,
    PromptKind,
    Target,
    TargetRequest,
    TargetResult,
    check_names,
    has_ids,
)
from manylora_lab.workloads.stream import Stream, StreamRequest, prompt_tokens

_WARM_TOKENS = 8
_WARM_AT_ONCE = 8
_PROGRESS_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to replay. Tokens that the stream does not name are drawn below ``vocab_size``."""

    seed: int = 0
    vocab_size: int = 1000
    adapter_name: str = "adapter-{}"
    """The name of adapter 7 is this with 7 in the braces; or, where there are none, the eighth of these names,
    with commas between them. The base model's name is one too."""
    kind: PromptKind = "tokens"
    """Of the prompts: words for servers that take no token ids, or in a chat's messages."""
    show: Callable[[str], None] | None = None
    """Told of the progress, in a line, every two seconds."""

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_TOKEN:
            raise ConfigError(f"--vocab-size must be above {FIRST_TOKEN}, got {self.vocab_size}")
        if not self._is_template:
            return
        try:
            names = {self.name_of(0), self.name_of(1)}
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(f"--adapter-name {self.adapter_name!r} is no template: {error}") from None
        if len(names) < 2:
            raise ConfigError(f"--adapter-name must hold {{}} for the number, got {self.adapter_name!r}")

    def name_of(self, adapter: int) -> str:
        """The name under which the target serves this adapter. Raises ConfigError where there are fewer names."""
        if self._is_template:
            return self.adapter_name.format(adapter)
        names = [name.strip() for name in self.adapter_name.split(",")]
        if adapter >= len(names):
            raise ConfigError(
                f"the workload has adapter {adapter}, counted from 0, but --adapter-name names only {len(names)}: "
                "name all, or write {} for the number"
            )
        return names[adapter]

    @property
    def _is_template(self) -> bool:
        return "{" in self.adapter_name

    def prompts(self) -> Prompts:
        """What makes the prompts."""
        return Prompts(self.seed, self.vocab_size, self.kind)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestResult:
    """What came of one request. Times in seconds, counted from the start of the replay where they are moments.

    ``adapter``: its name, None for the base; ``workload_rank``: what the workload drew for it (base: 0), which
    the adapter of that name need not have. ``ttft_s`` counts from ``handed_s``; ``waited_s``: how long the turn
    had to wait for the reply before it; ``lag_s``: how late the client itself was. ``tpot_s`` is the mean time
    between tokens after the first; None where there was only one. Where ``error`` is set, times before it are
    those of whatever came.
    """

    conversation: int
    turn: int
    adapter: str | None
    workload_rank: int
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
    itls_s: list[float] = dataclasses.field(default_factory=list)
    text: str = ""

    @property
    def e2e_s(self) -> float:
        """The time from handing over to the last token."""
        return self.end_s - self.handed_s


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """Results in order of arrival. ``error``: why not all requests of the stream could be made, None if all."""

    results: list[RequestResult]
    error: str | None = None


class Halt:
    """Ends a replay before its end, with a reason. Used from one event loop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event = asyncio.Event()

    def call(self, reason: str) -> None:
        """The first reason counts."""
        self.reason = self.reason or reason
        self._event.set()

    async def wait(self) -> str:
        """Waits until it is called."""
        await self._event.wait()
        assert self.reason is not None
        return self.reason


def check_fit(target: Target, stream: Stream, settings: ReplaySettings) -> None:
    """Raise ConfigError where the target could not serve the stream whatever its load."""
    named = {request.adapter for request in stream.requests}
    check_names(target, {settings.name_of(adapter) for adapter in named if adapter is not None})
    requests = stream.requests
    longest = max(
        length + request.output_tokens for length, request in zip(prompt_tokens(requests), requests)
    )
    if target.max_model_len is not None and longest > target.max_model_len:
        raise ConfigError(
            f"the workload has a turn of {longest} tokens, reply included, but the target serves at most "
            f"{target.max_model_len}; --skip-too-long leaves such turns out"
        )
    if target.vocab_size is not None:
        if settings.vocab_size > target.vocab_size:
            raise ConfigError(f"--vocab-size must be at most the model's {target.vocab_size}")
        pieces = (piece for request in requests for piece in request.prompt)
        highest = max((max(piece.tokens) for piece in pieces if piece.tokens is not None), default=0)
        if highest >= target.vocab_size:
            raise ConfigError(
                f"the workload has token {highest}, but the model's vocabulary ends at {target.vocab_size}"
            )


async def warm_adapters(target: Target, names: Sequence[str], settings: ReplaySettings) -> None:
    """Request each adapter once, one token, eight at a time; raises ConfigError where that fails."""
    gate = asyncio.Semaphore(_WARM_AT_ONCE)
    prompts = settings.prompts()

    async def request(name: str) -> None:
        async with gate:
            answer = await target.generate(TargetRequest(prompts.made_up(name, _WARM_TOKENS), 1, name))
        if answer.error is not None:
            raise ConfigError(f"adapter {name!r} could not be used: {answer.error}")

    await asyncio.gather(*map(request, names))


Tell = Callable[[float, int, int], None]
"""Told of the progress: seconds since the start, requests done, and how many of them failed."""


async def replay(
    target: Target,
    stream: Stream,
    settings: ReplaySettings,
    halt: Halt | None = None,
    start_s: float | None = None,
    tell: Tell | None = None,
) -> Replayed:
    """Make the stream's requests, from ``start_s`` on (``time.monotonic``; None: now).

    Nothing is raised for what fails: results tell. Once a turn has failed the rest of its conversation fails with
    it, since their history does not exist. When the target is lost, or ``halt`` is called, what is open fails,
    and nothing more is begun.
    """
    run = _Run(target, stream, settings, halt or Halt())
    run.start_s = time.monotonic() if start_s is None else start_s
    progress = asyncio.create_task(run.report(tell or shown(stream, settings.show)))
    work = asyncio.create_task(run.work())
    halted = asyncio.create_task(run.halt.wait())
    try:
        await asyncio.wait({work, halted}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (progress, work, halted):
            task.cancel()
        await asyncio.gather(progress, work, halted, return_exceptions=True)
    if any(result.error is not None for result in run.results):
        await run.check_target()
    return Replayed(sorted(run.results, key=lambda result: result.arrival_s), run.halt.reason)


def shown(stream: Stream, show: Callable[[str], None] | None) -> Tell | None:
    """``show`` told lines."""
    if show is None:
        return None
    total = len(stream.requests)
    return lambda elapsed_s, done, failed: show(
        f"{elapsed_s:6.1f} s: {done} of {total} requests done, {failed} failed"
    )


def show_on_stderr(line: str) -> None:
    """Print a line on stderr, as a ``ReplaySettings.show``."""
    print(line, file=sys.stderr, flush=True)


class _Run:
    """One replay."""

    def __init__(self, target: Target, stream: Stream, settings: ReplaySettings, halt: Halt) -> None:
        self.halt = halt
        self.start_s = 0.0
        self.results: list[RequestResult] = []
        self._target = target
        self._stream = stream
        self._settings = settings
        self._prompts = settings.prompts()
        self._is_checking = False
        self._conversations: dict[int, list[StreamRequest]] = {}
        for request in stream.requests:
            self._conversations.setdefault(request.conversation, []).append(request)
        # What is due at once must not cost time when the clock runs.
        self._openings = {
            turns[0].conversation: self._prompts.new(turns[0])
            for turns in self._conversations.values()
            if turns[0].arrival_s == 0
        }

    async def work(self) -> None:
        """All conversations, each begun at its time."""
        async with asyncio.TaskGroup() as tasks:
            for number, turns in self._conversations.items():
                # Made before its time comes, too.
                opening = self._openings.pop(number, None) or self._prompts.new(turns[0])
                await self._sleep_until(turns[0].arrival_s)
                tasks.create_task(self._converse(turns, opening))

    async def _converse(self, turns: Sequence[StreamRequest], opening: Prompt) -> None:
        """One conversation, turn after turn."""
        history = self._prompts.nothing()
        free_s = 0.0  # when the reply before has ended
        failure: str | None = None
        for turn in turns:
            new = opening if turn is turns[0] else self._prompts.new(turn)
            due_s = max(turn.arrival_s, free_s)
            if failure is None:
                await self._sleep_until(due_s)
            prompt = joined(history, new)
            asked = self._asked(turn, due_s, len(prompt) if has_ids(prompt) else turn.new_tokens)
            if failure is not None:
                self.results.append(dataclasses.replace(asked, error=failure))
                continue
            result, answer = await self._ask(asked, prompt, turn.output_tokens)
            free_s = result.end_s
            if result.error is not None:
                failure = "an earlier turn of its conversation failed"
            else:
                history = joined(prompt, self._prompts.reply(answer))

    def _asked(self, turn: StreamRequest, due_s: float, num_prompt: int) -> RequestResult:
        handed_s = time.monotonic() - self.start_s
        return RequestResult(
            turn.conversation, turn.turn,
            None if turn.adapter is None else self._settings.name_of(turn.adapter),
            0 if turn.adapter is None else self._stream.ranks[turn.adapter],
            turn.arrival_s, handed_s, due_s - turn.arrival_s, max(0.0, handed_s - due_s), num_prompt,
        )  # fmt: skip

    async def _ask(
        self, asked: RequestResult, prompt: Prompt, num_tokens: int
    ) -> tuple[RequestResult, TargetResult]:
        """What came of it, noted as well, and the answer."""
        try:
            answer = await self._target.generate(TargetRequest(prompt, num_tokens, asked.adapter))
        except asyncio.CancelledError:
            answer = TargetResult(error=self.halt.reason or "cancelled")
            self.results.append(self._result(asked, answer, num_tokens))
            raise
        result = self._result(asked, answer, num_tokens)
        self.results.append(result)
        if result.error is not None:
            await self.check_target()
        return result, answer

    def _result(self, asked: RequestResult, answer: TargetResult, num_tokens: int) -> RequestResult:
        found, error = answer.num_tokens, answer.error
        if error is None and (found == 0 or (self._target.is_exact and found != num_tokens)):
            error = f"{found} tokens came instead of {num_tokens}"
        if answer.first_s is None:
            return dataclasses.replace(asked, error=error, end_s=time.monotonic() - self.start_s)
        return dataclasses.replace(
            asked,
            error=error,
            prompt_tokens=answer.prompt_length or asked.prompt_tokens,
            reply_tokens=found,
            ttft_s=answer.first_s - self.start_s - asked.handed_s,
            tpot_s=(answer.last_s - answer.first_s) / (found - 1) if found > 1 else None,
            end_s=answer.last_s - self.start_s,
            cached_tokens=answer.cached_tokens,
            parts=answer.parts,
            itls_s=answer.itls_s,
            text=answer.text,
        )

    async def check_target(self) -> None:
        """Halt where the target is lost; for after a failure."""
        if self._is_checking or self.halt.reason is not None:
            return
        self._is_checking = True
        try:
            reason = await self._target.lost()
        finally:
            self._is_checking = False
        if reason is not None:
            self.halt.call(reason)

    async def _sleep_until(self, moment_s: float) -> None:
        # At least once around the loop, so that a late conversation still hears the answers.
        await asyncio.sleep(max(0.0, self.start_s + moment_s - time.monotonic()))

    async def report(self, tell: Tell | None) -> None:
        """Report progress for ever."""
        while tell is not None:
            await asyncio.sleep(_PROGRESS_S)
            failed = sum(result.error is not None for result in self.results)
            tell(time.monotonic() - self.start_s, len(self.results), failed)
