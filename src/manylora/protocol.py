"""The seam between what decides and what does: events in, commands out (design §1).

``Replica.handle(event, now)`` returns commands; a driver executes them in order on an ``Executor`` and feeds
what happened back as events. Only ints, strings and tuples cross, so a journal of events replays anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from manylora.types import (
    AdapterId,
    CopyId,
    PageId,
    Request,
    RequestError,
    RequestId,
    SamplingParams,
    SequenceId,
    TokenLogprobs,
)

Tier = Literal["device", "host"]
"""Where pages are: each tier counts its own page ids from 0."""

# ---------------------------------------------------------------- events


@dataclasses.dataclass(frozen=True, slots=True)
class Arrive:
    """A request has come. ``more``: others follow at once, and no step starts before the last of them is known,
    so that those who come together start together."""

    request: Request
    more: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request, or one of its samples; ``reason`` becomes its finish reason ("abort", "stop")."""

    request: RequestId
    sample: int | None = None
    reason: str = "abort"


@dataclasses.dataclass(slots=True)  # not frozen, which takes thrice as long to make: there is one a step
class StepDone:
    """The step ended. ``tokens``: per sampled row (sequence, tokens); n tokens where a row asked for n.

    When not ``ok`` no row of the step counts as computed and ``error`` says why. ``more``: the end of the step
    after it follows at once, so no step is to be started in between. ``unsound``: sequences whose logits were not
    finite; what stands for them in ``tokens`` means nothing.
    """

    step: int
    ok: bool
    tokens: tuple[tuple[SequenceId, tuple[int, ...]], ...] = ()
    device_s: float = 0.0
    error: str = ""
    more: bool = False
    unsound: tuple[SequenceId, ...] = ()


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
class Timer:
    """The moment that the last SetTimer named has come (or has passed: a step may have been running)."""


Event = Arrive | Abort | StepDone | AdapterRead | AdapterAdded | AdapterRemoved | CopyDone | Timer


# ---------------------------------------------------------------- commands


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceStart:
    """All an executor must know to run a sequence: on admission, on resumption after preemption, as a fork.

    ``tokens`` = prompt + tokens generated so far; ``pages[i]`` holds positions
    ``[i * page_tokens, (i+1) * page_tokens)``. The first ``num_computed`` positions are in the pages.
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


@dataclasses.dataclass(slots=True)  # like StepDone
class RunStep:
    """Run one batch. ``starts`` come before the rows that use them."""

    step: int
    starts: tuple[SequenceStart, ...]
    rows: tuple[StepRow, ...]


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
    destinations are nobody's else until the answer, and no issued step touches them. ``adapter``: these are
    all the pages of this adapter, in order, and it is resident once they have landed.
    """

    copy: CopyId
    to_device: bool
    pairs: tuple[tuple[PageId, PageId], ...]
    adapter: AdapterId | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SetTimer:
    """Answer with Timer at ``at`` (on the clock of ``now``); replaces the one set before."""

    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class EvictAdapter:
    """The adapter is no longer resident on the device; no step issued from now on reads it."""

    adapter: AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterFreed:
    """A removed adapter holds no page and no request any more."""

    adapter: AdapterId


class Emit(NamedTuple):
    """A generated token; ``position`` counts from 0 at the sample's first. Emitted once, whatever moved.

    ``drawn_by``: (sequence, index among the tokens it drew in its last step), where a driver finds what the
    executor said beside the token. A fork's first token is drawn by sample 0's sequence.
    """

    request: RequestId
    sample: int
    position: int
    token: int
    drawn_by: tuple[SequenceId, int]


emit: Callable[[tuple[RequestId, int, int, int, tuple[SequenceId, int]]], Emit]
emit = functools.partial(tuple.__new__, Emit)
"""Makes an Emit of a tuple of its fields, likewise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """The request left the queue for the first time; ``num_cached`` of its prompt's tokens were reused."""

    request: RequestId
    num_cached: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """All that an admitted request reuses is on the device, for the first time; its prefill begins.

    ``adapter_s``: how long it waited for its adapter since it was admitted; ``kv_s``: and for history after
    that. Both 0 where nothing had to come.
    """

    request: RequestId
    adapter_s: float
    kv_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Decided:
    """One decision of the cache policy, for people; only with ``CacheConfig.trace``.

    ``action``: "evict", "save", "drop", "load", "read", "prefetch", "drop-host", "preempt", ...; ``depth``: 0
    for an adapter, else which page of its prefix; ``value``: what the policy thought the node worth (log
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
    """The request will not be served at all; nothing was or will be emitted for it."""

    request: RequestId
    error: RequestError


Command = (
    RunStep | EndSequence | CopyPages | SwapPages | ReadAdapter | EvictAdapter | SetTimer
    | AdapterFreed | Emit | Admitted | Ready | Decided | Finish | Reject
)  # fmt: skip


# ---------------------------------------------------------------- the executor


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: its StepDone, and log-probabilities by (sequence, index among its new tokens).

    Log-probabilities go beside the event, not in it: policy never needs them.
    """

    done: StepDone
    logprobs: dict[tuple[SequenceId, int], TokenLogprobs]


class IssuedStep:
    """A step on its way. ``wait`` belongs to the thread that issued it."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        """``finish``: called once; waits, and never raises."""
        self._finish = finish
        self._result: StepResult | None = None

    @classmethod
    def failed(cls, result: StepResult) -> IssuedStep:
        """One that could not be issued."""
        issued = cls(_finished)
        issued._result = result
        return issued

    @property
    def has_failed(self) -> bool:
        """Whether that is known without waiting."""
        return self._result is not None and not self._result.done.ok

    def wait(self) -> StepResult:
        """The result, once its tokens are on the host; the same each time."""
        if self._result is None:
            self._result = self._finish()
            self._finish = _finished
        return self._result


def _finished() -> StepResult:
    raise AssertionError("a step ends once")


class Executor(Protocol):
    """Obeys commands on a device. Called from one thread, in command order; decides nothing."""

    def issue_step(self, step: RunStep) -> IssuedStep:
        """Start the batch; returns before it has ended where the device works beside its caller.

        Steps run in the order given and are waited for in it, at most two at a time. A row may compute the token
        that the step before it, still on its way, draws for the same sequence (the first one where it draws
        several). A sequence may be ended meanwhile: what is drawn for it is reported all the same. Never raises:
        a failure is a StepDone with ok=False. One that could not be issued ``has_failed``; so will a step that
        relies on it.
        """

    def end_sequence(self, sequence: SequenceId) -> None:
        """Forget a sequence (unknown ids are ignored)."""

    def copy_pages(self, pairs: tuple[tuple[PageId, PageId], ...]) -> None:
        """Copy pages, ordered after steps issued before and before steps issued later."""

    def swap_pages(self, command: SwapPages, done: Callable[[CopyDone], None]) -> None:
        """Start the copy and return at once; ``done`` is called from another thread exactly once.

        Copies of one direction land in the order given. An adapter named by the command can be used by the
        first step after ``done``.
        """

    def read_adapter(self, command: ReadAdapter, done: Callable[[AdapterRead], None]) -> None:
        """Start the read and return at once; ``done`` is called from another thread exactly once."""

    def evict_adapter(self, adapter: AdapterId) -> None:
        """Forget where the adapter lies."""

    def add_adapter(self, adapter: AdapterId, path: str) -> tuple[int, int]:
        """Check that the adapter at ``path`` fits the model; return (pages it takes, its largest rank).

        Reads headers; called from any thread; raises AdapterError.
        """

    def verify_adapter(self, adapter: AdapterId) -> None:
        """Read all weights of an added adapter; called from any thread; raises AdapterError for bad ones."""

    def remove_adapter(self, adapter: AdapterId) -> None:
        """Forget an adapter that is not resident."""

    @property
    def host_pages_pinned(self) -> int:
        """Pages of the host whose copies are as fast as they can be: rises for a while after the start."""

    @property
    def preparation_s(self) -> float:
        """Seconds spent on compiling and capturing so far, up to this moment where that goes on. Any thread may
        ask."""

    def close(self) -> None:
        """Wait for work in flight and free everything. Idempotent."""


class AdapterError(Exception):
    """An adapter at fault. ``status`` is the HTTP status that fits (400; 404 for no such folder)."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
