"""Who holds which pages: admission, growth, release and preemption on the tree and the ledger together.

Every page has one owner: the ledger, a tree node, or one sequence's own part of its table. Reservations are
all-or-nothing. Does not choose what runs; ``replica`` asks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from manylora.config import PolicyConfig
from manylora.policy.pages import PageLedger
from manylora.policy.queues import Sequence, Stage, WaitingQueue
from manylora.policy.tree import DependencyTree, Residence
from manylora.protocol import Command, EndSequence, EvictAdapter, ReadAdapter
from manylora.types import AdapterId, PageId


class Counters:
    """Counts since the start; read by whoever wants to show them."""

    __slots__ = (
        "adapter_evictions", "adapter_reads", "history_evictions",
        "preemptions", "prefix_hits_tokens", "prefix_queries_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self.preemptions = 0
        self.adapter_reads = 0
        self.adapter_evictions = 0
        self.history_evictions = 0


class Reservations:
    """Sequences that hold pages (running, or loading: waiting only for their adapter), oldest first."""

    def __init__(
        self,
        config: PolicyConfig,
        tree: DependencyTree,
        waiting: WaitingQueue,
        emit: Callable[[Command], None],
    ) -> None:
        self._config = config
        self._tree = tree
        self._waiting = waiting
        self._emit = emit
        self.ledger = PageLedger(config.num_pages)
        self.counters = Counters()
        self.holders: list[Sequence] = []
        self.step_in_flight = False

    # ------------------------------------------------------------ pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that this many tokens fill, the last perhaps partly."""
        return -(-num_tokens // self._config.page_tokens)

    def _can_provide(self, count: int) -> bool:
        return self.ledger.num_free + self._tree.evictable_pages >= count

    def _provide(self, count: int) -> tuple[PageId, ...]:
        """Take pages, evicting as needed; the caller has asked ``_can_provide``."""
        while self.ledger.num_free < count:
            evicted = self._tree.evict_next()
            assert evicted is not None, "evictable pages were counted that cannot leave"
            node, pages = evicted
            # History and idle adapters are read by no step in flight: a step pins what it reads.
            self.ledger.release(pages, step_in_flight=False)
            if node.is_adapter:
                self.counters.adapter_evictions += 1
                self._emit(EvictAdapter(node.adapter))
            else:
                self.counters.history_evictions += 1
        return self.ledger.take(count)

    # ------------------------------------------------------------ taking

    def admit(self, sequence: Sequence, first_chunk: int, now: float) -> bool:
        """Reserve all that the sequence needs to start, or nothing (design §4).

        Pins the longest resident prefix, then takes pages for its adapter if absent and for the first
        ``first_chunk`` tokens not yet computed. The last known token is always computed again.
        """
        tree, tokens = self._tree, sequence.tokens
        adapter = sequence.adapter
        root = tree.node(adapter)
        matched = tree.match(
            adapter, tokens, self._config.page_tokens, (len(tokens) - 1) // self._config.page_tokens
        )
        deepest = matched[-1] if matched else root
        num_computed = len(matched) * self._config.page_tokens
        chunk = min(first_chunk, len(tokens) - num_computed)
        own_pages = self.pages_for(num_computed + chunk) - len(matched)
        is_absent = root.residence is Residence.ABSENT
        adapter_pages = tree.num_pages(adapter) if is_absent else 0
        tree.pin(deepest)
        if not self._can_provide(own_pages + adapter_pages):
            tree.unpin(deepest, deepest.last_use)
            return False
        if is_absent:
            self._start_read(adapter, self._provide(adapter_pages))
        sequence.node = deepest
        sequence.num_shared = len(matched)
        sequence.num_computed = num_computed
        sequence.pages = [node.pages[0] for node in matched]
        sequence.pages.extend(self._provide(own_pages))
        self._waiting.remove(sequence)
        self._hold(sequence)
        self.counters.prefix_queries_tokens += len(tokens)
        self.counters.prefix_hits_tokens += num_computed
        return True

    def admit_fork(self, child: Sequence, parent: Sequence) -> tuple[PageId, PageId] | None:
        """Give a fork its parent's full pages and a copy of the partial one.

        Returns the (source, destination) to copy, or None when no page could be had (``child`` then holds
        nothing) or no copy is needed; ``child.node`` tells the two apart.
        """
        assert parent.node is not None
        is_partial = child.num_prompt % self._config.page_tokens != 0
        if is_partial and not self._can_provide(1):
            return None
        own = self._provide(1) if is_partial else ()
        self._tree.pin(parent.node)
        child.node = parent.node
        child.num_shared = parent.num_shared
        child.num_computed = child.num_prompt
        child.pages = parent.pages[: parent.num_shared] + list(own)
        self._hold(child)
        return (parent.pages[parent.num_shared], own[0]) if own else None

    def _hold(self, sequence: Sequence) -> None:
        """Make it a holder; its caller has taken it out of the queue."""
        loading = self._tree.node(sequence.adapter).residence is Residence.LOADING
        sequence.stage = Stage.LOADING if loading else Stage.RUNNING
        sequence.page_updates.clear()
        bisect.insort(self.holders, sequence, key=lambda s: s.order)

    def _start_read(self, adapter: AdapterId, pages: tuple[PageId, ...]) -> None:
        self._tree.begin_load(adapter, pages)
        self.counters.adapter_reads += 1
        self._emit(ReadAdapter(adapter, pages))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the next ``num_tokens``, preempting newer holders if that is what it takes."""
        missing = self.pages_for(sequence.num_computed + num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        while not self._can_provide(missing):
            newest = self.holders[-1]
            if newest is sequence:
                return False
            self.preempt(newest)
        for page in self._provide(missing):
            sequence.page_updates.append((len(sequence.pages), page))
            sequence.pages.append(page)
        return True

    # ------------------------------------------------------------ letting go

    def release(self, sequence: Sequence, now: float) -> None:
        """Take everything back from a holder. What it filled stays in the tree as history."""
        assert sequence.node is not None
        self.ledger.release(sequence.pages[sequence.num_shared :], step_in_flight=self.step_in_flight)
        self._tree.unpin(sequence.node, now)
        sequence.node = None
        sequence.pages = []
        sequence.num_shared = 0
        sequence.num_computed = 0
        self.holders.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Send a holder back to its place in the queue; it computes again what history does not keep."""
        assert sequence.node is not None
        self.counters.preemptions += 1
        self.release(sequence, sequence.node.last_use)
        if sequence.is_known_to_executor:
            self._emit(EndSequence(sequence.id))
            sequence.is_known_to_executor = False
        self._waiting.put_back(sequence)

    # ------------------------------------------------------------ filling

    def note_computed(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Tokens were computed; pages that are full now enter the tree.

        Where an equal node exists already the sequence adopts its page and frees its own: the values agree
        up to rounding, and every full page then belongs to the tree.
        """
        size = self._config.page_tokens
        sequence.num_computed += num_tokens
        while (sequence.num_shared + 1) * size <= sequence.num_computed:
            index = sequence.num_shared
            node = sequence.node
            assert node is not None
            key = tuple(sequence.tokens[index * size : (index + 1) * size])
            child = self._tree.child(node, key)
            if child is None:
                child = self._tree.insert(node, key, sequence.pages[index], now)
            else:
                self.ledger.release((sequence.pages[index],), step_in_flight=self.step_in_flight)
                sequence.pages[index] = child.pages[0]
                sequence.page_updates.append((index, child.pages[0]))
            self._tree.move_pin(node, child)
            sequence.node = child
            sequence.num_shared += 1
