"""Requests and sequences as the policy sees them.

Owns the bookkeeping of tokens, pages and stages. Decides nothing.
"""

from __future__ import annotations

import array
import enum
import operator
from collections.abc import Sequence as SequenceOf

from manylora.policy.tree import Node, PageKey
from manylora.protocol import commands, events
from manylora.types import BASE, AdapterId, PageId, SequenceId

_TOKEN_BYTES = 8
_MOST_SAMPLES = 128
"""The most samples of one request, as in ``SamplingParams``."""


class Stage(enum.Enum):
    """The stage of a sequence from arrival to end.

    LEAVING: without pages and without new steps; the request is released when the steps in flight have ended.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDED = "ended"


WAITING, LOADING, RUNNING, LEAVING, ENDED = Stage
"""Plain names, in the order of the class: these are compared for every row of every step, and reading an Enum's
member takes long."""


class RequestState:
    """A live request: its samples that have not ended yet, and limits resolved on arrival.

    ``arrived_s``: when it first came, wherever that was. ``admitted``: its service has begun, here or
    elsewhere. ``fresh``: samples without a token; they fork off the least of them, which computes the prompt.
    ``later``: samples with tokens that have no sequence yet (``Replica``). Where log-probabilities of the
    prompt are asked for, those of the tokens after its first ``num_scored`` positions are known, and of
    ``num_unscored`` are not.
    """

    __slots__ = (
        "admitted", "arrived_s", "attempt", "fresh", "id", "is_announced", "is_leaving", "is_ready",
        "later", "max_tokens", "min_tokens", "num_scored", "num_unscored", "open_samples", "order",
        "positions", "request", "sequences", "stop_ids",
    )  # fmt: skip

    def __init__(self, event: events.Arrive, order: int, max_tokens: int, now: float) -> None:
        self.request = request = event.request
        self.id = request.id
        self.order = order
        self.arrived_s = now - event.waited_s
        self.max_tokens = max_tokens
        self.min_tokens = request.params.min_tokens
        self.stop_ids = frozenset(request.stop_ids)
        self.attempt = event.attempt
        self.admitted = is_resumed = any(event.resume)
        self.is_announced = False
        self.is_ready = False
        self.is_leaving = False
        # Samples without a sequence yet are open too.
        self.open_samples = set(range(request.params.n)).difference(event.closed)
        self.sequences: dict[int, Sequence] = {}
        self.positions = [len(tokens) for tokens in event.resume] or [0] * request.params.n
        """Tokens of each sample when it ended, or when it came."""
        self.fresh = [sample for sample in sorted(self.open_samples) if not self.positions[sample]]
        self.later: dict[int, SequenceOf[int]] = {}
        # One that has a token has had them all.
        last = 0 if request.params.prompt_logprobs is None else len(request.prompt) - 1
        self.num_scored, self.num_unscored = (last, 0) if is_resumed else (0, last)

    def end_of(self, tokens: SequenceOf[int]) -> str | None:
        """Return why a sample with these tokens has ended, if it has."""
        if tokens and tokens[-1] in self.stop_ids and len(tokens) >= self.min_tokens:
            return "stop"
        return "length" if len(tokens) >= self.max_tokens else None

    def note_admission(self) -> bool:
        """Note that a sequence left the queue; return whether it is the request's first here."""
        is_first, self.is_announced, self.admitted = not self.is_announced, True, True
        return is_first

    def note_ready(self) -> bool:
        """Note that a sequence has all that it reuses; return whether it is the request's first."""
        is_first, self.is_ready = not self.is_ready, True
        return is_first

    def score(self, sequence: Sequence, step: int) -> bool:
        """Note a computed row of the sequence, which may have lost its pages meanwhile.

        Return whether more log-probabilities of the prompt are known by that.
        """
        start, end = sequence.scoring.pop(step, (0, 0))
        num_new = min(end - self.num_scored, self.num_unscored) if start <= self.num_scored else 0
        if num_new <= 0:
            return False
        self.num_scored += num_new
        self.num_unscored -= num_new
        return True

    def end_sample(self, sample: int) -> None:
        """Close a sample; none of its later tokens is announced."""
        self.positions[sample] = self.position_of(sample)
        self.open_samples.remove(sample)

    def position_of(self, sample: int) -> int:
        """Return how many tokens the sample has, or had when it ended."""
        sequence = self.sequences.get(sample)
        if sequence is None or sample not in self.open_samples:
            return self.positions[sample]
        return len(sequence.tokens) - sequence.num_prompt


class Sequence:
    """One sample of a request.

    Page table ``pages``: the first ``num_shared`` belong to tree nodes on the path that ends in ``node``
    (which the sequence pins while it holds a reservation); the rest are its own.

        tokens:  |<- prompt ->|<- generated ->|<- num_pending ->|
                 |<- num_computed ->|<- in flight ->|<- remaining ->|
                 |<-        num_scheduled         ->|
        pages:   [shared ... shared][own ... own]

    Without a step in flight no token is pending, and what was scheduled is computed.
    """

    __slots__ = (
        "adapter", "adapter_s", "admitted_s", "cold_source", "first_rotary_row", "id",
        "is_known_to_executor", "is_prefetched", "keys", "last_step", "matched", "most_tokens", "node",
        "num_at_admission", "num_computed", "num_failed_copies", "num_forks", "num_pending", "num_prompt",
        "num_scheduled", "num_shared", "order", "overtaken_s", "page_updates", "pages", "paused_s",
        "sample", "scoring", "stage", "state", "tokens",
    )  # fmt: skip

    def __init__(self, sequence: SequenceId, state: RequestState, sample: int, tokens: list[int]) -> None:
        self.id = sequence
        self.state = state
        self.sample = sample
        self.order = (state.arrived_s, state.order * _MOST_SAMPLES + sample)
        """The order of arrival; earlier sequences are admitted sooner and preempted later."""
        self.adapter: AdapterId = state.request.adapter
        self.tokens = tokens
        self.num_prompt = len(state.request.prompt)
        self.most_tokens = self.num_prompt + state.max_tokens
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0  # tokens that steps in flight sample for it
        self.last_step = 0  # that has a row of it
        self.pages: list[PageId] = []
        self.num_shared = 0
        self.node: Node | None = None
        self.matched: Node | None = None  # the deepest node that it found rather than computed
        self.keys: list[PageKey] = []
        self.admitted_s = 0.0
        self.adapter_s: float | None = None  # how long it waited for its adapter, once it is there
        self.cold_source: str | None = (
            None  # where its adapter was when it was admitted, if not on the device
        )
        self.num_failed_copies = 0
        self.num_at_admission = len(tokens)  # its tokens when it was admitted last
        # Samples that will fork off this sequence once its prompt is computed, with its first token.
        self.num_forks = state.fresh[-1] - sample if state.fresh[:1] == [sample] else 0
        self.first_rotary_row = 0  # more for a long context, whose keys are others
        self.is_prefetched = False
        self.overtaken_s: float | None = None  # since when others go before it for their adapters' sake
        self.paused_s: float | None = None  # since when it holds pages and may not run (``merging``)
        self.stage = WAITING
        # False from each admission until a step brings a SequenceStart.
        self.is_known_to_executor = False
        self.page_updates: list[tuple[int, PageId]] = []
        # By step, which of the prompt's positions it computes, where their log-probabilities are asked for.
        self.scoring: dict[int, tuple[int, int]] = {}
        state.sequences[sample] = self

    # ------------------------------------------------------------ asked

    @property
    def has_drawn(self) -> bool:
        """Whether a step has drawn a token for the sequence since its admission, or will."""
        return self.num_pending > 0 or len(self.tokens) > self.num_at_admission

    @property
    def num_remaining(self) -> int:
        """The tokens, known or soon known, that no step computes yet; 1 while decoding."""
        return len(self.tokens) + self.num_pending - self.num_scheduled

    @property
    def must_wait(self) -> bool:
        """Whether the sequence must wait for its pending token: others fork off it then, or it ends."""
        num_known = len(self.tokens) + self.num_pending
        return self.num_pending > 0 and (self.num_forks > 0 or num_known >= self.most_tokens)

    @property
    def scope(self) -> bytes:
        """The bytes before the tokens of the first page. A request's own scope is hexadecimal."""
        return self.state.request.cache_scope.encode() + (b"long" if self.first_rotary_row else b"")

    def outgrows(self, long_from: int | None) -> bool:
        """Return whether the tokens, with pending ones, exceed the context that the KV is computed for."""
        is_short = long_from is not None and not self.first_rotary_row
        return is_short and len(self.tokens) + self.num_pending > (long_from or 0)

    def page_keys(self, page_tokens: int) -> list[PageKey]:
        """Return the keys of all full pages, each cut once; the first has the request's cache scope before
        it."""
        first, size = len(self.keys), page_tokens * _TOKEN_BYTES
        num_new = len(self.tokens) // page_tokens - first
        if num_new > 0:
            new = self.tokens[first * page_tokens : (first + num_new) * page_tokens]
            cells = array.array("q", new).tobytes()
            if num_new == 1:  # as it goes while tokens are generated
                self.keys.append(cells)
            else:
                self.keys += [cells[start : start + size] for start in range(0, len(cells), size)]
            if first == 0:
                # Whatever lies below a first page that only one scope finds is that scope's alone. All pages have
                # one length, so where the scope ends is clear.
                self.keys[0] = self.scope + self.keys[0]
        return self.keys

    # ------------------------------------------------------------ waiting and holding

    def note_overtaken(self, now: float) -> None:
        """Note that another sequence overtook this one for its adapter's sake."""
        if self.overtaken_s is None:
            self.overtaken_s = now

    def hold(self, deepest: Node, num_shared: int, num_computed: int, own_pages: SequenceOf[PageId]) -> None:
        """Admit the sequence, which now waits for its copies; ``run`` sets the ids of shared pages."""
        self.node = self.matched = deepest
        self.num_shared = num_shared
        self.num_at_admission = len(self.tokens)
        self.num_computed = self.num_scheduled = num_computed
        self.pages = [-1] * num_shared
        self.pages.extend(own_pages)
        self.page_updates.clear()
        self.stage = LOADING

    def hold_fork(self, parent: Sequence, own_pages: SequenceOf[PageId]) -> None:
        """Admit a fork of a sequence whose prompt is computed; it runs on from there."""
        assert parent.node is not None
        self.first_rotary_row, self.keys = parent.first_rotary_row, []
        self.hold(parent.node, parent.num_shared, self.num_prompt, own_pages)
        self.run(parent.pages[: parent.num_shared])

    def note_admission(self, now: float, source: str | None) -> None:
        """Note the moment of admission, for the parts of the wait. ``source``: where the adapter is, if not on
        the device."""
        self.admitted_s = now
        self.cold_source = source
        self.adapter_s = 0.0 if source is None else None

    def note_adapter(self, now: float) -> None:
        """Note that the sequence's adapter is there."""
        if self.adapter_s is None:
            self.adapter_s = now - self.admitted_s

    def note_failed_copy(self) -> int:
        """Count a failed copy that the sequence waited for; return the count."""
        self.num_failed_copies += 1
        return self.num_failed_copies

    def plan_pages(self, shared_pages: SequenceOf[PageId]) -> None:
        """Set the shared pages of a row that runs before their contents have landed."""
        self.pages[: len(shared_pages)] = shared_pages

    def run(self, shared_pages: SequenceOf[PageId]) -> None:
        """Start the sequence, now that all that it reuses is there."""
        if self.is_known_to_executor:  # it had a row before: the executor must know of changed pages
            for index, (old, new) in enumerate(zip(self.pages, shared_pages)):
                if old != new:
                    self.page_updates.append((index, new))
        self.pages[: len(shared_pages)] = shared_pages
        self.stage = RUNNING

    def add_pages(self, pages: SequenceOf[PageId]) -> None:
        """Add room for more tokens."""
        for page in pages:
            self.page_updates.append((len(self.pages), page))
            self.pages.append(page)

    def enter(self, node: Node, instead: PageId | None) -> None:
        """Give the first own page to a node; ``instead``: the node's page, if that is another."""
        if instead is not None:
            self.pages[self.num_shared] = instead
            self.page_updates.append((self.num_shared, instead))
        self.node = node
        self.num_shared += 1

    def release(self) -> None:
        """Drop all pages and the node."""
        self.node = self.matched = None
        self.pages = []
        self.num_shared = 0
        self.num_computed = self.num_scheduled = 0

    def lengthen(self, long_from: int | None) -> None:
        """Switch a sequence without pages to a long context, if it needs one."""
        if self.outgrows(long_from):
            self.first_rotary_row, self.keys = long_from or 0, []

    def forget_executor(self) -> bool:
        """Note that the executor must forget the sequence; return whether it knew it."""
        was_known, self.is_known_to_executor = self.is_known_to_executor, False
        return was_known

    def wait_again(self) -> None:
        """Set the stage to WAITING."""
        self.stage = WAITING
        self.overtaken_s = None

    def leave(self) -> None:
        """Set the stage to LEAVING; the sequence holds nothing."""
        self.stage = LEAVING

    def end(self) -> None:
        """End the sequence, once."""
        self.stage = ENDED
        del self.state.sequences[self.sample]

    # ------------------------------------------------------------ steps

    def row_failed(self, draws: bool) -> None:
        """Note a failed row of the sequence."""
        self.num_pending -= draws


by_arrival = operator.attrgetter("order")
"""The key that sorts sequences by arrival."""

Scheduled = tuple[Sequence, int, int]
"""A row of a step: the sequence, tokens to compute, samples to draw."""


def run_step(
    step: int,
    scheduled: list[Scheduled],
    merged: AdapterId = BASE,
    awaits: tuple[commands.Await, ...] = (),
    cpu: tuple[commands.CpuRows, ...] = (),
) -> commands.RunStep:
    """Note the rows as scheduled, and return the command that computes them.

    ``merged``: the adapter in the weights. ``awaits``: copies that rows wait for. ``cpu``: rows that the CPU
    serves.
    """
    starts: list[commands.SequenceStart] = []
    rows: list[commands.StepRow] = []
    for sequence, num_tokens, num_samples in scheduled:
        changed: tuple[tuple[int, PageId], ...] = ()
        if sequence.page_updates:
            changed = tuple(sequence.page_updates)
            sequence.page_updates.clear()
        if not sequence.is_known_to_executor:
            starts.append(_start_of(sequence))
            sequence.is_known_to_executor = True
            changed = ()
        first = sequence.num_scheduled
        rows.append(commands.step_row((sequence.id, first, num_tokens, num_samples, changed)))
        if sequence.state.num_unscored:
            sequence.scoring[step] = first, first + num_tokens
        sequence.num_scheduled = first + num_tokens
        sequence.last_step = step
        if num_samples:
            sequence.num_pending += 1
    return commands.RunStep(step, tuple(starts), tuple(rows), merged, awaits, cpu)


def rows_ended(scheduled: list[Scheduled]) -> None:
    """Note the rows of a step as computed.

    A sequence that was preempted meanwhile has no pages. A loading one was served by the CPU.
    """
    for sequence, num_tokens, num_samples in scheduled:
        if sequence.stage is RUNNING or sequence.stage is LOADING:
            sequence.num_computed += num_tokens
        if num_samples:
            sequence.num_pending -= 1


def _start_of(sequence: Sequence) -> commands.SequenceStart:
    request = sequence.state.request
    return commands.SequenceStart(
        sequence=sequence.id,
        sample=sequence.sample,
        adapter=request.adapter,
        tokens=tuple(sequence.tokens),
        num_prompt_tokens=sequence.num_prompt,
        num_computed=sequence.num_computed,
        pages=tuple(sequence.pages),
        params=request.params,
        stop_ids=request.stop_ids,
        request=request.id,
        first_rotary_row=sequence.first_rotary_row,
        num_scored=sequence.state.num_scored,
    )
