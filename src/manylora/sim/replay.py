"""Replays a chat trace through the engine's own ``Replica`` in virtual time.

Steps are synchronous, as in ``engine.driver``: what comes while one runs is handed over when it has ended,
before its StepDone. A conversation's token at position p is its number times 2**20, plus p: so a turn's
prompt spells the history, the replies of the simulated device included.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import time
from collections.abc import Callable, Mapping, Sequence

from manylora.config import ConfigError, PolicyConfig
from manylora.policy.counters import Counters
from manylora.policy.replica import Replica
from manylora.protocol import (
    AdapterAdded,
    Admitted,
    Arrive,
    Command,
    Emit,
    Event,
    Finish,
    Reject,
    SetTimer,
    StepDone,
    Timer,
)
from manylora.sim.costs import DeviceCosts
from manylora.sim.device import SimulatedDevice
from manylora.types import AdapterId, Request, RequestId, SamplingParams
from manylora.workloads.chat import Turn

_MOST_TOKENS = 2**20
_WARM_TOKENS = 8
_MOST_TIMERS = 10_000
"""In a row, before those who wait are taken for forgotten."""


@dataclasses.dataclass(slots=True)
class TurnOutcome:
    """When one turn was handed over, gave its first token and its last; in seconds from the trace's start."""

    turn: Turn
    handed_s: float
    num_cached: int = 0
    first_s: float = 0.0
    end_s: float = 0.0
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.handed_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens after the first."""
        return (self.end_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is replayed. ``adapter_pages``: what each adapter of the trace takes, and others that are served.

    ``rate_scale`` 2: the trace's arrivals come twice as fast. ``is_warm``: every adapter is asked for once
    before the trace starts.
    """

    turns: Sequence[Turn]
    adapter_pages: Mapping[int, int]
    rate_scale: float = 1.0
    is_warm: bool = True

    def __post_init__(self) -> None:
        if not self.turns:
            raise ConfigError("there are no turns to replay")
        if not 0 < self.rate_scale < float("inf"):
            raise ConfigError(f"rate_scale must be above 0, got {self.rate_scale}")
        unknown = {turn.adapter for turn in self.turns} - set(self.adapter_pages)
        if unknown:
            raise ConfigError(f"nothing says how many pages adapter {min(unknown)} takes")


class Replay:
    """One run. ``advance`` hands over one event; ``run`` all of them.

    ``watch`` is told of every command, with its moment.
    """

    def __init__(
        self,
        load: Load,
        config: PolicyConfig,
        costs: DeviceCosts,
        watch: Callable[[float, Command], None] | None = None,
    ) -> None:
        self.replica = Replica(config)
        self.now = 0.0
        self.outcomes: list[TurnOutcome] = []
        self.counters_at_start = Counters()
        self.num_events = 0
        self.handle_s = 0.0  # of real time
        self._load = load
        self._watch = watch
        # The base model is 0 for the policy, so a trace's adapter 0 is its adapter 1.
        pages = {adapter + 1: num_pages for adapter, num_pages in load.adapter_pages.items()}
        self._device = SimulatedDevice(costs, config.page_bytes, pages)
        self._due: list[tuple[float, bool, int, Event]] = []
        self._num_due = 0
        self._timer: Timer | None = None
        self._timers_in_a_row = 0
        self._began_s = 0.0
        self._warming: set[RequestId] = set()
        self._open: dict[RequestId, TurnOutcome] = {}
        self._next_turns: dict[int, collections.deque[Turn]] = {}
        for turn in sorted(load.turns, key=lambda turn: turn.arrival_s):
            self._next_turns.setdefault(turn.conversation, collections.deque()).append(turn)
        for adapter, num_pages in sorted(pages.items()):
            self._put(0.0, AdapterAdded(adapter, num_pages))
        self._warm_up(sorted(pages) if load.is_warm else [])

    def run(self) -> None:
        """Replay to the end; raises RuntimeError when the policy leaves somebody waiting for ever."""
        while self._timers_in_a_row <= _MOST_TIMERS and self.advance():
            pass
        num_waiting = len(self._open) + len(self._warming)
        if self._due or num_waiting:
            raise RuntimeError(f"only timers come, if anything, and {num_waiting} requests wait")

    def advance(self) -> bool:
        """Hand the next event to the replica and obey; False when there is none."""
        while self._due:
            due, _, _, event = heapq.heappop(self._due)
            if isinstance(event, Timer) and event is not self._timer:
                continue  # another was set since
            self.now = max(self.now, due, self._device.busy_until)
            began = time.perf_counter()
            commands = self.replica.handle(event, self.now)
            self.handle_s += time.perf_counter() - began
            self.num_events += 1
            self._timers_in_a_row = self._timers_in_a_row + 1 if isinstance(event, Timer) else 0
            for command in commands:
                self._obey(command)
            return True
        return False

    # ------------------------------------------------------------ events and commands

    def _put(self, due: float, event: Event) -> None:
        """Hand over the event then. Of what is due at once, a step's end comes last."""
        self._num_due += 1
        heapq.heappush(self._due, (due, isinstance(event, StepDone), self._num_due, event))

    def _obey(self, command: Command) -> None:
        if self._watch is not None:
            self._watch(self.now, command)
        match command:
            case SetTimer():
                self._timer = Timer()
                self._put(command.at, self._timer)
            case Admitted():
                if command.request in self._open:
                    self._open[command.request].num_cached = command.num_cached
            case Emit():
                if command.request in self._open:
                    self._note_token(self._open[command.request])
            case Finish():
                self._finish(command)
            case Reject():
                raise ConfigError(f"the trace does not fit: {command.error.message}")
            case _:
                answer = self._device.obey(command, self.now)
                if answer is not None:
                    self._put(*answer)

    # ------------------------------------------------------------ conversations

    def _warm_up(self, adapters: list[AdapterId]) -> None:
        for adapter in adapters:
            request = f"warm-{adapter}"
            self._warming.add(request)
            # Conversations of negative numbers are nobody's.
            self._put(0.0, Arrive(_request(request, adapter, -adapter, _WARM_TOKENS, 1)))
        if not adapters:
            self._begin()

    def _begin(self) -> None:
        """The trace starts now."""
        self._began_s = self.now
        self.counters_at_start = dataclasses.replace(self.replica.counters)
        for conversation in list(self._next_turns):
            self._hand_over_next(conversation)

    def _hand_over_next(self, conversation: int) -> None:
        """The conversation's next turn comes at its time, or now where that has passed."""
        turns = self._next_turns[conversation]
        if not turns:
            del self._next_turns[conversation]
            return
        turn = turns.popleft()
        handed = max(self.now, self._began_s + turn.arrival_s / self._load.rate_scale)
        request = f"{conversation}-{turn.turn}"
        outcome = TurnOutcome(turn, handed - self._began_s)
        self.outcomes.append(outcome)
        self._open[request] = outcome
        prompt = _request(request, turn.adapter + 1, conversation, turn.prompt_tokens, turn.reply_tokens)
        self._put(handed, Arrive(prompt))

    def _note_token(self, outcome: TurnOutcome) -> None:
        outcome.end_s = self.now - self._began_s
        outcome.first_s = outcome.first_s if outcome.num_tokens else outcome.end_s
        outcome.num_tokens += 1

    def _finish(self, command: Finish) -> None:
        if command.error is not None:
            raise RuntimeError(f"request {command.request} failed: {command.error.message}")
        if command.request in self._warming:
            self._warming.remove(command.request)
            if not self._warming:
                self._begin()
        else:
            self._hand_over_next(self._open.pop(command.request).turn.conversation)


def _request(
    name: RequestId, adapter: AdapterId, conversation: int, num_prompt: int, num_reply: int
) -> Request:
    first = conversation * _MOST_TOKENS
    params = SamplingParams(max_tokens=num_reply, temperature=0.0, seed=0, ignore_eos=True)
    return Request(name, adapter, tuple(range(first, first + num_prompt)), params)
