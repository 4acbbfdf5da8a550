"""Replays a request stream through the engine's own ``Replica`` in virtual time.

The order of events is ``loop``'s, what clients say is ``prompts``'.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.policy.cache_policies import CachePolicy, adapter_pages_limit
from manylora.policy.replica import Replica
from manylora.protocol.commands import Admitted, ClientCommand, Command, Emit, Finish, Ready, Reject
from manylora.protocol.events import AdapterAdded, Arrive, Event, Timer
from manylora.reports import Counters
from manylora.types import BASE, AdapterId, Request, RequestId
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.sim.cold import NOTHING_COLD, ColdCosts
from manylora_lab.sim.device import MergeCosts, SimulatedDevice
from manylora_lab.sim.loop import VirtualLoop
from manylora_lab.sim.prompts import MOST_TOKENS, StreamTurns, client_name, request_of
from manylora_lab.sim.service import Served, service_difference
from manylora_lab.workloads.stream import Stream, StreamRequest

Watch = Callable[[float, Command], None]
"""Told of a command, and when it is given."""
_WARM_TOKENS = 8
_MOST_TIMERS = 10_000
"""The most timers in a row before the waiting requests are taken for forgotten."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What came of one request. Moments count from the stream's start, in seconds.

    The time to the first token is ``queue_s`` (until admitted), ``adapter_s`` and ``kv_s`` (until what it waits
    for is on the device), and the rest: steps.
    """

    request: StreamRequest
    prompt_tokens: int
    handed_s: float
    said: list[int] | None = dataclasses.field(default=None, repr=False, compare=False)
    """The conversation so far, where it goes on after this turn."""
    num_cached: int = 0
    queue_s: float = 0.0
    adapter_s: float = 0.0
    kv_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    num_tokens: int = 0
    is_dropped: bool = False
    """Early abort refused it; it has no tokens, and of its moments only ``end_s`` means something."""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.handed_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens after the first."""
        return (self.end_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def difference_of(outcomes: Iterable[Outcome], queue: QueueConfig) -> dict[str, float] | None:
    """Of service between adapters that both had requests waiting (``service``), by the weights and shares."""
    of_input, of_output, of_cached = queue.weights
    served = (
        Served(
            client_name(outcome.request.adapter),
            outcome.handed_s,
            outcome.handed_s + outcome.queue_s,
            outcome.first_s,
            outcome.end_s,
            of_input * (outcome.prompt_tokens - outcome.num_cached) + of_cached * outcome.num_cached,
            of_output * outcome.num_tokens,
        )
        for outcome in outcomes
        if not outcome.is_dropped
    )
    return service_difference(served, queue.shares)


def check_adapters(stream: Stream, config: PolicyConfig, adapter_pages: Sequence[int]) -> None:
    """Raises ConfigError unless the pages of each of the stream's adapters are known, and the part of the pool
    that the cache policy has for adapters, if any, can hold each."""
    if len(adapter_pages) != len(stream.ranks):
        raise ConfigError(f"{stream.name} has {len(stream.ranks)} adapters, not {len(adapter_pages)}")
    limit, most = adapter_pages_limit(config), max(adapter_pages, default=0)
    if most > limit and limit < config.num_pages:
        raise ConfigError(
            f"an adapter takes {most} pages, and {config.cache.policy} has {limit} of {config.num_pages} for "
            "adapters: raise --device-pool or --cache-set adapter_share"
        )


class Replay(VirtualLoop):
    """One run. ``advance`` hands over one event; ``run`` all of them.

    ``adapter_pages``: what each adapter of the stream takes. ``is_warm``: every adapter is asked for once before
    the stream starts. ``watch`` is told of every command, with its moment. ``merging``: what steps take on merged
    weights, where that was measured. ``copy_limit``: most bytes a second that copies in either direction move.
    ``cache``: a policy that no name stands for, instead of the config's. ``cold``: what cold starts take.
    """

    def __init__(
        self,
        stream: Stream,
        config: PolicyConfig,
        costs: StepCosts,
        adapter_pages: Sequence[int],
        is_warm: bool = True,
        watch: Watch | None = None,
        merging: MergeCosts | None = None,
        copy_limit: int | None = None,
        cache: CachePolicy | None = None,
        cold: ColdCosts = NOTHING_COLD,
    ) -> None:
        check_adapters(stream, config, adapter_pages)
        # The base model is 0 for the policy, so a stream's adapter 0 is its adapter 1.
        pages = {adapter + 1: num_pages for adapter, num_pages in enumerate(adapter_pages)}
        replica = Replica(config, cache)
        device = SimulatedDevice(
            costs, config.page_bytes, pages, config.merge.times, merging, copy_limit=copy_limit, cold=cold
        )
        super().__init__(replica, device, watch)
        self.replica = replica
        self.stream = stream
        self.outcomes: list[Outcome] = []
        self._answer_s = costs.answer_s
        self.counters_at_start = Counters()
        self._began_s: float | None = None
        self._num_handed = 0  # of the stream's requests that arrived
        self._next_arrival_s = math.inf
        self._open: dict[RequestId, Outcome] = {}
        self._prompts = StreamTurns(stream)
        self._warming: dict[RequestId, Request] = {}
        self._queue = config.queue
        self._shares = config.queue.shares
        self._drops = config.admission == "early-abort"
        for adapter, num_pages in pages.items():
            self._tell(AdapterAdded(adapter, num_pages))
        self._warm_up(pages if is_warm else ())

    @property
    def since_start_s(self) -> float | None:
        """Seconds of virtual time since the stream's start; None while adapters are warmed."""
        return None if self._began_s is None else self.now - self._began_s

    def run(self) -> None:
        """Replay to the end; raises RuntimeError when the policy leaves a request waiting for ever."""
        while self._timers_in_a_row <= _MOST_TIMERS and self.advance():
            pass
        num_waiting = len(self._open) + len(self._warming)
        if self._due or num_waiting:
            raise RuntimeError(f"only timers come, if anything, and {num_waiting} requests wait")

    def service_difference(self) -> dict[str, float] | None:
        """See ``difference_of``."""
        return difference_of(self.outcomes, self._queue)

    # ------------------------------------------------------------ events and commands

    def _next(self) -> tuple[float, Event | None]:
        """The next event and when it is due: arrivals, then what the device and the timer bring."""
        while True:
            arrival_s = self._next_arrival_s
            if self._due and self._due[0][0] < arrival_s:
                due, _, _, event = heapq.heappop(self._due)
                if type(event) is not Timer or self._may_fire(event, due):
                    return due, event
            elif arrival_s == math.inf:
                return 0.0, None
            else:
                request = self.stream.requests[self._num_handed]
                self._num_handed += 1
                self._look_ahead()
                if self._prompts.is_free(request):
                    return arrival_s, self._hand_over(request, arrival_s)

    def _look_ahead(self) -> None:
        requests, number = self.stream.requests, self._num_handed
        following_s = requests[number].arrival_s if number < len(requests) else math.inf
        self._next_arrival_s = (self._began_s or 0.0) + following_s

    def _note(self, command: ClientCommand) -> None:
        match command:
            case Admitted():
                outcome = self._open.get(command.request)
                if outcome is not None:
                    outcome.num_cached = command.num_cached
                    outcome.queue_s = self._since_start() - outcome.handed_s
            case Ready():
                outcome = self._open.get(command.request)
                if outcome is not None:
                    outcome.adapter_s, outcome.kv_s = command.adapter_s, command.kv_s
            case Finish():
                self._finish(command)
            case Reject():
                raise ConfigError(f"the workload does not fit: {command.error.message}")

    def _since_start(self) -> float:
        return self.now - (self._began_s or 0.0)

    # ------------------------------------------------------------ requests

    def _warm_up(self, adapters: Sequence[AdapterId] | dict[AdapterId, int]) -> None:
        for adapter in adapters:
            name = f"warm-{adapter}"
            first = -adapter * MOST_TOKENS  # numbers that no piece has
            tokens = tuple(range(first, first + _WARM_TOKENS))
            share = self._shares.get(client_name(adapter - 1), 1.0)
            self._warming[name] = request_of(name, adapter, tokens, 1, share)
            self._put(0.0, Arrive(self._warming[name]))
        if not self._warming:
            self._begin()

    def _begin(self) -> None:
        """The stream starts now."""
        self._began_s = self.now
        self._look_ahead()
        self.counters_at_start = self.report().counters

    def _hand_over(self, request: StreamRequest, moment: float) -> Event:
        prompt, said = self._prompts.take(request)
        name = f"{request.conversation}-{request.turn}"
        outcome = Outcome(request, len(prompt), moment - (self._began_s or 0.0), said)
        self.outcomes.append(outcome)
        self._open[name] = outcome
        adapter = BASE if request.adapter is None else request.adapter + 1
        share = self._shares.get(client_name(request.adapter), 1.0)
        return Arrive(request_of(name, adapter, prompt, request.output_tokens, share))

    def _note_token(self, command: Emit) -> None:
        outcome = self._open.get(command.request)
        if outcome is None:
            return
        outcome.end_s = self.now - (self._began_s or 0.0) + self._answer_s
        if outcome.num_tokens == 0:
            outcome.first_s = outcome.end_s
        outcome.num_tokens += 1
        if outcome.said is not None:
            outcome.said.append(command.token)

    def _finish(self, command: Finish) -> None:
        outcome = self._open.get(command.request)
        if command.error is not None:
            # On a simulated device nothing fails, so it was early abort.
            if not self._drops or command.error.status != 503:
                raise RuntimeError(f"request {command.request} failed: {command.error.message}")
            if outcome is None:
                self._put(self.now, Arrive(self._warming[command.request]))
                return
            outcome.is_dropped, outcome.end_s = True, self._since_start() + self._answer_s
        if command.request in self._warming:
            del self._warming[command.request]
            if not self._warming:
                self._begin()
            return
        following = self._prompts.ended(self._open.pop(command.request).request)
        if following is not None:
            answered_s = self.now + self._answer_s
            self._put(answered_s, self._hand_over(following, answered_s))
