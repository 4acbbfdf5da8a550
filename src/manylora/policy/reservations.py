"""What sequences hold: admission, growth, release and preemption.

Reservations are all-or-nothing. Owns the holders and their page tables; where pages come from is ``cache``'s,
and what runs is ``batch``'s and ``replica``'s.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
from collections.abc import Callable

from manylora.config import PolicyConfig
from manylora.policy.cache import Cache
from manylora.policy.queues import RUNNING, Sequence, Stage, WaitingQueue
from manylora.policy.tree import ABSENT, HELD, LOADING, RESIDENT, STANDBY, Node, path_to
from manylora.protocol import Command, EndSequence
from manylora.types import PageId


class Growth(enum.Enum):
    """Whether a sequence got its next pages: now, not yet (they are on their way), or not at all."""

    DONE = "done"
    SOON = "soon"
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """What a waiting sequence needs to start: nodes that it reuses, ``missing`` those of them that only the host
    has; own pages, for the first ``num_tokens`` that it computes."""

    root: Node
    path: list[Node]
    missing: list[Node]
    num_tokens: int
    own_pages: int

    @property
    def deepest(self) -> Node:
        """On which all that it reuses depends."""
        return self.path[-1] if self.path else self.root


class Reservations:
    """Sequences that hold pages (running, or loading: waiting for a copy), oldest first."""

    def __init__(
        self, config: PolicyConfig, cache: Cache, waiting: WaitingQueue, emit: Callable[[Command], None]
    ) -> None:
        self._config = config
        self._cache = cache
        self._tree = cache.tree
        self._waiting = waiting
        self._emit = emit
        self._promised = 0  # pages on their way that others in this step already wait for
        self.holders: list[Sequence] = []
        self.num_loading = 0  # of them

    @property
    def num_preemptions(self) -> int:
        """How many sequences were preempted so far."""
        return self._cache.counters.preemptions

    def pages_for(self, num_tokens: int) -> int:
        """Pages that this many tokens fill, the last perhaps partly."""
        return -(-num_tokens // self._config.page_tokens)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a step in flight has a row of it."""
        return not self._cache.device.has_ended(sequence.last_step)

    # ------------------------------------------------------------ taking

    def match(self, sequence: Sequence) -> list[Node]:
        """History that the sequence can reuse, in either tier. Its last known token is always computed."""
        if not self._cache.policy.keeps_history:
            return []
        size = self._config.page_tokens
        return self._tree.match(
            sequence.adapter, sequence.page_keys(size), (len(sequence.tokens) - 1) // size
        )

    def _need(self, sequence: Sequence, first_chunk: int) -> Need:
        """What it takes for the sequence to start with up to ``first_chunk`` tokens; keeps what was leaving.

        What stands by stays so: who cannot be admitted yet takes no page from those that run.
        """
        cache = self._cache
        root = self._tree.node(sequence.adapter)
        path = self.match(sequence)
        cache.rescue(path, with_standby=False)
        missing = [node for node in path if node.residence is ABSENT]
        if not cache.saving.is_copy_cheaper(missing):
            path = [*itertools.takewhile(lambda node: node.residence is not ABSENT, path)]
            missing = []
        num_computed = len(path) * self._config.page_tokens
        chunk = min(first_chunk, len(sequence.tokens) - num_computed)
        own_pages = self.pages_for(num_computed + chunk) - len(path)
        return Need(root, path, missing, chunk, own_pages)

    def admit(self, sequence: Sequence, first_chunk: int, now: float) -> bool:
        """Reserve all that the sequence needs to start, or nothing (design §4).

        Pins what it can reuse in either tier, then takes pages for what of that is not on the device (with
        its adapter) and for the first ``first_chunk`` tokens that it must compute; starts the copies.
        """
        cache, tree = self._cache, self._tree
        need = self._need(sequence, first_chunk)
        root, path, missing, deepest = need.root, need.path, need.missing, need.deepest
        adapter_pages = root.num_pages if root.residence is ABSENT else 0
        num_standing = sum(node.residence is STANDBY for node in path)
        tree.pin(deepest)
        if not cache.provide(need.own_pages + len(missing) + num_standing, adapter_pages):
            tree.unpin(deepest, deepest.last_use)
            return False
        if num_standing:
            cache.rescue(path)
            missing = [node for node in path if node.residence is ABSENT]
        self._count_hits(root, path, len(sequence.tokens))
        cache.load([root, *missing] if adapter_pages else missing, "demand")
        cache.rescue(path)
        cache.visits.matched(deepest, now)
        sequence.node = deepest
        sequence.matched = deepest
        sequence.num_shared = len(path)
        sequence.num_computed = sequence.num_scheduled = len(path) * self._config.page_tokens
        sequence.pages = [-1] * len(path)  # known when all are there
        sequence.pages.extend(cache.device.take(need.own_pages))
        self._waiting.remove(sequence)
        sequence.stage = Stage.LOADING
        self.num_loading += 1
        sequence.page_updates.clear()
        bisect.insort(self.holders, sequence, key=lambda s: s.order)
        self.start_if_ready(sequence)
        return True

    def make_room_for_queue(self, budget: int) -> None:
        """The first in line waits for pages: have those behind it wait for the same copies, not for their own
        after it.

        For as many together as ``budget`` tokens, the limit of sequences and the pool let in. A policy that
        keeps pages free ahead of demand does without.
        """
        cache, tree = self._cache, self._tree
        if not cache.policy.makes_room_for_queue:
            return
        coming: set[Node] = set()
        pinned: list[Node] = []
        # Holders are served first in the next step: those whose pages are then full take one more.
        size = self._config.page_tokens
        num_growing = sum(len(s.tokens) + s.num_coming == len(s.pages) * size for s in self.holders)
        kv_pages, adapter_pages = self._promised + num_growing, 0
        for sequence in self._waiting.leading(self._config.max_num_seqs - len(self.holders)):
            need = self._need(sequence, budget)
            more_kv = need.own_pages + sum(node not in coming for node in need.missing)
            is_read = need.root.residence is ABSENT and need.root not in coming
            more_adapters = need.root.num_pages if is_read else 0
            # Nobody's room is to be made of what another of them will use.
            tree.pin(need.deepest)
            if not cache.may_provide(kv_pages + more_kv, adapter_pages + more_adapters):
                tree.unpin(need.deepest, need.deepest.last_use)
                break
            pinned.append(need.deepest)
            kv_pages += more_kv
            adapter_pages += more_adapters
            coming.update(need.missing, [need.root])
            budget -= need.num_tokens
            if budget <= 0:
                break
        cache.provide(kv_pages, adapter_pages)
        for node in pinned:
            tree.unpin(node, node.last_use)

    def _count_hits(self, root: Node, path: list[Node], num_tokens: int) -> None:
        counters, size = self._cache.counters, self._config.page_tokens
        on_host = sum(node.residence in (ABSENT, LOADING) for node in path)
        counters.prefix_queries_tokens += num_tokens
        counters.prefix_hits_tokens += len(path) * size
        counters.kv_hit_tokens_device += (len(path) - on_host) * size
        counters.kv_hit_tokens_host += on_host * size
        if root.num_pages == 0:
            return
        if root.residence is RESIDENT:
            counters.adapter_hits_device += 1
        elif root.host is HELD:
            counters.adapter_hits_host += 1
        else:
            counters.adapter_misses += 1

    def start_if_ready(self, sequence: Sequence) -> bool:
        """Let a loading sequence run if all it reuses is resident."""
        assert sequence.node is not None
        if self._tree.keeps_dependencies and sequence.node.residence is not RESIDENT:
            return False  # one look suffices: whatever is resident has a resident parent
        path = path_to(sequence.node)
        if not all(node.residence is RESIDENT for node in path):
            return False
        if self._tree.node(sequence.adapter).residence is not RESIDENT:
            return False
        sequence.pages[: len(path)] = [node.pages[0] for node in path]
        sequence.stage = RUNNING
        self.num_loading -= 1
        return True

    def admit_fork(self, child: Sequence, parent: Sequence) -> tuple[PageId, PageId] | None:
        """Give a fork its parent's full pages and a copy of the partial one.

        Returns the (source, destination) to copy, or None when no page could be had (``child`` then holds
        nothing) or no copy is needed; ``child.node`` tells the two apart.
        """
        assert parent.node is not None
        is_partial = child.num_prompt % self._config.page_tokens != 0
        if is_partial and not self._cache.provide(1):
            return None
        own = self._cache.device.take(1) if is_partial else ()
        self._tree.pin(parent.node)
        child.node = parent.node
        child.matched = parent.node
        child.num_shared = parent.num_shared
        child.num_computed = child.num_scheduled = child.num_prompt
        child.pages = parent.pages[: parent.num_shared] + list(own)
        child.stage = RUNNING
        child.page_updates.clear()
        bisect.insort(self.holders, child, key=lambda s: s.order)
        return (parent.pages[parent.num_shared], own[0]) if own else None

    def begin_step(self) -> None:
        """A step is about to be composed."""
        self._promised = 0

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth:
        """Make room for the next ``num_tokens``, preempting newer holders if that is what it takes."""
        num_tokens += sequence.num_scheduled
        if num_tokens <= len(sequence.pages) * self._config.page_tokens:
            return Growth.DONE
        missing = self.pages_for(num_tokens) - len(sequence.pages)
        while not self._cache.provide(missing + self._promised):
            if self._cache.will_provide(missing + self._promised):
                self._promised += missing
                return Growth.SOON
            newest = self.holders[-1]
            if newest is sequence:
                return Growth.NONE
            self.preempt(newest)
        for page in self._cache.device.take(missing):
            sequence.page_updates.append((len(sequence.pages), page))
            sequence.pages.append(page)
        return Growth.DONE

    def path_of(self, sequence: Sequence) -> list[Node]:
        """The KV nodes that a sequence uses, or could use if it waits; parents first."""
        if sequence.node is not None:
            return path_to(sequence.node)
        keys = sequence.page_keys(self._config.page_tokens)
        return self._tree.match(sequence.adapter, keys, len(keys))

    # ------------------------------------------------------------ letting go

    def release(self, sequence: Sequence, now: float) -> None:
        """Take everything back from a holder. What it filled stays in the tree as history."""
        node, cache = sequence.node, self._cache
        assert node is not None
        assert sequence.matched is not None
        own = sequence.pages[sequence.num_shared :]
        cache.device.release(own)
        cache.visits.computed(sequence.matched, node, cache.now)
        self._tree.unpin(node, now)
        if not cache.policy.keeps_history:
            self._drop_unused(node)
        sequence.node = sequence.matched = None
        sequence.pages = []
        sequence.num_shared = 0
        sequence.num_computed = sequence.num_scheduled = 0
        self.num_loading -= sequence.stage is Stage.LOADING
        self.holders.remove(sequence)

    def _drop_unused(self, node: Node) -> None:
        """Keep nothing that no running request uses (the paper's S-LoRA baseline)."""
        step: Node | None = node
        while step is not None and step.busy == 0:
            above = step.parent
            if step.parent is not None and not step.children:
                self._cache.discard(step)
            elif step.parent is None and self._tree.may_leave(step):
                self._cache.evict(step, None, "unused")
            step = above

    def preempt(self, sequence: Sequence) -> None:
        """Send a holder back to its place in the queue.

        Its full pages stay as history, which leaves by way of the host: it swaps out rather than computes
        again, unless the cache policy finds computing cheaper.
        """
        assert sequence.node is not None
        self._cache.counters.preemptions += 1
        self._cache.decided("preempt", sequence.node, "no page is left")
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Take a holder's reservation; it waits again, in its place."""
        assert sequence.node is not None
        self.release(sequence, sequence.node.last_use)
        if sequence.is_known_to_executor:
            self._emit(EndSequence(sequence.id))
            sequence.is_known_to_executor = False
        self._waiting.put_back(sequence)

    # ------------------------------------------------------------ filling

    def enter_full_pages(self, sequence: Sequence, now: float) -> None:
        """Tokens were computed: pages that are full now enter the tree.

        Where an equal node is on the device already the sequence adopts its page and frees its own: the
        values agree up to rounding, and every full page then belongs to the tree.
        """
        size, cache, tree = self._config.page_tokens, self._cache, self._tree
        keys, pages, node = sequence.page_keys(size), sequence.pages, sequence.node
        assert node is not None
        for index in range(sequence.num_shared, sequence.num_computed // size):
            key, own = keys[index], pages[index]
            child = node.children.get(key)
            if child is None:
                child = tree.insert(node, key, now)
            tree.move_pin(node, child)
            if not cache.fill(child, (own,)):
                cache.device.release((own,))
                pages[index] = child.pages[0]
                sequence.page_updates.append((index, child.pages[0]))
            sequence.node = node = child
            sequence.num_shared = index + 1
