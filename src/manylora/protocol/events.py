"""The events of a replica."""

from __future__ import annotations

import dataclasses

from manylora.reports import Which
from manylora.types import AdapterId, CopyId, Request, RequestId, SequenceId, SwitchId


@dataclasses.dataclass(frozen=True, slots=True)
class Arrive:
    """The arrival of a request. ``more``: others follow at once, and no step starts before the last of them is
    known, so that requests which come together start together.

    Of a request that was elsewhere before, ``resume``: for each sample the tokens that it has, empty where no
    sample has any; they count as output, and are computed again like a prompt. ``closed``: samples that ended.
    ``waited_s``: since it first came, wherever that was; it waits in line accordingly. ``attempt``: a live
    request gives way to a later attempt of its own.
    """

    request: Request
    more: bool = False
    resume: tuple[tuple[int, ...], ...] = ()
    closed: tuple[int, ...] = ()
    waited_s: float = 0.0
    attempt: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request, or one of its samples; ``reason`` becomes its finish reason ("abort", "stop")."""

    request: RequestId
    sample: int | None = None
    reason: str = "abort"


@dataclasses.dataclass(frozen=True, slots=True)
class LetGo:
    """Another replica is to serve the request: it is given no step any more, and when those in flight have
    ended, Released says how far it came. Its tokens until then are emitted as ever."""

    request: RequestId
    attempt: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """A router wants a copy of the adapter to stay on the device, whether or not a request names it;
    ``is_kept`` False: not any more. Ignored where the share of such copies is full, and of an unknown
    adapter."""

    adapter: AdapterId
    is_kept: bool = True


@dataclasses.dataclass(slots=True)  # not frozen, which takes thrice as long to make: there is one a step
class StepDone:
    """The end of a step. ``tokens``: per sampled row (sequence, tokens); n tokens where a row asked for n.

    When not ``ok`` no row of the step counts as computed and ``error`` says why. ``more``: the end of the step
    after it follows at once, so no step is to be started in between. ``unsound``: sequences whose logits were
    not finite; what stands for them in ``tokens`` means nothing. ``spoilt``: sequences that read what a copy
    was to bring and did not, or not in time; nothing of theirs counts. ``stall_s``: how much of ``device_s``
    the step stood still for copies or for the CPU, as far as it is known. ``cpu_s``: how long the CPU computed
    for the step's cold rows, its busiest thread; ``cpu_workers``: how many threads there are by now, -1 where
    no row was the CPU's.
    """

    step: int
    ok: bool
    tokens: tuple[tuple[SequenceId, tuple[int, ...]], ...] = ()
    device_s: float = 0.0
    error: str = ""
    more: bool = False
    unsound: tuple[SequenceId, ...] = ()
    spoilt: tuple[SequenceId, ...] = ()
    stall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_workers: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRead:
    """An adapter's weights lie in the pages its ReadAdapter named, or could not be brought there.

    ``is_at_fault``: what its files hold is the reason, and not the device or the engine's end.
    """

    adapter: AdapterId
    ok: bool
    error: str = ""
    read_s: float = 0.0
    is_at_fault: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterAdded:
    """From now on requests may name this adapter; it needs ``num_pages`` when resident."""

    adapter: AdapterId
    num_pages: int


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRemoved:
    """No new request may name it; AdapterFreed follows once its running requests and pages are gone."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class CopyDone:
    """A SwapPages has landed whole, or failed; then what its destination pages hold is unknown.

    ``copy_s``: how long its own transfers took, without the time it waited for others.
    """

    copy: CopyId
    ok: bool
    copy_s: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SwitchDone:
    """A SetMerged has taken effect, or failed; then the weights are as they were loaded, whatever later steps
    name, until the next SetMerged.

    ``switch_s``: how long the device was taken up with it.
    """

    switch: SwitchId
    ok: bool
    switch_s: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Timer:
    """The moment of the last SetTimer, or later: a step may have been running."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportDue:
    """Answer with Report; nothing is decided. ``which``: the adapters that it lists."""

    which: Which = "all"


@dataclasses.dataclass(frozen=True, slots=True)
class StatusDue:
    """Answer with Status, for a router; nothing is decided. ``is_full``: not with changes alone."""

    is_full: bool = False


Event = (
    Arrive | Abort | LetGo | Keep | StepDone | AdapterRead | AdapterAdded | AdapterRemoved | CopyDone | SwitchDone
    | Timer | ReportDue | StatusDue
)  # fmt: skip
