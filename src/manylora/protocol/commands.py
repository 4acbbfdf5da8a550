"""What a replica commands, and what engines command an executor beside it.

A new command is declared here, in the union of those that carry it out, and carried out by a method of its name
(``handlers``).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol, get_args, overload

from manylora.protocol.events import AdapterRead, CopyDone, Event, StepDone, SwitchDone, Timer
from manylora.reports import Counters, Snapshot
from manylora.types import (
    BASE,
    AdapterId,
    CopyId,
    PageId,
    RequestError,
    RequestId,
    SamplingParams,
    SequenceId,
    SwitchId,
)

Tier = Literal["device", "host"]
"""Where pages are: each tier counts its own page ids from 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceStart:
    """All an executor must know to run a sequence: on admission, on resumption after preemption, as a fork.

    ``tokens`` = prompt + tokens generated so far; ``pages[i]`` holds positions ``[i * page_tokens, (i+1) *
    page_tokens)``. The first ``num_computed`` positions are in the pages. ``request``: for people to read,
    should the step be the executor's last. ``first_rotary_row``: the row of the rotary tables for position 0.
    ``num_scored``: where ``params.prompt_logprobs`` is set, the log-probabilities of the tokens after the first
    so many positions are known, and not asked for.
    """

    sequence: SequenceId
    sample: int
    adapter: AdapterId
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    num_computed: int
    pages: tuple[PageId, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    request: RequestId = ""
    first_rotary_row: int = 0
    num_scored: int = 0


class StepRow(NamedTuple):
    """Compute positions ``[start, start + num_tokens)`` of a sequence, then draw ``num_samples`` tokens.

    ``pages``: changes to its page table since the last step, as (index, page). ``num_samples`` is 0 for a
    chunk that does not reach the end of the tokens, 1 normally, and n where a request's samples fork.
    """

    sequence: SequenceId
    start: int
    num_tokens: int
    num_samples: int
    pages: tuple[tuple[int, PageId], ...] = ()


step_row: Callable[[tuple[SequenceId, int, int, int, tuple[tuple[int, PageId], ...]]], StepRow]
step_row = functools.partial(tuple.__new__, StepRow)
"""Makes a StepRow of a tuple of its fields in little more than half the time: there is one for every token."""


class Await(NamedTuple):
    """These sequences of a step read what a copy, a SwapPages with ``groups``, brings."""

    copy: CopyId
    sequences: tuple[SequenceId, ...]


class CpuRows(NamedTuple):
    """Rows of sequences whose adapter's part the CPU computes, from the sources of the adapter's copy."""

    copy: CopyId
    sequences: tuple[SequenceId, ...]


@dataclasses.dataclass(slots=True)  # like StepDone
class RunStep:
    """Run one batch. ``starts`` come before the rows that use them.

    ``merged``: the adapter whose merged weights it runs on, which the last SetMerged named; BASE: none.
    ``awaits``: copies, commanded before, whose answer had not come when this was decided. No layer of the step
    begins before what these bring of it has landed, within a bound.
    ``cpu``: copies of adapters, likewise, which the step need not outlast: their sources hold what they hold
    until it has ended, whatever became of the copy.
    """

    step: int
    starts: tuple[SequenceStart, ...]
    rows: tuple[StepRow, ...]
    merged: AdapterId = BASE
    awaits: tuple[Await, ...] = ()
    cpu: tuple[CpuRows, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EndSequence:
    """Forget the sequence; its pages may be given to others from the next command on."""

    sequence: SequenceId


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy whole pages inside the device pool, ordered against compute: (source, destination)."""

    pairs: tuple[tuple[PageId, PageId], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Read the adapter from its source into these pages, off the step loop; answer with AdapterRead.

    On the device it is then resident; in host pages it waits for a SwapPages that names it.
    """

    adapter: AdapterId
    pages: tuple[PageId, ...]
    tier: Tier = "device"


@dataclasses.dataclass(frozen=True, slots=True)
class SwapPages:
    """Copy pages between the tiers beside compute; answer with CopyDone.

    ``pairs``: (source, destination); the sources are the host's when ``to_device``, else the device's. The
    destinations are this copy's alone until the answer, and no issued step touches them but one that awaits it.
    ``adapter``: these are all the pages of this adapter, in order, and it is resident once they have landed.
    ``groups``: steps may await the copy, which lands in so many groups of layers, the first layers' first; 0:
    none does.
    """

    copy: CopyId
    to_device: bool
    pairs: tuple[tuple[PageId, PageId], ...]
    adapter: AdapterId | None = None
    groups: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SetMerged:
    """From the next step on the base's weights are with this adapter merged into them; BASE: as they were
    loaded.

    Ordered after the steps issued before and before those issued later; answered with SwitchDone. The adapter
    is resident from now until the answer to the SetMerged that ends this.
    """

    switch: SwitchId
    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class SetTimer:
    """Answer with Timer at ``at`` (on the clock of ``now``); replaces the one set before."""

    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class EvictAdapter:
    """Drop an adapter from the device; no step issued from now on reads it."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterFreed:
    """A removed adapter holds no page and no request any more."""

    adapter: AdapterId


class Emit(NamedTuple):
    """A generated token; ``position`` counts from 0 at the sample's first. Emitted once, whatever moved.

    ``sampled_by``: (sequence, index among the tokens it drew in its last step), where a driver finds what the
    executor said beside the token. A fork's first token is sampled by sample 0's sequence.
    """

    request: RequestId
    sample: int
    position: int
    token: int
    sampled_by: tuple[SequenceId, int]


emit: Callable[[tuple[RequestId, int, int, int, tuple[SequenceId, int]]], Emit]
emit = functools.partial(tuple.__new__, Emit)
"""Makes an Emit of a tuple of its fields, likewise."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptScored:
    """More of the prompt's log-probabilities count: those that the executor said beside the sequence's last
    row. The first is of the token after position ``start``. Each counts once, in order, whatever moved, and all
    of them before the request's first Emit."""

    request: RequestId
    sequence: SequenceId
    start: int


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """Announce that the request left the queue for the first time; ``num_cached`` of its prompt's tokens were
    reused."""

    request: RequestId
    num_cached: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """All that an admitted request reuses is on the device, for the first time; its prefill begins.

    ``adapter_s``: how long it waited for its adapter since it was admitted; ``kv_s``: and for cached KV after
    that. Both 0 where nothing had to come.
    """

    request: RequestId
    adapter_s: float
    kv_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Decided:
    """One decision of the cache policy, for people; only with ``CacheConfig.trace``.

    ``action``: "evict", "save", "drop", "load", "read", "prefetch", "drop-host", "preempt", ...; ``depth``: 0
    for an adapter, else which page of its prefix; ``value``: the node's value to the policy (log
    seconds), None where it was not asked; ``reason``: "demand", "busy", "idle", "queue", ...
    """

    action: str
    adapter: AdapterId
    depth: int
    num_pages: int
    reason: str
    value: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """One sample has ended: "stop", "length", "abort" or "error" (then ``error`` says why)."""

    request: RequestId
    sample: int
    reason: str
    error: RequestError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """Reject a request; nothing was or will be emitted for it."""

    request: RequestId
    error: RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Released:
    """The answer to LetGo, or to an Arrive of a later attempt: this attempt at the request is over.

    ``positions``: how many tokens each sample has, those that have ended included; its open samples get no
    Finish. Empty where there is no such attempt.
    """

    request: RequestId
    attempt: int
    positions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Answer ReportDue with the replica's gauges and its counts since the start."""

    gauges: Snapshot
    counters: Counters


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """The state of a replica for a router. Counts are totals; ``residency`` and ``evicted`` are changes.

    ``seq``: from 1, one more each time. ``free_pages`` are empty, ``reclaimable_pages`` hold what no request
    uses. ``waiting_tokens``: of prompts still to be computed. ``residency``: (adapter, tier) as it changed
    since the last Status; all adapters that are anywhere where ``is_full``. ``evicted``: hashes of blocks that
    can be reused no more, since then. ``page_price_s``: seconds that the loss of a reclaimable page costs, by
    the replica's own values. ``is_exhausted``: a running request finds no page. ``token_s``, ``page_in_s``,
    ``page_read_s``: as learnt here; 0 means as in the replica's facts.
    """

    seq: int
    running: int
    waiting: int
    free_pages: int
    reclaimable_pages: int = 0
    waiting_tokens: int = 0
    kv_tokens: int = 0
    is_full: bool = False
    residency: tuple[tuple[AdapterId, int], ...] = ()
    evicted: tuple[int, ...] = ()
    page_price_s: float = 0.0
    is_exhausted: bool = False
    token_s: float = 0.0
    page_in_s: float = 0.0
    page_read_s: float = 0.0


# What only engines command: a replica learns of an adapter when it has been looked at.


@dataclasses.dataclass(frozen=True, slots=True)
class InspectAdapter:
    """Check by its headers that the adapter in ``path`` fits the model, and remember where it lies; answer with
    AdapterChecked."""

    adapter: AdapterId
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyAdapter:
    """Read all weights of an inspected adapter; answer with AdapterChecked."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class ForgetAdapter:
    """Forget an adapter that is not resident; unknown ids are ignored."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class ReportState:
    """Answer with ExecutorState."""


DeviceCommand = (
    RunStep | EndSequence | CopyPages | SwapPages | ReadAdapter | EvictAdapter | SetMerged
    | InspectAdapter | VerifyAdapter | ForgetAdapter | ReportState
)  # fmt: skip
"""An executor carries these out."""

ClientCommand = Emit | PromptScored | Admitted | Ready | Finish | Reject | Released
"""News of a request."""

EngineCommand = SetTimer | AdapterFreed | Decided | Report | Status
"""The driver carries these out, or has its engine do it."""

Command = (
    RunStep
    | EndSequence
    | CopyPages
    | SwapPages
    | ReadAdapter
    | EvictAdapter
    | SetMerged
    | ClientCommand
    | EngineCommand
)
"""The commands of a replica."""

DEVICE_COMMANDS: frozenset[type] = frozenset(get_args(DeviceCommand))
CLIENT_COMMANDS: frozenset[type] = frozenset(get_args(ClientCommand))
ENGINE_COMMANDS: frozenset[type] = frozenset(get_args(EngineCommand))


def handlers(port: object, commands: Iterable[type]) -> dict[type, Callable[..., Any]]:
    """The port's methods by the command that each carries out: ``run_step`` for RunStep.

    Raises TypeError where one is missing.
    """
    found: dict[type, Callable[..., Any]] = {}
    missing = []
    for kind in commands:
        method = getattr(port, _method_of(kind), None)
        if method is None:
            missing.append(kind.__name__)
        else:
            found[kind] = method
    if missing:
        raise TypeError(f"{type(port).__name__} does not carry out {', '.join(sorted(missing))}")
    return found


def _method_of(kind: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


Ask = tuple[str, int]
"""What is answered: ("step", its number), ("copy", its number), ("read", the adapter), ("switch", its number),
("timer", 0)."""


@overload
def ask_of(message: SwapPages | ReadAdapter | SetMerged | CopyDone | AdapterRead | SwitchDone) -> Ask: ...
@overload
def ask_of(message: Command | DeviceCommand | Event) -> Ask | None: ...
def ask_of(message: Command | DeviceCommand | Event) -> Ask | None:
    """What a command asks for, or an event answers, where another event or command is the counterpart."""
    match message:
        case RunStep() | StepDone():
            return "step", message.step
        case SwapPages() | CopyDone():
            return "copy", message.copy
        case ReadAdapter() | AdapterRead():
            return "read", message.adapter
        case SetMerged() | SwitchDone():
            return "switch", message.switch
        case SetTimer() | Timer():
            return "timer", 0
    return None


class Machine(Protocol):
    """A state machine: a replica's policy, or any other of its form."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """React to one event at time ``now`` (seconds, any origin, never decreasing): commands, in their
        order."""
