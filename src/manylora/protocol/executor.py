"""The door to a device: commands in, answers out. Both can be sent to another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from manylora.protocol.commands import DeviceCommand
from manylora.protocol.events import AdapterRead, CopyDone, StepDone, SwitchDone
from manylora.types import AdapterId, PromptLogprobs, RankTraffic, SequenceId, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: its StepDone, and log-probabilities by (sequence, index among its new tokens).
    ``prompt_logprobs``: by sequence, those that its row gave of the prompt (see ``SequenceStart``).

    Log-probabilities go beside the event, not in it: policy never needs them.
    """

    done: StepDone
    logprobs: dict[tuple[SequenceId, int], TokenLogprobs]
    prompt_logprobs: dict[SequenceId, PromptLogprobs] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterChecked:
    """An adapter takes ``num_pages`` when resident and its largest rank is ``rank``; or, where not ``ok``, it
    cannot be served: ``error`` says why, with the HTTP status that fits."""

    adapter: AdapterId
    ok: bool
    num_pages: int = 0
    rank: int = 0
    error: str = ""
    status: int = 400


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutorState:
    """``host_pages_pinned``: pages of the host whose copies are as fast as they can be; they become more for a
    while after the start. ``preparation_s``: seconds spent on compiling and capturing so far, up to this moment
    where that goes on. ``traffic``: of each of several ranks."""

    host_pages_pinned: int = 0
    preparation_s: float = 0.0
    traffic: tuple[RankTraffic, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutorLost:
    """The loss of the device, or of a process of it: no answer can be trusted any more, nor will any come."""

    reason: str


DeviceEvent = StepResult | CopyDone | AdapterRead | SwitchDone | AdapterChecked | ExecutorState | ExecutorLost
"""The answers of an executor."""


class Executor(Protocol):
    """An executor obeys commands on a device and decides nothing. All its answers go to one place, as
    ``DeviceEvent``.

    Commands are obeyed in their order and given by one thread, but for InspectAdapter, VerifyAdapter,
    ForgetAdapter and ReportState, which any thread may give at any time. ReportState waits for nothing:
    whatever judges whether the engine hangs asks for it.

    **Steps** run and end in the order given, at most two at a time. RunStep returns before its step has ended
    where the device works beside its caller. A row may compute the token that the step before it, still on its
    way, draws for the same sequence (the first one where it draws several). A sequence may be ended meanwhile:
    what is sampled for it is reported all the same. A failure is a StepDone with ok=False. A step that could
    not even be issued is answered at once, before those that are on their way; so is one that relies on it.

    **Copies** of one direction land in the order given, and CopyPages is ordered after steps issued before and
    before steps issued later. An adapter that a SwapPages or a ReadAdapter brings to the device can be used by
    the first step after its answer. Every SwapPages, ReadAdapter and check is answered exactly once, also when
    it fails.

    **Steps that await copies** (``RunStep.awaits``): the answer to every copy that a step awaits comes before
    the step's own end. The device is never kept waiting without bound: where a copy fails or is late the step
    goes on, and its rows that read what did not come are ``StepDone.spoilt``. What lay in those pages before is
    read by no other row.

    **Merging**: every SetMerged is answered with one SwitchDone. While an adapter is merged a step may hold
    rows of others and of the base: these give what they give without merging, up to rounding. A switch that
    failed leaves the weights as they were loaded; until the next SetMerged steps run on these, whatever they
    name, and give the same. Where not even these weights can be had back, ``obey`` raises: the device is
    broken.
    """

    def connect(self, tell: Callable[[DeviceEvent], None]) -> None:
        """Send every answer to ``tell`` from now on, from any thread."""

    def obey(self, command: DeviceCommand) -> None:
        """Begin a command. Raise only if the device is broken: nothing can be trusted after that."""

    def flush(self) -> None:
        """Begin all that was commanded: nothing follows for now. Copies from the device may be put off until
        then, or until the next step has been issued. Belongs to the thread that commands steps."""

    def wait_step(self) -> None:
        """Wait until the oldest step that is on its way has ended, and send its result.

        Belongs to the thread that commands steps. Does nothing where no step is on its way.
        """

    def close(self, *, frees: bool = True) -> None:
        """Wait for work in flight, answer what is left, free everything. Idempotent.

        Without ``frees`` what is in files is brought to its end and nothing else: the process ends next, and
        the system takes its memory.
        """


class AdapterError(Exception):
    """An adapter at fault. ``status`` is the HTTP status that fits (400; 404 for no such folder)."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
