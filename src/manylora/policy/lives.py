"""Requests from arrival to their one end here, in whatever stage: ended, aborted, or let go to another replica.

Owns the requests and which adapters they keep alive, and collects commands in order. Does not know what runs in a
step, nor what else happens.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence as SequenceOf

from manylora.config import PolicyConfig
from manylora.policy.batching import Admission
from manylora.policy.cache_policies import CachePolicy
from manylora.policy.queue import WaitingQueue
from manylora.policy.request_limits import RequestLimits
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import LEAVING, WAITING, RequestState, Sequence
from manylora.protocol import Abort, Arrive, Command, EndSequence, Finish, LetGo, Reject, Released
from manylora.types import AdapterId, RequestError, RequestId


class RequestLives:
    """What of a replica is about requests; ``Replica`` does the rest."""

    def __init__(self, config: PolicyConfig, cache: CachePolicy | None = None) -> None:
        self._config = config
        self._waiting = WaitingQueue(config.queue)
        self._admission = Admission(config, self._waiting)
        self._commands: list[Command] = []
        self._residency = Residency(config, cache)
        self._tree = self._residency.tree
        self._held = Reservations(config, self._residency, self._waiting)
        self._limits = RequestLimits(config, self._residency)
        self._requests: dict[RequestId, RequestState] = {}
        self._leaving: dict[RequestId, RequestState] = {}  # of them
        self._live: collections.Counter[AdapterId] = collections.Counter()
        self._num_arrivals = 0
        self._num_sequences = 0

    def _collect(self) -> None:
        """Put the commands of the parts before those that are decided here next."""
        self._commands += self._residency.collect()

    def _say(self, command: Command) -> None:
        self._collect()
        self._commands.append(command)

    # ------------------------------------------------------------ arrival and end

    def _arrive(self, event: Arrive, now: float) -> None:
        request, live = event.request, self._requests.get(event.request.id)
        if live is not None and live.attempt < event.attempt:
            self._release(live, now)
        is_resumed = any(event.resume)
        error = self._refusal(event) or self._limits.refusal(request)
        if error is None and not is_resumed:
            error = self._admission.refusal()
        if error is not None:
            self._say(Reject(request.id, error))
            return
        num_tokens, arrived_s = self._limits.num_tokens(request), now - event.waited_s
        state = RequestState(
            request, self._num_arrivals, num_tokens, arrived_s, event.resume, event.closed, event.attempt
        )
        self._num_arrivals += 1
        self._requests[request.id] = state
        self._live[request.adapter] += 1
        if is_resumed:
            self._resume(state, event.resume, now)
        else:
            self._waiting.arrive(self._new_sequence(state, state.fresh[0], list(request.prompt)))

    def _refusal(self, event: Arrive) -> RequestError | None:
        """Why a request of this id, for this adapter, so far served, cannot be served, if so."""
        request, n = event.request, event.request.params.n
        if request.id in self._requests:
            return RequestError(400, f"request id {request.id!r} is already in use")
        if not self._tree.knows(request.adapter):
            return RequestError(404, "the adapter is not served any more", "model")
        if event.resume and len(event.resume) != n:
            return RequestError(400, f"the request has {n} samples and tokens of {len(event.resume)}")
        if event.closed and not set(event.closed) < set(range(n)):
            return RequestError(400, "a request that goes on has an open sample, and closed ones of its own")
        return None

    def _resume(self, state: RequestState, resume: SequenceOf[SequenceOf[int]], now: float) -> None:
        """A request that has tokens goes on, like one that was preempted: before those that are new."""
        prompt = state.request.prompt
        for sample in sorted(state.open_samples):
            if reason := state.end_of(resume[sample]):
                self._end_sample(state, sample, reason, now)
        if not state.open_samples:
            return
        later = {sample: resume[sample] for sample in sorted(state.open_samples) if resume[sample]}
        first = state.fresh[0] if state.fresh else min(later)
        self._waiting.put_back(self._new_sequence(state, first, [*prompt, *later.pop(first, ())]))
        state.unborn = later
        if not self._residency.policy.keeps_prefixes or len(prompt) < self._config.page_tokens:
            self._bear(state)

    def _bear(self, state: RequestState) -> None:
        """The samples that have come with tokens join the queue, but for the first one: now they find its prompt's
        pages in the tree, or will not find them."""
        unborn, state.unborn = state.unborn, {}
        for sample, tokens in unborn.items():
            if sample in state.open_samples:
                self._waiting.put_back(self._new_sequence(state, sample, [*state.request.prompt, *tokens]))

    def _bear_if_shared(self, sequence: Sequence) -> None:
        size = self._config.page_tokens
        if sequence.num_shared >= sequence.num_prompt // size:
            self._bear(sequence.state)

    def _new_sequence(self, state: RequestState, sample: int, tokens: list[int]) -> Sequence:
        self._num_sequences += 1
        sequence = Sequence(self._num_sequences, state, sample, tokens)
        sequence.lengthen(self._config.long_from)
        return sequence

    def _abort(self, event: Abort, now: float) -> None:
        state = self._requests.get(event.request)
        if state is None:
            return
        asked = state.open_samples if event.sample is None else {event.sample} & state.open_samples
        for sample in sorted(asked):
            self._end_sample(state, sample, event.reason, now)

    def _end_sample(
        self, state: RequestState, sample: int, reason: str, now: float, error: RequestError | None = None
    ) -> None:
        """A sample's one and only end, whatever stage it is in."""
        state.end_sample(sample)
        self._say(Finish(state.request.id, sample, reason, error))
        sequence = state.sequences.get(sample)
        # Sample 0 computes the prompt for all: it runs on unheard while others have yet to fork off it.
        if sequence is not None and not (state.open_samples and sequence.num_unborn_forks):
            self._drop(sequence, now)
        if not state.open_samples:
            self._forget(state, now)
            if state.is_leaving:
                self._say(Released(state.id, state.attempt, tuple(state.positions)))
        elif state.unborn and not state.sequences and not state.is_leaving:
            self._bear(state)

    def _forget(self, state: RequestState, now: float) -> None:
        for carrier in list(state.sequences.values()):
            self._drop(carrier, now)
        del self._requests[state.id]
        self._leaving.pop(state.id, None)
        self._live[state.request.adapter] -= 1

    def _drop(self, sequence: Sequence, now: float) -> None:
        self._take_back(sequence, now)
        sequence.end()

    def _take_back(self, sequence: Sequence, now: float) -> None:
        """Whatever it holds, and its place in the queue."""
        if sequence.stage is WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is not LEAVING:
            self._held.release(sequence, now)
            self._collect()
        if sequence.forget_executor():
            self._say(EndSequence(sequence.id))

    def _fail_request(self, state: RequestState, error: RequestError, now: float) -> None:
        for sample in sorted(state.open_samples):
            self._end_sample(state, sample, "error", now, error)

    # ------------------------------------------------------------ letting go

    def _let_go(self, event: LetGo, now: float) -> None:
        state = self._requests.get(event.request)
        if state is None or state.attempt != event.attempt:
            self._say(Released(event.request, event.attempt))
        elif not state.is_leaving:
            state.is_leaving = True
            self._leaving[state.id] = state
            for sequence in state.sequences.values():
                self._take_back(sequence, now)
                sequence.leave()

    def _release_idle(self, now: float) -> None:
        """Let go of the requests that have no step in flight any more."""
        for state in list(self._leaving.values()):
            if not any(self._held.is_in_flight(sequence) for sequence in state.sequences.values()):
                self._release(state, now)

    def _release(self, state: RequestState, now: float) -> None:
        """This attempt at the request is over, and what it would still be told is not."""
        positions = tuple(state.position_of(sample) for sample in range(state.request.params.n))
        self._forget(state, now)
        self._say(Released(state.id, state.attempt, positions))
