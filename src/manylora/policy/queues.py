"""Requests and sequences as the policy sees them, and the queue they wait in.

Owns the per-sequence bookkeeping (tokens, pages, what is computed) and arrival order; decides nothing.
"""

from __future__ import annotations

import array
import bisect
import collections
import enum
from typing import Final

from manylora.policy.tree import Node, PageKey
from manylora.protocol import SequenceStart
from manylora.types import AdapterId, PageId, Request, SequenceId

_TOKEN_BYTES = 8


class Stage(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


WAITING: Final = Stage.WAITING
RUNNING: Final = Stage.RUNNING
ENDED: Final = Stage.ENDED
"""Plain names: these are compared for every row of every step, and reading an Enum's member takes long."""


class RequestState:
    """A live request: its samples that have not ended yet, and limits resolved on arrival."""

    __slots__ = (
        "admitted", "arrived_s", "is_ready", "max_tokens", "open_samples", "order", "request", "sequences",
        "stop_ids",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, max_tokens: int, arrived_s: float) -> None:
        self.request = request
        self.order = order
        self.arrived_s = arrived_s
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(request.stop_ids)
        self.admitted = False
        self.is_ready = False
        # Samples without a sequence yet are open too: they fork off sample 0 when its prompt is computed.
        self.open_samples = set(range(request.params.n))
        self.sequences: dict[int, Sequence] = {}


class Sequence:
    """One sample of a request.

    Page table ``pages``: the first ``num_shared`` belong to tree nodes on the path that ends in ``node``
    (which the sequence pins while it holds a reservation); the rest are its own.

        tokens:  |<- prompt ->|<- generated ->|<- num_coming ->|
                 |<- num_computed ->|<- in flight ->|<- remaining ->|
                 |<-        num_scheduled         ->|
        pages:   [shared ... shared][own ... own]

    Without a step in flight nothing is coming, and what was scheduled is computed.
    """

    __slots__ = (
        "adapter_s", "admitted_s", "id", "is_known_to_executor", "is_prefetched", "keys", "last_step", "matched",
        "most_tokens", "node", "num_coming", "num_computed", "num_failed_copies", "num_prompt",
        "num_scheduled", "num_shared", "num_unborn_forks", "page_updates", "pages", "sample", "stage", "state",
        "tokens",
    )  # fmt: skip

    def __init__(self, sequence: SequenceId, state: RequestState, sample: int, tokens: list[int]) -> None:
        self.id = sequence
        self.state = state
        self.sample = sample
        self.tokens = tokens
        self.num_prompt = len(state.request.prompt)
        self.most_tokens = self.num_prompt + state.max_tokens
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_coming = 0  # tokens that steps in flight draw for it
        self.last_step = 0  # that has a row of it
        self.pages: list[PageId] = []
        self.num_shared = 0
        self.node: Node | None = None
        self.matched: Node | None = None  # the deepest node that it found rather than computed
        self.keys: list[PageKey] = []
        self.admitted_s = 0.0
        self.adapter_s: float | None = None  # how long it waited for its adapter, once it is there
        self.num_failed_copies = 0
        # Samples that will fork off this sequence once its prompt is computed.
        self.num_unborn_forks = state.request.params.n - 1 if sample == 0 else 0
        self.is_prefetched = False
        self.stage = WAITING
        # False from each admission until a step brings a SequenceStart.
        self.is_known_to_executor = False
        self.page_updates: list[tuple[int, PageId]] = []

    @property
    def order(self) -> tuple[int, int]:
        """Arrival order; earlier is more urgent and is preempted later."""
        return (self.state.order, self.sample)

    @property
    def num_remaining(self) -> int:
        """Tokens known, or soon known, that no step computes yet; 1 while decoding."""
        return len(self.tokens) + self.num_coming - self.num_scheduled

    @property
    def must_wait(self) -> bool:
        """Whether it can go on only when the token that is coming has come: others fork off then, or it ends."""
        num_known = len(self.tokens) + self.num_coming
        return self.num_coming > 0 and (self.num_unborn_forks > 0 or num_known >= self.most_tokens)

    @property
    def adapter(self) -> AdapterId:
        return self.state.request.adapter

    def start(self) -> SequenceStart:
        """What an executor must know to run it."""
        request = self.state.request
        return SequenceStart(
            sequence=self.id,
            sample=self.sample,
            adapter=request.adapter,
            tokens=tuple(self.tokens),
            num_prompt_tokens=self.num_prompt,
            num_computed=self.num_computed,
            pages=tuple(self.pages),
            params=request.params,
            stop_ids=request.stop_ids,
        )

    def page_keys(self, page_tokens: int) -> list[PageKey]:
        """The tokens of all full pages, cut once; the first page's stand behind the request's cache scope."""
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
                self.keys[0] = self.state.request.cache_scope.encode() + self.keys[0]
        return self.keys


class WaitingQueue:
    """Two queues, one behind the other, each in arrival order.

    Whoever returns (preempted, or a fork that found no room) comes before everybody who still waits for the first
    time; of those the oldest or the newest is next, as ``is_newest_first`` says at the moment. Admission takes
    only the first in line, so the second queue shrinks at its ends.
    """

    def __init__(self) -> None:
        self.is_newest_first = False
        self._returned: list[Sequence] = []
        self._arrived: collections.deque[Sequence] = collections.deque()
        self._num_arrived = 0
        self.num_by_adapter = collections.Counter[AdapterId]()
        """How many wait for each adapter that somebody waits for."""

    def __len__(self) -> int:
        return len(self._returned) + self._num_arrived

    @property
    def num_arrived(self) -> int:
        """Requests that wait and were never admitted."""
        return self._num_arrived

    def arrive(self, sequence: Sequence) -> None:
        """A sequence of a new request, later than all others."""
        self._arrived.append(sequence)
        self._num_arrived += 1
        self.num_by_adapter[sequence.adapter] += 1

    def put_back(self, sequence: Sequence) -> None:
        """A sequence of a request that was admitted before."""
        sequence.stage = WAITING
        self.num_by_adapter[sequence.adapter] += 1
        bisect.insort(self._returned, sequence, key=lambda s: s.order)

    def first(self) -> Sequence | None:
        """The first in line."""
        if self._returned:
            return self._returned[0]
        arrived = self._arrived
        if self.is_newest_first:
            while arrived and arrived[-1].stage is not WAITING:
                arrived.pop()
            return arrived[-1] if arrived else None
        while arrived and arrived[0].stage is not WAITING:
            arrived.popleft()
        return arrived[0] if arrived else None

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands; the caller then changes its stage for good.

        Inside ``_arrived`` it is only skipped later: a middle removal there means that it has ended.
        """
        self.num_by_adapter[sequence.adapter] -= 1
        if not self.num_by_adapter[sequence.adapter]:
            del self.num_by_adapter[sequence.adapter]
        if sequence in self._returned:
            self._returned.remove(sequence)
            return
        self._num_arrived -= 1
        if self._arrived[0] is sequence:
            self._arrived.popleft()
        elif self._arrived[-1] is sequence:
            self._arrived.pop()

    def leading(self, count: int) -> list[Sequence]:
        """The first few in line."""
        first = self._returned[:count]
        for sequence in reversed(self._arrived) if self.is_newest_first else self._arrived:
            if len(first) >= count:
                break
            if sequence.stage is WAITING:
                first.append(sequence)
        return first

    def arrived_until(self, moment: float) -> list[Sequence]:
        """Those that came by then and were never admitted, in arrival order."""
        early = []
        for sequence in self._arrived:
            if sequence.state.arrived_s > moment:
                break
            if sequence.stage is WAITING:
                early.append(sequence)
        return early

    def members(self) -> list[Sequence]:
        """All that wait: those that returned, then the others, each in arrival order."""
        return self._returned + [s for s in self._arrived if s.stage is WAITING]


Scheduled = tuple[Sequence, int, int]
"""A row of the step in flight: the sequence, tokens to compute, samples to draw."""
