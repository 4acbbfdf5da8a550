"""Requests from arrival to their one end here: they ended, were aborted, or were handed to another replica.

Owns the requests, the adapters that they keep alive, and the replica's commands in order. Does not know which
sequences run in a step, nor what else happens.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence as SequenceOf

from manylora.policy import sequences
from manylora.policy.batching import Admission
from manylora.policy.reservations import Reservations
from manylora.policy.sequences import ENDED, LEAVING, RUNNING, WAITING, RequestState, Scheduled, Sequence
from manylora.protocol import commands, events
from manylora.types import AdapterId, Request, RequestError, RequestId, SequenceId

UNSOUND = "the logits are not finite (NaN or infinite): the model or the adapter gives such numbers"
"""The error of a request whose logits are not finite."""


class Requests:
    """The live requests of a replica, from arrival to the end of each sample."""

    def __init__(self, held: Reservations, admission: Admission) -> None:
        self._config = held.config
        self._admission = admission
        self._residency = held.residency
        self._held = held
        self._waiting = held.waiting
        self.commands: list[commands.Command] = []
        """Commands in execution order, but for those that ``residency`` decided since the last ``collect``."""
        self.by_id: dict[RequestId, RequestState] = {}
        self._leaving: dict[RequestId, RequestState] = {}  # of them
        self.num_live = collections.Counter[AdapterId]()
        """Their number by adapter."""
        self._num_arrivals = 0
        self._num_sequences = 0

    def collect(self) -> None:
        """Append what residency has decided since the last call."""
        self.commands += self._residency.collect()

    def send(self, command: commands.Command) -> None:
        """Append a command, behind what residency has decided before."""
        self.collect()
        self.commands.append(command)

    def take_commands(self) -> list[commands.Command]:
        """Return all commands since the last call, in order."""
        self.collect()
        decided, self.commands = self.commands, []
        return decided

    # ------------------------------------------------------------ arrival

    def arrive(self, event: events.Arrive, now: float) -> None:
        """Add a request to the queue, or reject it."""
        request, live = event.request, self.by_id.get(event.request.id)
        if live is not None and live.attempt < event.attempt:
            self._release(live, now)
        is_resumed = any(event.resume)
        error = self._refusal(event) or self._limit(request)
        error = error or (None if is_resumed else self._admission.refusal())
        if error is not None:
            self.send(commands.Reject(request.id, error))
            return
        state = RequestState(event, self._num_arrivals, self._most_tokens(request), now)
        self._num_arrivals += 1
        self.by_id[request.id] = state
        self.num_live[request.adapter] += 1
        if is_resumed:
            self._resume(state, event.resume, now)
        else:
            self._waiting.arrive(self._new_sequence(state, state.fresh[0], list(request.prompt)))

    def _refusal(self, event: events.Arrive) -> RequestError | None:
        """Return why a request with this id, adapter and history cannot be served, if so."""
        request, n = event.request, event.request.params.n
        if request.id in self.by_id:
            return RequestError(400, f"request id {request.id!r} is already in use")
        if not self._residency.tree.knows(request.adapter):
            return RequestError(404, "the adapter is not served any more", "model")
        if event.resume and len(event.resume) != n:
            return RequestError(400, f"the request has {n} samples and tokens of {len(event.resume)}")
        if event.closed and not set(event.closed) < set(range(n)):
            return RequestError(400, "a request that goes on has an open sample, and closed ones of its own")
        return None

    def _most_tokens(self, request: Request) -> int:
        """Return how many tokens one sample may generate: as asked, or what the context and the pool allow."""
        if request.params.max_tokens is not None:
            return request.params.max_tokens
        kv_pages = self._kv_pages_beside(request.adapter)
        # The last token generated is never computed, so it needs no room in a page.
        in_pool = kv_pages * self._config.page_tokens + 1
        return min(self._config.max_model_len, in_pool) - len(request.prompt)

    def _kv_pages_beside(self, adapter: AdapterId) -> int:
        """Return the device pages that KV can have while the adapter is resident."""
        if self._residency.has_parts:
            return self._config.num_pages - self._residency.adapter_limit
        return self._config.num_pages - self._residency.tree.node(adapter).num_pages

    def _limit(self, request: Request) -> RequestError | None:
        """Return why the context or the pool has no room for the request, if so."""
        if not request.prompt:
            return RequestError(400, "the prompt is empty", "prompt")
        num_prompt, limit = len(request.prompt), self._config.max_model_len
        asked = request.params.max_tokens
        num_generated = 1 if asked is None else asked
        num_tokens = num_prompt + num_generated
        if num_tokens > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {num_tokens} "
                f"tokens ({num_prompt} in the prompt, {num_generated} for the completion)."
            )
            return RequestError(400, message, "max_tokens" if num_prompt < limit else "prompt")
        adapter_pages = self._residency.tree.node(request.adapter).num_pages
        num_computed = max(num_prompt, num_tokens - 1)
        kv_pages = self._held.pages_for(num_computed)
        room = self._kv_pages_beside(request.adapter)
        if kv_pages > room:
            its_part = f", of which {room} for tokens" if self._residency.has_parts else ""
            message = (
                f"the request needs {adapter_pages + kv_pages} pages ({adapter_pages} for its adapter, {kv_pages} "
                f"for {num_computed} tokens) but the pool has {self._config.num_pages}{its_part}"
            )
            return RequestError(400, message, "max_tokens")
        return None

    def _resume(self, state: RequestState, resume: SequenceOf[SequenceOf[int]], now: float) -> None:
        """Queue a request that has tokens like a preempted one: before new ones."""
        prompt = state.request.prompt
        for sample in sorted(state.open_samples):
            if reason := state.end_of(resume[sample]):
                self._end_sample(state, sample, reason, now)
        if not state.open_samples:
            return
        later = {sample: resume[sample] for sample in sorted(state.open_samples) if resume[sample]}
        first = state.fresh[0] if state.fresh else min(later)
        self._waiting.put_back(self._new_sequence(state, first, [*prompt, *later.pop(first, ())]))
        state.later = later
        if not self._residency.policy.keeps_prefixes or len(prompt) < self._config.page_tokens:
            self._queue_later(state)

    def _queue_later(self, state: RequestState) -> None:
        """Queue the other samples that came with tokens: they find the first one's prompt pages in the tree
        now, or never will."""
        later, state.later = state.later, {}
        for sample, tokens in later.items():
            if sample in state.open_samples:
                self._waiting.put_back(self._new_sequence(state, sample, [*state.request.prompt, *tokens]))

    def _queue_later_if_shared(self, sequence: Sequence) -> None:
        if sequence.num_shared >= sequence.num_prompt // self._config.page_tokens:
            self._queue_later(sequence.state)

    def _new_sequence(self, state: RequestState, sample: int, tokens: list[int]) -> Sequence:
        self._num_sequences += 1
        sequence = Sequence(self._num_sequences, state, sample, tokens)
        sequence.lengthen(self._config.long_from)
        return sequence

    # ------------------------------------------------------------ progress

    def note_admission(self, sequence: Sequence, now: float) -> None:
        """Announce the first admission of the request of a sequence that left the queue."""
        if sequence.state.note_admission():
            num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.commands.append(commands.Admitted(sequence.state.request.id, num_cached))
        if sequence.state.later:
            self._queue_later_if_shared(sequence)
        sequence.note_admission(now, self._residency.source_of(sequence.adapter))
        if sequence.stage is RUNNING:
            self.note_ready(sequence, now)

    def note_ready(self, sequence: Sequence, now: float, mode: str = "wait") -> None:
        """Announce the request's first sequence that has all that it reuses. ``mode``: how its cold start
        went."""
        if sequence.state.note_ready():
            adapter_s = sequence.adapter_s or 0.0
            kv_s = now - sequence.admitted_s - adapter_s
            self._residency.counters.cold_start(mode, sequence.cold_source)
            self.commands.append(commands.Ready(sequence.state.request.id, adapter_s, kv_s))

    def take_step(
        self, step: int, rows: list[Scheduled], sampled: dict[SequenceId, tuple[int, ...]], now: float
    ) -> None:
        """Take what a step has computed: full pages, scores of the prompt, tokens."""
        page_tokens, take_token, sampled_for = self._config.page_tokens, self._take_token, sampled.get
        shares = self._waiting.shares
        sequences.rows_ended(rows)
        for sequence, _, num_samples in rows:
            stage = sequence.stage
            if stage is RUNNING:
                if sequence.num_computed >= (sequence.num_shared + 1) * page_tokens:
                    self._held.enter_full_pages(sequence, now)
                    if sequence.state.later:
                        self._queue_later_if_shared(sequence)
            elif stage is ENDED:
                continue
            if sequence.state.num_unscored:
                first = sequence.state.num_scored
                if sequence.state.score(sequence, step):
                    scored = commands.PromptScored(sequence.state.id, sequence.id, first)
                    self.commands.append(scored)
            if num_samples:  # one that was preempted meanwhile keeps its token, but not its pages
                tokens = sampled_for(sequence.id, ())
                if len(tokens) != num_samples:
                    error = RequestError(500, f"a step drew {len(tokens)} tokens instead of {num_samples}")
                    self.fail(sequence.state, error, now)
                    continue
                if not sequence.state.max_tokens:  # the prompt was all that was asked for
                    for sample in sorted(sequence.state.open_samples):
                        self._end_sample(sequence.state, sample, "length", now)
                    continue
                if shares is not None:
                    shares.drew(sequence, num_samples)
                if num_samples > 1:
                    self._fork_off(sequence, tokens, now)
                take_token(sequence, tokens[0], (sequence.id, 0), now)

    def fail_step(self, rows: list[Scheduled], why: str, now: float) -> None:
        """Fail the requests of a step's rows, none of which counts as computed."""
        error = RequestError(500, f"the step that ran this request failed: {why}")
        for sequence, _, num_samples in rows:
            if sequence.stage is not ENDED:
                sequence.row_failed(num_samples > 0)
                if sequence.stage is LEAVING:
                    # It goes on elsewhere with its tokens so far; the next step's would follow a missing token.
                    self._release(sequence.state, now)
                else:
                    self.fail(sequence.state, error, now)

    def fail_unsound(self, rows: list[Scheduled], unsound: set[SequenceId], now: float) -> None:
        """Fail the requests of these sequences, and drop the KV that they computed or read.

        Some of it made the logits NaN or inf, and a request that finds it in the tree would fail too.
        """
        for sequence, _, num_samples in rows:
            if sequence.id not in unsound or sequence.stage is ENDED:
                continue
            sequence.row_failed(num_samples > 0)
            path = self._held.path_of(sequence)
            self.fail(sequence.state, RequestError(500, UNSOUND), now)
            # KV that others use stays: if it is at fault they fail as well, and the last of them drops it.
            idle = next((node for node in path if not node.busy and not node.is_dropped), None)
            if idle is not None:
                self._residency.discard(idle)
                self.collect()

    def _fork_off(self, parent: Sequence, tokens: tuple[int, ...], now: float) -> None:
        """Start the other samples, once the prompt is computed, each with a token of its own."""
        for index, token in enumerate(tokens[1:], 1):
            sample = parent.sample + index
            if sample in parent.state.open_samples and sample in parent.state.fresh:
                self._fork(parent, sample, index, token, now)
        parent.num_forks = 0

    def _fork(self, parent: Sequence, sample: int, index: int, token: int, now: float) -> None:
        child = self._new_sequence(parent.state, sample, parent.tokens[:])
        copy = None
        if parent.node is not None and len(self._held.admitted) < self._config.max_num_seqs:
            copy = self._held.admit_fork(child, parent, now)
            self.collect()
        if parent.stage is LEAVING:
            child.leave()
        elif child.node is None:
            # No room: it waits in its place and finds the prompt's full pages in the tree.
            self._waiting.put_back(child)
        elif copy is not None:
            self.send(commands.CopyPages((copy,)))
        self._take_token(child, token, (parent.id, index), now)

    def _take_token(
        self, sequence: Sequence, token: int, sampled_by: tuple[SequenceId, int], now: float
    ) -> None:
        """Append and announce a token, and the sample's end if it is the last."""
        state, sample, tokens = sequence.state, sequence.sample, sequence.tokens
        tokens.append(token)
        if sample not in state.open_samples:
            if sequence.stage is not ENDED:
                self._drop(sequence, now)
            return
        count = len(tokens) - sequence.num_prompt
        self.commands.append(commands.emit((state.id, sample, count - 1, token, sampled_by)))
        if token in state.stop_ids and count >= state.min_tokens:
            self._end_sample(state, sample, "stop", now)
        elif len(tokens) >= sequence.most_tokens:
            self._end_sample(state, sample, "length", now)

    # ------------------------------------------------------------ ends

    def abort(self, event: events.Abort, now: float) -> None:
        """End one open sample of a request, or all."""
        state = self.by_id.get(event.request)
        if state is None:
            return
        asked = state.open_samples if event.sample is None else {event.sample} & state.open_samples
        for sample in sorted(asked):
            self._end_sample(state, sample, event.reason, now)

    def fail(self, state: RequestState, error: RequestError, now: float) -> None:
        """End all open samples with an error."""
        for sample in sorted(state.open_samples):
            self._end_sample(state, sample, "error", now, error)

    def _end_sample(
        self, state: RequestState, sample: int, reason: str, now: float, error: RequestError | None = None
    ) -> None:
        """End a sample, once, in whatever stage it is."""
        state.end_sample(sample)
        self.send(commands.Finish(state.request.id, sample, reason, error))
        sequence = state.sequences.get(sample)
        # Sample 0 computes the prompt for all: it runs on unannounced while others have yet to fork off it.
        if sequence is not None and not (state.open_samples and sequence.num_forks):
            self._drop(sequence, now)
        if not state.open_samples:
            self._forget(state, now)
            if state.is_leaving:
                self.send(commands.Released(state.id, state.attempt, tuple(state.positions)))
        elif state.later and not state.sequences and not state.is_leaving:
            self._queue_later(state)

    def _forget(self, state: RequestState, now: float) -> None:
        for carrier in list(state.sequences.values()):
            self._drop(carrier, now)
        del self.by_id[state.id]
        self._leaving.pop(state.id, None)
        self.num_live[state.request.adapter] -= 1

    def _drop(self, sequence: Sequence, now: float) -> None:
        self._take_back(sequence, now)
        sequence.end()

    def _take_back(self, sequence: Sequence, now: float) -> None:
        """Take back the sequence's pages and its place in the queue."""
        if sequence.stage is WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is not LEAVING:
            self._held.release(sequence, now, now)
            self.collect()
        if sequence.forget_executor():
            self.send(commands.EndSequence(sequence.id))

    # ------------------------------------------------------------ hand-over to another replica

    def hand_over(self, event: events.Release, now: float) -> None:
        """Stop a request, which another replica goes on with; it is released when its last step has ended."""
        state = self.by_id.get(event.request)
        if state is None or state.attempt != event.attempt:
            self.send(commands.Released(event.request, event.attempt))
        elif not state.is_leaving:
            state.is_leaving = True
            self._leaving[state.id] = state
            for sequence in state.sequences.values():
                self._take_back(sequence, now)
                sequence.leave()

    def release_idle(self, now: float) -> None:
        """Release the leaving requests that have no step in flight any more."""
        for state in list(self._leaving.values()):
            if not any(self._held.is_in_flight(sequence) for sequence in state.sequences.values()):
                self._release(state, now)

    def _release(self, state: RequestState, now: float) -> None:
        """End this attempt at the request; it gets no more news here."""
        positions = tuple(state.position_of(sample) for sample in range(state.request.params.n))
        self._forget(state, now)
        self.send(commands.Released(state.id, state.attempt, positions))
