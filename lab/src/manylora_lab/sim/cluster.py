"""A cluster in virtual time: replicas with their own policies, and one router between them and the clients.

One heap orders the events of all. The router knows of a replica what has reached it: a report is on its way
for ``report_delay_s``, and what goes between a front end, the router and a replica for ``wire_s`` each way.
Decides nothing itself: ``router.router`` and ``policy.replica`` do.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Sequence

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import Command, Finish, Machine, SetTimer
from manylora.protocol.events import Timer
from manylora.protocol.routing import (
    Asked,
    AskReport,
    Assign,
    Fence,
    Listed,
    Place,
    Planned,
    Progress,
    RankCosts,
    Refuse,
    ReplicaUp,
    RouterCommand,
    RouterEvent,
    ScaleHint,
    Solve,
    Solved,
    Unplace,
    Withdraw,
    Withdrawn,
)
from manylora.reports import Counters
from manylora.router.router import Router
from manylora.types import Request, RequestId
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.sim.cluster_facts import facts_of
from manylora_lab.sim.cluster_replica import ReplicaLoop
from manylora_lab.sim.cold import NOTHING_COLD, ColdCosts
from manylora_lab.sim.device import Kernel, MergeCosts, SimulatedDevice
from manylora_lab.sim.front_end import FrontEnd, most_output
from manylora_lab.sim.loop import VirtualDevice
from manylora_lab.sim.prompts import MOST_TOKENS, client_name, request_of
from manylora_lab.sim.replay import check_adapters
from manylora_lab.workloads.stream import Stream, StreamRequest

REPORT_DELAY_S = 0.05
HEARTBEAT_S = 1.0
"""A replica on which nothing happens reports so often."""
MOST_REPORT_DELAY_S = RouterConfig().lease_s - HEARTBEAT_S
"""Were reports older, a router would give up replicas that live before it has heard of them."""
EAGER_ADAPTERS = 2000
"""Where there are more, a replica learns of an adapter with its first request, and none is warmed."""
SOLVE_S = 0.2
"""After which an answer to dLoRA's programme is there, however long the solver really took
(``RouterTimes``)."""
STUCK_S = 3600.0
"""Without a request that comes or ends for so long, those that wait are taken for forgotten."""

_WARM_TOKENS = 8
_REPORT, _NEWS, _CLOCK, _LOOP = range(4)
"""Of what is due at one moment, the order in which it is handed over."""

_Due = tuple[float, int, int, object]
Solver = Callable[[Solve], Solved]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """What one replica is. ``adapter_pages``: what each adapter of the stream takes there. ``machine``,
    ``device``: what decides and what takes time, where these are not the engine's policy and its device.
    ``rank_costs``: what the router is told of these."""

    config: PolicyConfig
    costs: StepCosts
    adapter_pages: Sequence[int]
    numerics: str = ""
    kernel: Kernel = "shared"
    machine: Callable[[PolicyConfig], Machine] = Replica
    device: Callable[[Member], VirtualDevice] | None = None
    merging: MergeCosts | None = None
    copy_limit: int | None = None
    cold: ColdCosts = NOTHING_COLD
    rank_costs: RankCosts | None = None

    def make_device(self) -> VirtualDevice:
        """A new one."""
        if self.device is not None:
            return self.device(self)
        pages = dict(enumerate(self.adapter_pages, 1))
        return SimulatedDevice(
            self.costs, self.config.page_bytes, pages, self.config.merge.times, self.merging, self.kernel,
            self.copy_limit, self.cold,
        )  # fmt: skip


@dataclasses.dataclass(slots=True)
class RouterTimes:
    """Real seconds that the router took. ``asked_s``: for each request that came; ``chosen_s``: those of the ones
    that went to a replica at once, by replica; ``solved_s``: that a solver took for each programme, which are not
    the router's."""

    asked_s: list[float] = dataclasses.field(default_factory=list)
    chosen_s: dict[int, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    solved_s: list[float] = dataclasses.field(default_factory=list)
    total_s: float = 0.0
    num_events: int = 0


Journal = Callable[[int | None, float, object, Sequence[object]], None]
"""Told of every event with its machine (a replica's place, None: the router), moment, and what it led to."""


class VirtualCluster:
    """One run: ``run`` replays the stream to its end.

    ``router``: None only for a replica that is alone. ``is_warm``: every adapter is asked for once on each
    replica before the stream starts, where there are no more than EAGER_ADAPTERS. ``tells_lengths``: the router
    is told how long each reply will be; else what clients allow, which is as much for all.
    """

    def __init__(
        self,
        stream: Stream,
        members: Sequence[Member],
        router: RouterConfig | None,
        *,
        is_warm: bool = True,
        report_delay_s: float = REPORT_DELAY_S,
        wire_s: float = 0.0,
        solve: Solver | None = None,
        tells_lengths: bool = False,
        samples_memory: bool = False,
        journal: Journal | None = None,
    ) -> None:
        """Raises ConfigError."""
        if not members:
            raise ConfigError("a cluster has at least 1 replica, got 0")
        if router is None and len(members) > 1:
            raise ConfigError("several replicas need a router")
        if not 0 <= wire_s < math.inf:
            raise ConfigError(f"wire_s must be a number from 0, got {wire_s}")
        if not 0 <= report_delay_s <= MOST_REPORT_DELAY_S:
            raise ConfigError(
                f"report_delay_s must be a number from 0 to {MOST_REPORT_DELAY_S:g}, got {report_delay_s}"
            )
        for member in members:
            check_adapters(stream, member.config, member.adapter_pages)
        first = members[0]
        drops = any(member.config.admission == "early-abort" for member in members)
        self.stream = stream
        self.members = tuple(members)
        most_tokens = None if tells_lengths else most_output([member.config for member in members])
        self.front = FrontEnd(stream, first.config.queue, drops, first.costs.answer_s, most_tokens)
        self.now = 0.0
        self.times = RouterTimes()
        self.hints: list[tuple[float, ScaleHint]] = []
        self.plans: list[Planned] = []
        self.num_solves = 0
        self.working_sets: list[tuple[float, tuple[int, ...]]] = []
        """Requests on each replica, once a second."""
        self.memory_used: list[tuple[float, tuple[float, ...]]] = []
        """Likewise, with ``samples_memory``: the share of each replica's pages that requests and adapters use."""
        self.loops: list[ReplicaLoop] = []
        self.counters_at_start: list[Counters] = []
        self._router = None if router is None else Router(router)
        self._report_delay_s = report_delay_s
        self._wire_s = wire_s
        self._solve = solve
        self._samples_memory = samples_memory
        self._journal = journal
        self._due: list[_Due] = []
        self._num_due = 0
        self._scheduled: list[float] = []  # of each loop, when the heap has it next
        self._warming: dict[tuple[int, RequestId], Request] = {}
        self._warm_s = 0.0
        self._timer: Timer | None = None
        self._start(is_warm)

    @property
    def is_eager(self) -> bool:
        """Whether every replica knows all adapters from the start."""
        return len(self.stream.ranks) <= EAGER_ADAPTERS

    def run(self) -> None:
        """Replay to the end; raises RuntimeError when a request is left waiting for ever."""
        while not self.front.is_done or self._warming:
            if not self._due:
                raise RuntimeError(f"nothing comes any more, and {len(self.front.open)} requests wait")
            due, rank, _, what = heapq.heappop(self._due)
            if rank == _LOOP:
                self._advance(self.loops[what], due)  # type: ignore[call-overload]
                continue
            self.now = due
            if rank == _CLOCK:
                self._tick(what)
            elif isinstance(what, StreamRequest):
                self._ask(what)
            elif what is None:
                self._arrivals()
            else:
                self._tell(what)  # type: ignore[arg-type]
            if due - self.front.last_news_s > STUCK_S:
                raise RuntimeError(f"for {STUCK_S:g} s nothing came or ended, and requests wait")
        for loop in self.loops:
            loop.drain()

    # ------------------------------------------------------------ the start

    def _start(self, is_warm: bool) -> None:
        report_delay_s = None if self._router is None else self._report_delay_s
        for place, member in enumerate(self.members):
            loop = ReplicaLoop(
                place,
                member.machine(member.config),
                member.make_device(),
                member.adapter_pages,
                self.front,
                report_delay_s,
                self._recorder(place),
            )
            self.loops.append(loop)
            self._scheduled.append(math.inf)
            if self.is_eager:
                loop.add_adapters()
                if is_warm:
                    self._warm_up(loop, member)
        if self._router is not None:
            for adapter, (rank, num_pages) in enumerate(
                zip(self.stream.ranks, self.members[0].adapter_pages), 1
            ):
                self._tell(Listed(adapter, rank, num_pages))
            for place, member in enumerate(self.members):
                rank_pages = sum(member.adapter_pages) / max(sum(self.stream.ranks), 1)
                facts = facts_of(member.config, member.costs, member.numerics, member.kernel, rank_pages)
                facts = dataclasses.replace(facts, rank_costs=member.rank_costs)
                self._tell(ReplicaUp(place, 1, facts))
            self._put(HEARTBEAT_S, _CLOCK, None)
        for loop in self.loops:
            self._schedule(loop)
        if not self._warming:
            self._begin(0.0)

    def _warm_up(self, loop: ReplicaLoop, member: Member) -> None:
        shares = member.config.queue.shares
        for adapter in range(1, len(member.adapter_pages) + 1):
            name = f"warm-{adapter}"
            first = -adapter * MOST_TOKENS  # numbers that no piece has
            share = shares.get(client_name(adapter - 1), 1.0)
            tokens = tuple(range(first, first + _WARM_TOKENS))
            self._warming[loop.place, name] = request_of(name, adapter, tokens, 1, share)
            loop.put(0.0, self._warming[loop.place, name])

    def _begin(self, now: float) -> None:
        """The stream starts now."""
        self.front.began_s = self.front.last_news_s = now
        self.counters_at_start = [loop.report().counters for loop in self.loops]
        for loop in self.loops:
            loop.busy_s = 0.0
        self._put(self.front.next_arrival_s, _NEWS, None)

    def _recorder(self, place: int) -> Callable[[float, object, list[Command]], None] | None:
        journal = self._journal
        if journal is None:
            return None
        return lambda now, event, commands: journal(place, now, event, commands)

    # ------------------------------------------------------------ one heap

    def _put(self, due: float, rank: int, what: object) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (due, rank, self._num_due, what))

    def _schedule(self, loop: ReplicaLoop) -> None:
        """Have the heap know when the loop is next."""
        due = loop.due_s
        if due < self._scheduled[loop.place]:
            self._scheduled[loop.place] = due
            self._put(due, _LOOP, loop.place)

    def _advance(self, loop: ReplicaLoop, due: float) -> None:
        """The loop's events, as long as nothing else comes before."""
        if due != self._scheduled[loop.place]:
            return  # it was scheduled for an earlier moment since
        self._scheduled[loop.place] = math.inf
        following_s = loop.due_s
        while following_s == due or (following_s < math.inf and not self._is_due_before(following_s)):
            self.now = following_s
            loop.advance()
            if loop.reported is not None or loop.ended or loop.progress or loop.released:
                self._take_news(loop)
            due, following_s = -1.0, loop.due_s
        self._schedule(loop)

    def _is_due_before(self, moment: float) -> bool:
        return bool(self._due) and self._due[0][0] <= moment

    def _take_news(self, loop: ReplicaLoop) -> None:
        """Pass on what the loop's last event led to, at the moment at which it did."""
        now = loop.now
        told_s = now + self._wire_s
        if loop.reported is not None:
            self._put(now + self._report_delay_s, _REPORT, loop.reported)
            loop.reported = None
        if loop.progress:
            if self._router is not None:
                for request, count in loop.progress:
                    self._put(told_s, _NEWS, Progress(request, 0, count))
            loop.progress.clear()
        for finish in loop.ended:
            self._ended(loop, finish, now)
        loop.ended.clear()
        for released in loop.released:
            self._put(told_s, _NEWS, Withdrawn(released.request, released.attempt, released.positions))
        loop.released.clear()

    # ------------------------------------------------------------ requests

    def _arrivals(self) -> None:
        """One of the stream's requests comes, and the next is due."""
        request = self.front.next_request()
        following_s = self.front.next_arrival_s
        if following_s < math.inf:
            self._put(following_s, _NEWS, None)
        if request is not None:
            self._ask(request)

    def _ask(self, request: StreamRequest) -> None:
        asked = self.front.ask(request, self.now)
        if self._router is None:
            self._assign(Assign(asked.request, 1, 0, len(self.front.outcomes)))
        elif self._wire_s:
            self._put(self.now + self._wire_s, _NEWS, asked)
        else:
            self._tell(asked)

    def _assign(self, command: Assign) -> None:
        """From the router to the front end, and from there to the replica."""
        sent = self.front.send(command)
        if sent is None:
            return
        loop = self.loops[command.replica]
        hops_s = 0.0 if self._router is None else 2 * self._wire_s
        loop.send(self.now + hops_s, sent, command.number)
        self._schedule(loop)

    def _ended(self, loop: ReplicaLoop, finish: Finish, now: float) -> None:
        key = loop.place, finish.request
        if key in self._warming:
            if finish.error is not None:  # early abort
                loop.put(now, self._warming[key])
                return
            del self._warming[key]
            self._warm_s = max(self._warm_s, now)
            if not self._warming:
                self._begin(self._warm_s)
            return
        found = self.front.end(loop.place, finish, now)
        if found is None:
            return
        ended, following = found
        if self._router is not None:
            self._put(now + self._wire_s, _NEWS, ended.as_ended())
        if following is not None:
            self._put(now + self.members[loop.place].costs.answer_s, _NEWS, following)

    # ------------------------------------------------------------ the router

    def _tell(self, event: RouterEvent) -> None:
        router = self._router
        if router is None:
            return
        began = time.perf_counter()
        commands = router.handle(event, self.now)
        took_s = time.perf_counter() - began
        self.times.total_s += took_s
        self.times.num_events += 1
        if type(event) is Asked:
            self.times.asked_s.append(took_s)
            for command in commands:
                if isinstance(command, Assign):
                    self.times.chosen_s[command.replica].append(took_s)
        if self._journal is not None:
            self._journal(None, self.now, event, commands)
        for command in commands:
            self._obey(command)

    def _obey(self, command: RouterCommand) -> None:
        match command:
            case Assign():
                self._assign(command)
            case Withdraw():
                loop = self.loops[command.replica]
                loop.withdraw(self.now + self._wire_s, command.request, command.attempt)
                self._schedule(loop)
            case SetTimer():
                self._timer = Timer()
                self._put(command.at, _CLOCK, self._timer)
            case Refuse():
                following = self.front.refuse(
                    command.request, command.error.status, command.error.message, self.now
                )
                if following is not None:
                    self._put(self.now, _NEWS, following)
            case Place() | Unplace():
                loop = self.loops[command.replica]
                loop.keep(self.now + self._wire_s, command.adapter, isinstance(command, Place))
                self._schedule(loop)
            case Solve():
                self.num_solves += 1
                if self._solve is not None:
                    self._put(self.now + SOLVE_S, _NEWS, self._solved(self._solve, command))
            case Planned():
                self.plans.append(command)
            case ScaleHint():
                self.hints.append((self.now - self.front.began_s, command))
            case AskReport() | Fence():
                raise RuntimeError(f"no report is lost here, and no replica is silent: {command}")

    def _solved(self, solve: Solver, problem: Solve) -> Solved:
        began = time.perf_counter()
        solved = solve(problem)
        self.times.solved_s.append(time.perf_counter() - began)
        return solved

    def _tick(self, what: object) -> None:
        if isinstance(what, Timer):
            if what is self._timer:
                self._tell(what)
            return
        self.working_sets.append(
            (self.now - self.front.began_s, tuple(len(loop.held) for loop in self.loops))
        )
        if self._samples_memory:
            used = tuple(_memory_used(loop) for loop in self.loops)
            self.memory_used.append((self.now - self.front.began_s, used))
        for loop in self.loops:
            if self.now - loop.last_report_s >= HEARTBEAT_S:
                loop.ask_report(self.now)
                self._schedule(loop)
        self._put(self.now + HEARTBEAT_S, _CLOCK, None)


def _memory_used(loop: ReplicaLoop) -> float:
    gauges = loop.report().gauges
    return (gauges.pages_running + gauges.pages_adapters) / gauges.pages_total
