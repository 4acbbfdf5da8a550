"""The outbox: turns the policy's commands for clients into deltas, one per sample and round.

Owns each open request's delivery: whether it streams, when it arrived, which tokens are held back. Does not
know the receivers of deltas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from manylora.engine.client import NO_TIMING, RELEASED, Delta, GenerationRequest, Timing
from manylora.protocol import commands
from manylora.types import PromptLogprobs, Request, RequestError, RequestId, SequenceId, TokenLogprobs


@dataclasses.dataclass(slots=True)
class _Sample:
    began_s: float = 0.0
    start: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: RequestError | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    request: Request
    stream: bool
    serial: int
    arrived_s: float
    timing: Timing | None = NO_TIMING  # until it is sent
    has_sent_prompt: bool = False
    attempt: int = 0
    ended: set[int] = dataclasses.field(default_factory=set)
    samples: dict[int, _Sample] = dataclasses.field(default_factory=dict)
    scored: list[PromptLogprobs] = dataclasses.field(default_factory=list)

    @property
    def num_scored(self) -> int:
        return sum(map(len, self.scored))

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Return them once, when the whole prompt is scored."""
        is_asked = self.request.params.prompt_logprobs is not None and not self.has_sent_prompt
        if not is_asked or self.num_scored < len(self.request.prompt) - 1:
            return None
        runs, self.scored, self.has_sent_prompt = self.scored, [], True
        return PromptLogprobs(runs[0].num_top if runs else 0, b"".join(run.packed for run in runs))


class Outbox:
    """The deltas of the present round. Used by the loop's thread alone.

    Entries are found by their request's id while it is live. Once it has ended the id is free, though its last
    deltas may still wait to be collected: these wait by entry.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[RequestId, _Open] = {}
        self._ready: dict[tuple[_Open, int], None] = {}
        self.logprobs: dict[tuple[SequenceId, int], TokenLogprobs] = {}
        self.prompt_logprobs: dict[SequenceId, PromptLogprobs] = {}

    def may_open(self, asked: GenerationRequest) -> bool:
        """Return whether no request of this id is live, or only an earlier attempt at it."""
        entry = self._live.get(asked.id)
        return entry is None or entry.attempt < asked.attempt

    def open(self, request: Request, asked: GenerationRequest) -> None:
        """Open a request; release an earlier attempt at it."""
        before = self._live.get(request.id)
        if before is not None:
            self._release(before)
        arrived_s = self._clock() - asked.waited_s
        self._live[request.id] = _Open(
            request, asked.stream, asked.serial, arrived_s, attempt=asked.attempt, ended=set(asked.closed)
        )

    def refuse(self, request: Request, asked: GenerationRequest, error: RequestError) -> None:
        """Refuse a request that the policy never gets; a live one of its id goes on."""
        entry = _Open(request, False, asked.serial, self._clock(), attempt=asked.attempt)
        self._end(entry, 0, "error", error)

    def admitted(self, command: commands.Admitted, now: float) -> None:
        """Take Admitted."""
        entry = self._live[command.request]
        if entry.timing is not None:
            queue_s = self._clock() - entry.arrived_s
            entry.timing = entry.timing._replace(num_cached_tokens=command.num_cached, queue_s=queue_s)

    def prompt_scored(self, command: commands.PromptScored, now: float) -> None:
        """Take PromptScored."""
        entry = self._live[command.request]
        if command.start == entry.num_scored:  # else it is of an attempt before this entry's
            entry.scored.append(self.prompt_logprobs[command.sequence])

    def ready(self, command: commands.Ready, now: float) -> None:
        """Take Ready."""
        entry = self._live[command.request]
        if entry.timing is not None:
            entry.timing = entry.timing._replace(adapter_s=command.adapter_s, kv_s=command.kv_s)

    def finish(self, command: commands.Finish, now: float) -> None:
        """Take Finish."""
        entry = self._live[command.request]
        self._end(entry, command.sample, command.reason, command.error)
        if len(entry.ended) == entry.request.params.n:
            del self._live[command.request]

    def reject(self, command: commands.Reject, now: float) -> None:
        """Take Reject."""
        self._end(self._live.pop(command.request), 0, "error", command.error)

    def released(self, command: commands.Released, now: float) -> None:
        """Take Released."""
        entry = self._live.get(command.request)
        if entry is not None and entry.attempt == command.attempt:
            self._release(entry)

    def _release(self, entry: _Open) -> None:
        for sample in sorted(set(range(entry.request.params.n)) - entry.ended):
            self._end(entry, sample, RELEASED, None)
        del self._live[entry.request.id]

    def emit(self, command: commands.Emit, now: float) -> None:
        """Take Emit."""
        entry = self._live[command.request]
        sample = entry.samples.get(command.sample)
        if sample is None:
            # What is streamed is collected at once: only what is held back takes time.
            began_s = 0.0 if entry.stream else self._clock()
            sample = entry.samples[command.sample] = _Sample(began_s, command.position)
        sample.tokens.append(command.token)
        if entry.request.params.logprobs is not None:
            sample.logprobs.append(self.logprobs[command.sampled_by])
        if entry.stream:
            self._ready[entry, command.sample] = None

    def _end(self, entry: _Open, index: int, reason: str, error: RequestError | None) -> None:
        sample = entry.samples.setdefault(index, _Sample())
        sample.finish_reason = reason
        sample.error = error
        entry.ended.add(index)
        self._ready[entry, index] = None

    def collect(self) -> list[Delta]:
        """Return every delta that is ready, each token once."""
        if not self._ready:
            return []
        now_s = self._clock()
        deltas = [self._delta(entry, sample, now_s) for entry, sample in self._ready]
        self._ready.clear()
        return deltas

    def _delta(self, entry: _Open, index: int, now_s: float) -> Delta:
        sample = entry.samples.pop(index)
        timing = Timing(now_s - sample.began_s if sample.began_s else 0.0)
        if entry.timing is not None:
            timing, entry.timing = entry.timing._replace(spread_s=timing.spread_s), None
        tokens, reason = tuple(sample.tokens), sample.finish_reason
        is_stop = reason == "stop" and bool(tokens) and tokens[-1] in entry.request.stop_ids
        return Delta(
            entry.request.id, index, tokens, tuple(sample.logprobs), reason, is_stop, sample.error, timing,
            entry.serial, entry.attempt, sample.start, entry.prompt_logprobs(),
        )  # fmt: skip
