"""Declares the commands of a replica, and the further commands that engines send to an executor.

A new command is declared here and added to the union of its receivers. A method of its name carries it out
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
"""The place of pages: each tier counts its own page ids from 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceStart:
    """The data with which an executor starts a sequence: on admission, on resumption after preemption, or as
    a fork.

    ``tokens`` = prompt + tokens generated so far; ``pages[i]`` has the positions ``[i * page_tokens, (i+1) *
    page_tokens)``. The first ``num_computed`` positions are in the pages. ``request``: for people to read, if
    the step is the executor's last. ``first_rotary_row``: the row of the rotary tables for position 0.
    ``num_scored``: where ``params.prompt_logprobs`` is set, the log-probabilities of this number of tokens
    after the first are known already, and not asked for.
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
    """The computation of positions ``[start, start + num_tokens)`` of a sequence, and the draw of
    ``num_samples`` tokens.

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
"""Makes a StepRow from a tuple of its fields in little more than half the time. There is one for every token."""


class Await(NamedTuple):
    """A wait of sequences of a step for a copy whose pages they read: a SwapPages with ``groups``."""

    copy: CopyId
    sequences: tuple[SequenceId, ...]


class CpuRows(NamedTuple):
    """The sequences of a step whose adapter the CPU computes, from the sources of the adapter's copy."""

    copy: CopyId
    sequences: tuple[SequenceId, ...]


@dataclasses.dataclass(slots=True)  # like StepDone
class RunStep:
    """A command to run one batch. ``starts`` come before the rows that use them.

    ``merged``: the adapter whose merged weights the step uses, named by the last SetMerged; BASE: none.
    ``awaits``: copies, commanded before, whose answer had not arrived when the step was decided. No layer of
    the step begins before its part of these copies has arrived, within a bound. ``cpu``: copies of adapters,
    likewise, which may end before or after the step. Their sources keep their content until the step has
    ended, whatever happens to the copy.
    """

    step: int
    starts: tuple[SequenceStart, ...]
    rows: tuple[StepRow, ...]
    merged: AdapterId = BASE
    awaits: tuple[Await, ...] = ()
    cpu: tuple[CpuRows, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EndSequence:
    """A command to forget the sequence. Its pages may be given to others from the next command on."""

    sequence: SequenceId


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPages:
    """A command to copy whole pages inside the device pool, ordered against compute: (source, destination)."""

    pairs: tuple[tuple[PageId, PageId], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadAdapter:
    """A command to read the adapter from its source into these pages, off the step loop; AdapterRead answers it.

    On the device the adapter is then resident; in host pages it waits for a SwapPages that names it.
    """

    adapter: AdapterId
    pages: tuple[PageId, ...]
    tier: Tier = "device"


@dataclasses.dataclass(frozen=True, slots=True)
class SwapPages:
    """A command to copy pages between the tiers beside compute; CopyDone answers it.

    ``pairs``: (source, destination); the sources are the host's when ``to_device``, else the device's. The
    destinations belong to this copy alone until the answer. Only an issued step that awaits the copy uses
    them before. ``adapter``: the pages are all pages of this adapter, in order, and it is resident once they
    have arrived. ``groups``: the number of groups of layers in which the copy arrives, the first layers'
    first, so that steps may await it; 0: no step does.
    """

    copy: CopyId
    to_device: bool
    pairs: tuple[tuple[PageId, PageId], ...]
    adapter: AdapterId | None = None
    groups: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SetMerged:
    """A command to merge this adapter into the base's weights from the next step on; BASE: restore them as
    loaded.

    It is ordered after the steps issued before and before those issued later; SwitchDone answers it. The
    adapter is resident from now until the answer to the SetMerged that ends this.
    """

    switch: SwitchId
    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class SetTimer:
    """A request for a Timer at ``at`` (on the clock of ``now``). It replaces the timer set before."""

    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class EvictAdapter:
    """A command to drop an adapter from the device. No step issued from now on reads it."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterFreed:
    """The notice that a removed adapter has no page and no request any more."""

    adapter: AdapterId


class Emit(NamedTuple):
    """A generated token. ``position`` counts from 0 at the sample's first token. Each is emitted once,
    however often the request moved.

    ``sampled_by``: (sequence, index among the tokens it drew in its last step). There a driver finds the
    executor's results beside the token. A fork's first token is sampled by sample 0's sequence.
    """

    request: RequestId
    sample: int
    position: int
    token: int
    sampled_by: tuple[SequenceId, int]


emit: Callable[[tuple[RequestId, int, int, int, tuple[SequenceId, int]]], Emit]
emit = functools.partial(tuple.__new__, Emit)
"""Makes an Emit from a tuple of its fields, as fast as ``step_row``."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptScored:
    """The notice that further log-probabilities of the prompt count: those that the executor reported with
    the sequence's last row.

    The first is of the token after position ``start``. Each counts once, in order, however often the request
    moved, and all of them before the request's first Emit.
    """

    request: RequestId
    sequence: SequenceId
    start: int


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """The notice that the request left the queue for the first time. ``num_cached`` of its prompt's tokens
    were reused."""

    request: RequestId
    num_cached: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The notice that all reused pages of an admitted request are on the device for the first time. Its
    prefill begins.

    ``adapter_s``: its wait for its adapter since its admission, in seconds; ``kv_s``: its wait for cached KV
    after that. Both are 0 where nothing had to be copied.
    """

    request: RequestId
    adapter_s: float
    kv_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Decided:
    """One decision of the cache policy, for people; only with ``CacheConfig.trace``.

    ``action``: "evict", "save", "drop", "load", "read", "prefetch", "drop-host", "preempt", ...; ``depth``: 0
    for an adapter, else the number of the page in its prefix; ``value``: the node's value to the policy (log
    seconds), or None where it was not computed; ``reason``: "demand", "busy", "idle", "queue", ...
    """

    action: str
    adapter: AdapterId
    depth: int
    num_pages: int
    reason: str
    value: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """The end of one sample: "stop", "length", "abort" or "error" (then ``error`` gives the reason)."""

    request: RequestId
    sample: int
    reason: str
    error: RequestError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """The refusal of a request; nothing was or will be emitted for it."""

    request: RequestId
    error: RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Released:
    """The answer to Release, or to an Arrive of a later attempt: this attempt at the request is over.

    ``positions``: the number of tokens of each sample, also of those that have ended. Its open samples get no
    Finish. Empty where there is no such attempt.
    """

    request: RequestId
    attempt: int
    positions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The answer to ReportDue: the replica's gauges, and its counts since the start."""

    gauges: Snapshot
    counters: Counters


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """The state of a replica for a router. Counts are totals; ``residency`` and ``evicted`` are changes.

    ``seq``: from 1, one more each time. ``free_pages`` are empty; ``reclaimable_pages`` are used by no
    request. ``waiting_tokens``: tokens of prompts still to be computed. ``residency``: (adapter, tier) as
    changed since the last Status; where ``is_full``, every adapter on any tier. ``evicted``: hashes of blocks
    that have become unusable since then. ``page_price_s``: the cost of losing a reclaimable page, in seconds,
    by the replica's own values. ``is_exhausted``: a running request finds no page. ``token_s``,
    ``page_in_s``, ``page_read_s``: as measured here; 0 means as in the replica's facts.
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


# Only engines send these: a replica learns of an adapter after its check.


@dataclasses.dataclass(frozen=True, slots=True)
class InspectAdapter:
    """A command to check by its headers that the adapter in ``path`` fits the model, and to remember the
    path; AdapterChecked answers it."""

    adapter: AdapterId
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyAdapter:
    """A command to read all weights of an inspected adapter; AdapterChecked answers it."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class ForgetAdapter:
    """A command to forget an adapter that is not resident. Unknown ids are ignored."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class ReportState:
    """A command to report the executor's state; ExecutorState answers it."""


DeviceCommand = (
    RunStep | EndSequence | CopyPages | SwapPages | ReadAdapter | EvictAdapter | SetMerged
    | InspectAdapter | VerifyAdapter | ForgetAdapter | ReportState
)  # fmt: skip
"""The commands that an executor carries out."""

ClientCommand = Emit | PromptScored | Admitted | Ready | Finish | Reject | Released
"""The news of a request."""

EngineCommand = SetTimer | AdapterFreed | Decided | Report | Status
"""The commands that the driver carries out, or has its engine carry out."""

Command = (
    RunStep | EndSequence | CopyPages | SwapPages | ReadAdapter | EvictAdapter | SetMerged
    | ClientCommand | EngineCommand
)  # fmt: skip
"""The commands of a replica."""

DEVICE_COMMANDS: frozenset[type] = frozenset(get_args(DeviceCommand))
CLIENT_COMMANDS: frozenset[type] = frozenset(get_args(ClientCommand))
ENGINE_COMMANDS: frozenset[type] = frozenset(get_args(EngineCommand))


def handlers(port: object, commands: Iterable[type]) -> dict[type, Callable[..., Any]]:
    """Return the port's methods by the command that each carries out: ``run_step`` for RunStep.

    Raises TypeError where one is missing.
    """
    names = {kind: re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() for kind in commands}
    missing = sorted(kind.__name__ for kind, name in names.items() if not hasattr(port, name))
    if missing:
        raise TypeError(f"{type(port).__name__} does not carry out {', '.join(missing)}")
    return {kind: getattr(port, name) for kind, name in names.items()}


Ask = tuple[str, int]
"""The key of a question: ("step", its number), ("copy", its number), ("read", the adapter), ("switch", its
number), ("timer", 0)."""


@overload
def ask_of(message: SwapPages | ReadAdapter | SetMerged | CopyDone | AdapterRead | SwitchDone) -> Ask: ...
@overload
def ask_of(message: Command | DeviceCommand | Event) -> Ask | None: ...
def ask_of(message: Command | DeviceCommand | Event) -> Ask | None:
    """Return the key that a command and its answering event share. Returns None where a message has no
    counterpart."""
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
    """A state machine: a replica's policy, or another of the same form."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """React to one event at time ``now`` (seconds, any origin, never decreasing). Returns commands in
        their order."""
