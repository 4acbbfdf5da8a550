"""Declares the interface to a device: commands in, answers out. Both can be sent to another process."""

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
    ``prompt_logprobs``: by sequence, the log-probabilities of the prompt from its row (see
    ``SequenceStart``).

    Log-probabilities are beside the event, not in it: the policy never needs them.
    """

    done: StepDone
    logprobs: dict[tuple[SequenceId, int], TokenLogprobs]
    prompt_logprobs: dict[SequenceId, PromptLogprobs] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterChecked:
    """The result of a check. An adapter takes ``num_pages`` pages when resident, and its largest rank is
    ``rank``. Where not ``ok``, it cannot be served: ``error`` gives the reason, and ``status`` the HTTP
    status that fits."""

    adapter: AdapterId
    ok: bool
    num_pages: int = 0
    rank: int = 0
    error: str = ""
    status: int = 400


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutorState:
    """The state of an executor.

    ``host_pages_pinned``: pages of the host whose copies run at full speed; their number grows for a while
    after the start. ``preparation_s``: seconds of compiling and capturing so far, up to now where that goes
    on. ``traffic``: the exchanges of each of several ranks.
    """

    host_pages_pinned: int = 0
    preparation_s: float = 0.0
    traffic: tuple[RankTraffic, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutorLost:
    """The loss of the device, or of one of its processes. No answer can be trusted any more, and none will
    follow."""

    reason: str


DeviceEvent = StepResult | CopyDone | AdapterRead | SwitchDone | AdapterChecked | ExecutorState | ExecutorLost
"""The answers of an executor."""


class Executor(Protocol):
    """An executor obeys commands on a device and decides nothing. All its answers go to one place, as
    ``DeviceEvent``.

    One thread gives the commands, and they are obeyed in their order. InspectAdapter, VerifyAdapter,
    ForgetAdapter and ReportState are exceptions: any thread may give them at any time. ReportState waits for
    nothing, because the check whether the engine hangs uses it.

    **Steps** run and end in the order given, at most two at a time. RunStep returns before its step has ended
    where the device works beside its caller. A row may compute the token that the step before it, still in
    flight, draws for the same sequence (the first one where it draws several). A sequence may be ended in
    that time: its sampled tokens are still reported. A failure is a StepDone with ok=False. A step that could
    not even be issued is answered at once, before the steps in flight; so is one that relies on it.

    **Copies** of one direction arrive in the order given. CopyPages is ordered after steps issued before and
    before steps issued later. An adapter that a SwapPages or a ReadAdapter brings to the device can be used
    by the first step after its answer. Every SwapPages, ReadAdapter and check is answered exactly once, also
    when it fails.

    **Steps that await copies** (``RunStep.awaits``): the answer to every copy that a step awaits precedes the
    step's own end. The device never waits without a bound. Where a copy fails or is late the step goes on,
    and its rows that read the missing pages are ``StepDone.invalid``. No other row reads the former content of
    those pages.

    **Merging**: every SetMerged is answered with one SwitchDone. While an adapter is merged, a step has
    its rows alone; a step with other rows fails. A failed switch leaves the weights as they were loaded. Until
    the next SetMerged, steps run on these, whatever they name, and give the same results. Where even these
    weights cannot be restored, ``obey`` raises: the device is broken.
    """

    def connect(self, report: Callable[[DeviceEvent], None]) -> None:
        """Pass every answer to ``report`` from now on, from any thread."""

    def obey(self, command: DeviceCommand) -> None:
        """Begin a command. Raises only if the device is broken: nothing can be trusted after that."""

    def flush(self) -> None:
        """Begin all commands given so far, since none follows for now. Copies from the device may be delayed
        until this call, or until the next step has been issued. Only for the thread that commands steps."""

    def wait_step(self) -> None:
        """Wait until the oldest step in flight has ended, and send its result.

        Only for the thread that commands steps. Does nothing where no step is in flight.
        """

    def close(self, *, frees: bool = True) -> None:
        """Wait for work in flight, answer the remaining commands, and free everything. It may be called
        repeatedly.

        Without ``frees`` it completes only writes to files: the process ends next, and the system takes its
        memory.
        """


class AdapterError(Exception):
    """An adapter at fault. ``status`` is the HTTP status that fits (400; 404 for no such folder)."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
