"""One replica's policy: events in, commands out (design §1, §4). The only door into ``policy`` for an engine.

Owns requests from arrival to their one end, and adapters from being added to being freed. What runs in a step
is ``batch``'s choice, who holds which page is ``reservations``'. Knows no clock, no tensor, no text.
"""

from __future__ import annotations

import collections
import dataclasses

from manylora.config import PolicyConfig
from manylora.policy.batch import compose
from manylora.policy.invariants import check
from manylora.policy.queues import RequestState, Scheduled, Sequence, Stage, WaitingQueue
from manylora.policy.reservations import Counters, Reservations
from manylora.policy.tree import DependencyTree, Residence
from manylora.protocol import (
    Abort,
    AdapterAdded,
    AdapterFreed,
    AdapterRead,
    AdapterRemoved,
    Admitted,
    Arrive,
    Command,
    CopyPages,
    Emit,
    EndSequence,
    Event,
    EvictAdapter,
    Finish,
    Reject,
    RunStep,
    SequenceStart,
    StepDone,
    StepRow,
)
from manylora.types import AdapterId, Request, RequestError, RequestId, SequenceId


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter at this moment; requests count once per sequence."""

    adapter: AdapterId
    state: str
    num_pages: int
    running: int
    waiting: int


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The replica's gauges; pages by use add up to ``pages_total``. ``adapters`` includes the base (0)."""

    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_running: int
    pages_history: int
    pages_adapters: int
    adapters: tuple[AdapterUse, ...]


class Replica:
    """The state machine. ``handle`` is the only way to change it; commands come in execution order."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._tree = DependencyTree()
        self._waiting = WaitingQueue()
        self._commands: list[Command] = []
        self._held = Reservations(config, self._tree, self._waiting, self._commands.append)
        self._requests: dict[RequestId, RequestState] = {}
        self._live: collections.Counter[AdapterId] = collections.Counter()
        self._removing: set[AdapterId] = set()
        self._num_arrivals = 0
        self._num_sequences = 0
        self._num_steps = 0
        self._in_flight: tuple[Scheduled, ...] | None = None

    # ------------------------------------------------------------ the door

    def handle(self, event: Event, now: float) -> list[Command]:
        """React to one event at time ``now`` (seconds, any origin, never decreasing)."""
        match event:
            case Arrive():
                self._arrive(event.request)
            case Abort():
                self._abort(event, now)
            case StepDone():
                self._step_done(event, now)
            case AdapterRead():
                self._adapter_read(event, now)
            case AdapterAdded():
                self._tree.add_adapter(event.adapter, event.num_pages)
            case AdapterRemoved():
                self._tree.mark_removed(event.adapter)
                self._removing.add(event.adapter)
        if self._removing:
            self._free_removed()
        if self._in_flight is None:
            self._start_step(now)
        commands = self._commands[:]
        self._commands.clear()
        return commands

    @property
    def counters(self) -> Counters:
        """Counts since the start (live object)."""
        return self._held.counters

    def snapshot(self) -> Snapshot:
        """The gauges of this moment. O(adapters + requests)."""
        running = collections.Counter[AdapterId]()
        waiting = collections.Counter[AdapterId]()
        for sequence in self._held.holders:
            where = running if sequence.stage is Stage.RUNNING else waiting
            where[sequence.adapter] += 1
        waiting.update(s.adapter for s in self._waiting.members())
        nodes = list(self._tree.adapters())
        idle_adapter_pages = sum(
            len(n.pages) for n in nodes if n.busy == 0 and n.residence is Residence.RESIDENT
        )
        ledger = self._held.ledger
        free = ledger.num_free + ledger.num_deferred
        history = self._tree.evictable_pages - idle_adapter_pages
        return Snapshot(
            num_running=running.total(),
            num_waiting=waiting.total(),
            pages_total=ledger.num_pages,
            pages_free=free,
            pages_running=ledger.num_pages - free - history - self._tree.adapter_pages,
            pages_history=history,
            pages_adapters=self._tree.adapter_pages,
            adapters=tuple(
                AdapterUse(
                    n.adapter,
                    n.residence.value,
                    self._tree.num_pages(n.adapter),
                    running[n.adapter],
                    waiting[n.adapter],
                )
                for n in [self._tree.base, *nodes]
            ),
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant of design §4 does not hold. For tests; O(everything)."""
        check(self._tree, self._held, self._waiting, self._requests, self._in_flight)

    # ------------------------------------------------------------ arrival and end

    def _arrive(self, request: Request) -> None:
        error = self._refusal(request)
        if error is not None:
            self._commands.append(Reject(request.id, error))
            return
        state = RequestState(request, self._num_arrivals, self._token_limit(request))
        self._num_arrivals += 1
        self._requests[request.id] = state
        self._live[request.adapter] += 1
        self._waiting.arrive(self._new_sequence(state, 0, list(request.prompt)))

    def _new_sequence(self, state: RequestState, sample: int, tokens: list[int]) -> Sequence:
        self._num_sequences += 1
        sequence = Sequence(self._num_sequences, state, sample, tokens)
        state.sequences[sample] = sequence
        return sequence

    def _token_limit(self, request: Request) -> int:
        """Tokens that one sample may generate: as asked, or as many as the context and the pool allow."""
        if request.params.max_tokens is not None:
            return request.params.max_tokens
        kv_pages = self._config.num_pages - self._tree.num_pages(request.adapter)
        # The last token generated is never computed, so it needs no room in a page.
        in_pool = kv_pages * self._config.page_tokens + 1
        return min(self._config.max_model_len, in_pool) - len(request.prompt)

    def _refusal(self, request: Request) -> RequestError | None:
        """Why the request can never be served as asked, if so."""
        if request.id in self._requests:
            return RequestError(400, f"request id {request.id!r} is already in use")
        if not self._tree.knows(request.adapter):
            return RequestError(404, "the adapter is not served any more", "model")
        if not request.prompt:
            return RequestError(400, "the prompt is empty", "prompt")
        num_prompt, limit = len(request.prompt), self._config.max_model_len
        num_generated = request.params.max_tokens or 1
        if num_prompt + num_generated > limit:
            return RequestError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + num_generated} tokens ({num_prompt} in the prompt, {num_generated} for the "
                "completion).",
                "max_tokens" if num_prompt < limit else "prompt",
            )
        adapter_pages = self._tree.num_pages(request.adapter)
        kv_pages = self._held.pages_for(num_prompt + num_generated - 1)
        if adapter_pages + kv_pages > self._config.num_pages:
            return RequestError(
                400,
                f"the request needs {adapter_pages + kv_pages} pages ({adapter_pages} for its adapter, "
                f"{kv_pages} for {num_prompt + num_generated - 1} tokens) but the pool has "
                f"{self._config.num_pages}",
                "max_tokens",
            )
        return None

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
        state.open_samples.remove(sample)
        self._commands.append(Finish(state.request.id, sample, reason, error))
        sequence = state.sequences.get(sample)
        # Sample 0 computes the prompt for all: it runs on unheard while others have yet to fork off it.
        if sequence is not None and not (state.open_samples and sequence.num_unborn_forks):
            self._drop(sequence, now)
        if not state.open_samples:
            for carrier in list(state.sequences.values()):
                self._drop(carrier, now)
            del self._requests[state.request.id]
            self._live[state.request.adapter] -= 1

    def _drop(self, sequence: Sequence, now: float) -> None:
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
        else:
            self._held.release(sequence, now)
        if sequence.is_known_to_executor:
            self._commands.append(EndSequence(sequence.id))
        sequence.stage = Stage.ENDED
        del sequence.state.sequences[sequence.sample]

    def _fail_request(self, state: RequestState, error: RequestError, now: float) -> None:
        for sample in sorted(state.open_samples):
            self._end_sample(state, sample, "error", now, error)

    # ------------------------------------------------------------ adapters

    def _adapter_read(self, event: AdapterRead, now: float) -> None:
        readers = [s for s in self._held.holders if s.stage is Stage.LOADING and s.adapter == event.adapter]
        if event.ok:
            self._tree.finish_load(event.adapter, now)
            for sequence in readers:
                sequence.stage = Stage.RUNNING
            return
        status = 400 if event.is_at_fault else 503
        error = RequestError(status, f"the adapter could not be read: {event.error}", "model")
        for state in {s.state.order: s.state for s in readers}.values():
            self._fail_request(state, error, now)
        self._held.ledger.release(self._tree.cancel_load(event.adapter), step_in_flight=False)

    def _free_removed(self) -> None:
        """Give back what removed adapters hold, once no request uses them and no read is under way."""
        for adapter in sorted(self._removing):
            node = self._tree.node(adapter)
            if self._live[adapter] or node.residence is Residence.LOADING:
                continue
            if node.residence is Residence.RESIDENT:
                # A step in flight may still run rows of a request that was just aborted.
                pages = self._tree.drop_subtree(adapter)
                self._held.ledger.release(pages, step_in_flight=self._held.step_in_flight)
                self._commands.append(EvictAdapter(adapter))
            self._tree.forget(adapter)
            self._removing.remove(adapter)
            del self._live[adapter]
            self._commands.append(AdapterFreed(adapter))

    # ------------------------------------------------------------ steps

    def _start_step(self, now: float) -> None:
        scheduled = compose(self._config, self._held, self._waiting, now, self._note_admission)
        if not scheduled:
            return
        self._num_steps += 1
        starts, rows = [], []
        for item in scheduled:
            sequence = item.sequence
            if not sequence.is_known_to_executor:
                starts.append(_start_of(sequence))
                sequence.is_known_to_executor = True
                sequence.page_updates.clear()
            rows.append(
                StepRow(
                    sequence.id,
                    sequence.num_computed,
                    item.num_tokens,
                    item.num_samples,
                    tuple(sequence.page_updates),
                )
            )
            sequence.page_updates.clear()
        self._in_flight = tuple(scheduled)
        self._held.step_in_flight = True
        self._commands.append(RunStep(self._num_steps, tuple(starts), tuple(rows)))

    def _note_admission(self, sequence: Sequence) -> None:
        if not sequence.state.admitted:
            sequence.state.admitted = True
            self._commands.append(Admitted(sequence.state.request.id, sequence.num_computed))

    def _step_done(self, event: StepDone, now: float) -> None:
        if event.step != self._num_steps or self._in_flight is None:
            raise AssertionError(f"step {event.step} is not in flight")
        rows, self._in_flight = self._in_flight, None
        self._held.step_in_flight = False
        self._held.ledger.settle()
        drawn = dict(event.tokens)
        for row in rows:
            sequence = row.sequence
            if sequence.stage is Stage.ENDED:
                continue
            if not event.ok:
                error = RequestError(500, f"the step that ran this request failed: {event.error}")
                self._fail_request(sequence.state, error, now)
                continue
            self._held.note_computed(sequence, row.num_tokens, now)
            if row.num_samples:
                self._take_tokens(sequence, drawn[sequence.id], now)

    def _take_tokens(self, sequence: Sequence, tokens: tuple[int, ...], now: float) -> None:
        """Append what was drawn; where a request's samples fork, there is one token for each."""
        state = sequence.state
        for sample in range(1, len(tokens)):
            if sample in state.open_samples:
                self._fork(sequence, sample, tokens[sample], now)
        sequence.tokens.append(tokens[0])
        if sequence.sample in state.open_samples:
            self._emit(sequence, (sequence.id, 0), now)
        elif sequence.stage is not Stage.ENDED:
            self._drop(sequence, now)

    def _fork(self, parent: Sequence, sample: int, token: int, now: float) -> None:
        child = self._new_sequence(parent.state, sample, [*parent.tokens, token])
        copy = None
        if len(self._held.holders) < self._config.max_num_seqs:
            copy = self._held.admit_fork(child, parent)
        if child.node is None:
            # No room: it waits in its place and finds the prompt's full pages in the tree.
            self._waiting.put_back(child)
        elif copy is not None:
            self._commands.append(CopyPages((copy,)))
        self._emit(child, (parent.id, sample), now)

    def _emit(self, sequence: Sequence, drawn_by: tuple[SequenceId, int], now: float) -> None:
        """Announce the newest token, and the end where this is it."""
        state, position = sequence.state, sequence.num_generated - 1
        token = sequence.tokens[-1]
        self._commands.append(Emit(state.request.id, sequence.sample, position, token, drawn_by))
        if token in state.stop_ids and position + 1 >= state.request.params.min_tokens:
            self._end_sample(state, sequence.sample, "stop", now)
        elif position + 1 >= state.max_tokens:
            self._end_sample(state, sequence.sample, "length", now)


def _start_of(sequence: Sequence) -> SequenceStart:
    request = sequence.state.request
    return SequenceStart(
        sequence=sequence.id,
        sample=sequence.sample,
        adapter=request.adapter,
        tokens=tuple(sequence.tokens),
        num_prompt_tokens=sequence.num_prompt,
        num_computed=sequence.num_computed,
        pages=tuple(sequence.pages),
        params=request.params,
        stop_ids=request.stop_ids,
    )
