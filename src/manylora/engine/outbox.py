"""Turns the policy's Emit, Admitted, Ready, Finish and Reject into deltas, one per sample and round.

Owns what is known of each open request on its way out: whether it streams, when it came, what was held back.
Does not know where deltas go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from manylora.engine.client import Delta
from manylora.protocol import Admitted, Command, Emit, Finish, Ready, Reject
from manylora.types import Request, RequestError, RequestId, SequenceId, TokenLogprobs


@dataclasses.dataclass(slots=True)
class _Sample:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: RequestError | None = None


@dataclasses.dataclass(slots=True)
class _Open:
    request: Request
    stream: bool
    arrived_s: float
    queue_s: float = 0.0
    adapter_s: float = 0.0
    kv_s: float = 0.0
    num_cached_tokens: int = 0
    told: bool = False
    num_ended: int = 0
    samples: dict[int, _Sample] = dataclasses.field(default_factory=dict)


class Outbox:
    """Deltas to be. Used by the loop's thread alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[RequestId, _Open] = {}
        self._ready: dict[tuple[RequestId, int], None] = {}
        self.logprobs: dict[tuple[SequenceId, int], TokenLogprobs] = {}

    def open(self, request: Request, stream: bool) -> None:
        """A request has come; its id is unique among open ones (the mailboxes see to that)."""
        self._open[request.id] = _Open(request, stream, self._clock())

    def reject(self, request: RequestId, error: RequestError) -> None:
        self.note(Reject(request, error))

    def note(self, command: Command) -> None:
        """Take in one of the commands that concern clients."""
        match command:
            case Emit():
                self._emit(command)
            case Admitted():
                entry = self._open[command.request]
                entry.queue_s = self._clock() - entry.arrived_s
                entry.num_cached_tokens = command.num_cached
            case Ready():
                entry = self._open[command.request]
                entry.adapter_s, entry.kv_s = command.adapter_s, command.kv_s
            case Finish():
                self._end(command.request, command.sample, command.reason, command.error)
            case Reject():
                entry = self._open[command.request]
                entry.num_ended = entry.request.params.n - 1
                self._end(command.request, 0, "error", command.error)
            case _:
                raise AssertionError(f"{type(command).__name__} is not for clients")

    def _emit(self, command: Emit) -> None:
        entry = self._open[command.request]
        sample = entry.samples.get(command.sample)
        if sample is None:
            sample = entry.samples[command.sample] = _Sample()
        sample.tokens.append(command.token)
        if entry.request.params.logprobs is not None:
            sample.logprobs.append(self.logprobs[command.drawn_by])
        if entry.stream:
            self._ready[command.request, command.sample] = None

    def _end(self, request: RequestId, index: int, reason: str, error: RequestError | None) -> None:
        entry = self._open[request]
        sample = entry.samples.setdefault(index, _Sample())
        sample.finish_reason = reason
        sample.error = error
        entry.num_ended += 1
        self._ready[request, index] = None

    def collect(self) -> list[Delta]:
        """Everything that is ready, each token once; ended requests are forgotten."""
        if not self._ready:
            return []
        at_s = self._clock()
        deltas = [self._delta(request, sample, at_s) for request, sample in self._ready]
        for request, _ in self._ready:
            entry = self._open.get(request)
            if entry is not None and entry.num_ended == entry.request.params.n:
                del self._open[request]
        self._ready.clear()
        return deltas

    def _delta(self, request: RequestId, index: int, at_s: float) -> Delta:
        entry = self._open[request]
        sample = entry.samples.pop(index)
        is_first, entry.told = not entry.told, True
        return Delta(
            request=request,
            sample=index,
            tokens=tuple(sample.tokens),
            logprobs=tuple(sample.logprobs),
            finish_reason=sample.finish_reason,
            stop_token=sample.finish_reason == "stop"
            and bool(sample.tokens)
            and sample.tokens[-1] in entry.request.stop_ids,
            error=sample.error,
            num_cached_tokens=entry.num_cached_tokens if is_first else 0,
            queue_s=entry.queue_s if is_first else 0.0,
            adapter_s=entry.adapter_s if is_first else 0.0,
            kv_s=entry.kv_s if is_first else 0.0,
            at_s=at_s,
        )
