"""Declares the events of a replica."""

from __future__ import annotations

import dataclasses

from manylora.reports import Which
from manylora.types import AdapterId, CopyId, Request, RequestId, SequenceId, SwitchId


@dataclasses.dataclass(frozen=True, slots=True)
class Arrive:
    """The arrival of a request. ``more``: others follow at once. No step starts before the last one is known,
    so that requests which arrive together start together.

    For a request that was elsewhere before: ``resume``: the tokens that each sample has, empty where no
    sample has any. They count as output, and are computed again like a prompt. ``closed``: samples that have
    ended. ``waited_s``: time since its first arrival on any replica, which counts for its place in the queue.
    ``attempt``: a live request gives way to a later attempt of its own.
    """

    request: Request
    more: bool = False
    resume: tuple[tuple[int, ...], ...] = ()
    closed: tuple[int, ...] = ()
    waited_s: float = 0.0
    attempt: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """An order to stop a request, or one of its samples. ``reason`` becomes its finish reason ("abort",
    "stop")."""

    request: RequestId
    sample: int | None = None
    reason: str = "abort"


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """An order to release the request for another replica. It gets no further step. When its steps in flight
    have ended, Released reports its progress. Its tokens until then are emitted as usual."""

    request: RequestId
    attempt: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PinAdapter:
    """A router's order to keep a copy of the adapter on the device, whether or not a request names it;
    ``is_pinned`` False ends it. It is ignored where the share of such copies is full, and for an unknown
    adapter."""

    adapter: AdapterId
    is_pinned: bool = True


@dataclasses.dataclass(slots=True)  # not frozen, which takes three times as long to create: one for each step
class StepDone:
    """The end of a step. ``tokens``: per sampled row (sequence, tokens); n tokens where a row asked for n.

    When not ``ok``, no row of the step counts as computed and ``error`` gives the reason. ``more``: the end
    of the next step follows at once, so no step is to be started in between. ``unsound``: sequences whose
    logits were not finite; their ``tokens`` mean nothing. ``invalid``: sequences that read pages which a copy
    did not bring in time; none of their results count. ``stall_s``: the part of ``device_s`` for which the
    step waited for copies or for the CPU, where it is known. ``cpu_s``: the time that the CPU's busiest
    thread computed for the step's cold rows; ``cpu_workers``: the present number of threads, or -1 where the
    CPU had no row.
    """

    step: int
    ok: bool
    tokens: tuple[tuple[SequenceId, tuple[int, ...]], ...] = ()
    device_s: float = 0.0
    error: str = ""
    more: bool = False
    unsound: tuple[SequenceId, ...] = ()
    invalid: tuple[SequenceId, ...] = ()
    stall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_workers: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRead:
    """The notice that an adapter's weights are in the pages of its ReadAdapter, or could not be read.

    ``is_at_fault``: whether its files are the reason, and not the device or the engine's end.
    """

    adapter: AdapterId
    ok: bool
    error: str = ""
    read_s: float = 0.0
    is_at_fault: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterAdded:
    """The notice that requests may name this adapter from now on. It needs ``num_pages`` when resident."""

    adapter: AdapterId
    num_pages: int


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRemoved:
    """The notice that no new request may name the adapter. AdapterFreed follows once its running requests and
    pages are gone."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class CopyDone:
    """The notice that a SwapPages has arrived whole, or failed. After a failure the content of its
    destination pages is unknown.

    ``copy_s``: the time of its own transfers, without the wait for others.
    """

    copy: CopyId
    ok: bool
    copy_s: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SwitchDone:
    """The notice that a SetMerged has taken effect, or failed. After a failure the weights are as they were
    loaded until the next SetMerged, whatever later steps name.

    ``switch_s``: the time for which it occupied the device.
    """

    switch: SwitchId
    ok: bool
    switch_s: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Timer:
    """The notice that the time of the last SetTimer has come. It may be late where a step was running."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportDue:
    """An order to answer with Report; nothing is decided. ``which``: the adapters that it lists."""

    which: Which = "all"


@dataclasses.dataclass(frozen=True, slots=True)
class StatusDue:
    """An order to answer with Status, for a router; nothing is decided. ``is_full``: with the whole state,
    not with changes only."""

    is_full: bool = False


Event = (
    Arrive | Abort | Release | PinAdapter | StepDone | AdapterRead | AdapterAdded | AdapterRemoved | CopyDone
    | SwitchDone | Timer | ReportDue | StatusDue
)  # fmt: skip
