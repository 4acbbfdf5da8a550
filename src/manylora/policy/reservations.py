"""The pages that sequences hold: admission, growth, release and preemption.

A reservation is all-or-nothing, and committed or cancelled. Owns the admitted sequences and their page tables.
``residency`` provides the pages; ``batching`` and ``replica`` decide what runs.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

from manylora.config.policy import PolicyConfig
from manylora.policy.queue import WaitingQueue
from manylora.policy.residency import Residency
from manylora.policy.sequences import LOADING as SEQUENCE_LOADING
from manylora.policy.sequences import Sequence, by_arrival
from manylora.policy.tree import ABSENT, HELD, LOADING, RESIDENT, Node, path_to
from manylora.protocol import commands
from manylora.types import PageId


@dataclasses.dataclass(slots=True)  # not frozen, which takes thrice as long to make
class Reservation:
    """The needs of a waiting sequence to start.

    ``path``: nodes that it reuses, of which the deepest is pinned; ``missing``: the nodes among them that only
    the host has. ``own_pages``: for the first ``num_tokens`` that it computes. ``adapter_pages``: for its
    adapter, if that is absent.
    """

    root: Node
    path: list[Node]
    deepest: Node
    missing: list[Node]
    num_tokens: int
    own_pages: int
    adapter_pages: int

    @property
    def kv_pages(self) -> int:
        """Device pages for KV that must be free at the commit."""
        return self.own_pages + len(self.missing)


class Reservations:
    """The sequences that hold pages (running, or loading: waiting for a copy), oldest first."""

    def __init__(self, config: PolicyConfig, residency: Residency, waiting: WaitingQueue) -> None:
        self.config = config
        self.residency = residency
        self._tree = residency.tree
        self.waiting = waiting
        self._has_ranks = config.queue.is_fair or config.queue.has_priorities
        self._promised = 0  # pages on their way that others in this step already wait for
        self.admitted: list[Sequence] = []
        self.num_loading = 0  # of them
        self.num_paused = 0
        """How many admitted sequences may not run for the moment; they are preempted before others."""
        self.is_short = False
        """Whether an admitted sequence found no page for the step that was composed last."""

    def is_stuck(self) -> bool:
        """Return whether there are requests, and nothing is on its way that could let one run."""
        has_requests = len(self.waiting) > 0 or len(self.admitted) > 0
        tree = self._tree
        return has_requests and not (self.num_loading or tree.loading_pages or tree.offloading_pages)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages the tokens fill, the last perhaps partly."""
        return -(-num_tokens // self.config.page_tokens)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether a step in flight has a row of the sequence."""
        return not self.residency.device.has_ended(sequence.last_step)

    # ------------------------------------------------------------ taking

    def match(self, sequence: Sequence) -> list[Node]:
        """Return the cached KV that the sequence can reuse, in either tier.

        Its last known token is always computed, and so are prompt tokens whose log-probabilities are asked for
        and not known.
        """
        if not self.residency.policy.keeps_prefixes:
            return []
        size, state = self.config.page_tokens, sequence.state
        most = state.num_scored if state.num_unscored else len(sequence.tokens) - 1
        return self._tree.match(sequence.adapter, sequence.page_keys(size), most // size)

    def _reserve(self, sequence: Sequence, first_chunk: int) -> Reservation:
        """Make a reservation to start with up to ``first_chunk`` tokens.

        Pin the nodes that the sequence reuses, and cancel their evictions.
        """
        residency, page_tokens = self.residency, self.config.page_tokens
        root = self._tree.node(sequence.adapter)
        sequence.lengthen(self.config.long_from)
        path = self.match(sequence)
        residency.cancel_evictions(path)
        missing = [node for node in path if node.residence is ABSENT]
        if not residency.offload.is_copy_cheaper(missing):
            path = [*itertools.takewhile(lambda node: node.residence is not ABSENT, path)]
            missing = []
        num_computed = len(path) * page_tokens
        num_tokens = min(first_chunk, len(sequence.tokens) - num_computed)
        deepest = path[-1] if path else root  # all that it reuses hangs on it
        self._tree.pin(deepest)
        own_pages = self.pages_for(num_computed + num_tokens) - len(path)
        adapter_pages = root.num_pages if root.residence is ABSENT else 0
        return Reservation(root, path, deepest, missing, num_tokens, own_pages, adapter_pages)

    def admit(self, sequence: Sequence, first_chunk: int, now: float) -> bool:
        """Reserve all that the sequence needs to start, or nothing.

        Pins what it can reuse in either tier, then takes pages for what of that is not on the device (with
        its adapter) and for the first ``first_chunk`` tokens that it must compute; starts the copies.
        """
        residency, reservation = self.residency, self._reserve(sequence, first_chunk)
        path, missing = reservation.path, reservation.missing
        root, deepest = reservation.root, reservation.deepest
        if not residency.provide(now, reservation.kv_pages, reservation.adapter_pages):
            residency.unpin(deepest)
            return False
        self._count_hits(root, path, len(sequence.tokens))
        residency.load(now, [root, *missing] if reservation.adapter_pages else missing, "demand")
        # Nodes that were leaving below a node that is loading now can be recalled as well.
        residency.cancel_evictions(path)
        residency.visits.matched(deepest, now)
        residency.part(deepest)
        own_pages = residency.device.take(reservation.own_pages)
        self.waiting.admit(sequence, len(path) * self.config.page_tokens)
        sequence.hold(deepest, len(path), len(path) * self.config.page_tokens, own_pages)
        self.num_loading += 1
        bisect.insort(self.admitted, sequence, key=by_arrival)
        self.start_if_ready(sequence)
        return True

    def make_room_for_queue(self, budget: int, now: float) -> None:
        """Start evictions for as many waiting sequences as the next step could admit, as the first of them
        finds no room.

        So they wait for the same copies, not for their own one after the other. ``budget``: tokens that the
        step has left.
        """
        residency = self.residency
        if residency.marks is not None or not residency.policy.keeps_prefixes:
            return  # pages are freed ahead of demand, or nothing unused lies in the way
        incoming: set[Node] = set()
        reservations: list[Reservation] = []
        # Holders are served first in the next step: those whose pages are then full take one more.
        size = self.config.page_tokens
        num_growing = sum(len(s.tokens) + s.num_pending == len(s.pages) * size for s in self.admitted)
        kv_pages, adapter_pages = self._promised + num_growing, 0
        for sequence in self.waiting.leading(self.config.max_num_seqs - len(self.admitted)):
            # Pinned, so that no room is made of what another of them will use.
            reservation = self._reserve(sequence, budget)
            more_kv = reservation.own_pages + sum(node not in incoming for node in reservation.missing)
            more_adapters = 0 if reservation.root in incoming else reservation.adapter_pages
            if not residency.may_provide(kv_pages + more_kv, adapter_pages + more_adapters):
                residency.unpin(reservation.deepest)
                break
            reservations.append(reservation)
            kv_pages += more_kv
            adapter_pages += more_adapters
            incoming.update(reservation.missing, [reservation.root])
            budget -= reservation.num_tokens
            if budget <= 0:
                break
        residency.provide(now, kv_pages, adapter_pages)
        for reservation in reservations:
            residency.unpin(reservation.deepest)

    def _count_hits(self, root: Node, path: list[Node], num_tokens: int) -> None:
        counters, size = self.residency.counters, self.config.page_tokens
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
        """Let a loading sequence run if all that it reuses is resident; return whether it runs."""
        assert sequence.node is not None
        if self._tree.keeps_dependencies and sequence.node.residence is not RESIDENT:
            return False  # one look suffices: whatever is resident has a resident parent
        path = path_to(sequence.node)
        if not all(node.residence is RESIDENT for node in path):
            return False
        if self._tree.node(sequence.adapter).residence is not RESIDENT:
            return False
        sequence.run([node.pages[0] for node in path])
        self.num_loading -= 1
        return True

    def admit_fork(self, child: Sequence, parent: Sequence, now: float) -> tuple[PageId, PageId] | None:
        """Give a fork its parent's full pages and a copy of the partial page.

        Return the (source, destination) to copy. None: no copy is needed or, if ``child.node`` is None, there
        was no page and the child holds nothing.
        """
        assert parent.node is not None
        is_partial = child.num_prompt % self.config.page_tokens != 0
        if is_partial and not self.residency.provide(now, 1):
            return None
        own = self.residency.device.take(1) if is_partial else ()
        self._tree.pin(parent.node)
        child.hold_fork(parent, own)
        bisect.insort(self.admitted, child, key=by_arrival)
        return (parent.pages[parent.num_shared], own[0]) if own else None

    def begin_step(self) -> None:
        """Reset the accounts of one step before it is composed."""
        self._promised = 0
        self.is_short = False

    def grow(self, sequence: Sequence, num_tokens: int, now: float) -> bool:
        """Make room for the next ``num_tokens``, preempting others if needed; return whether it is there.

        Otherwise the pages are on their way, or no sequence could give way.
        """
        num_tokens += sequence.num_scheduled
        residency = self.residency
        missing = self.pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        while not residency.provide(now, missing + self._promised):
            if residency.num_available_soon(for_adapters=False) >= missing + self._promised:
                self._promised += missing
                return False
            victim = self._victim()
            if victim is sequence:
                self.is_short = True
                return False
            # Its full pages stay as cached KV. They leave by way of the host, so that they are swapped in later
            # and not computed again, unless the cache policy finds computing cheaper.
            residency.counters.preemptions += 1
            self.put_back(victim, now, "preempt", "no page is left")
        sequence.add_pages(residency.device.take(missing))
        return True

    def _victim(self) -> Sequence:
        """Return the admitted sequence to preempt: the newest of the largest priority number and the client
        served most, and only among paused sequences if there are any."""
        among = self.admitted
        if self.num_paused:
            among = [sequence for sequence in among if sequence.paused_s is not None]
        if not self._has_ranks:
            return among[-1]
        shares = self.waiting.shares
        return max(
            among, key=lambda s: (s.state.request.priority, shares.counter_of(s) if shares else 0, s.order)
        )

    # ------------------------------------------------------------ pausing

    def pause(self, sequence: Sequence, now: float) -> None:
        """Pause an admitted sequence: it keeps its pages, and gets no row until it is resumed."""
        if sequence.paused_s is None:
            sequence.paused_s = now
            self.num_paused += 1

    def resume(self, sequence: Sequence, now: float) -> None:
        """Let a paused sequence have rows again."""
        if sequence.paused_s is not None:
            self.residency.counters.paused(now - sequence.paused_s)
            sequence.paused_s = None
            self.num_paused -= 1

    def displace(self, sequence: Sequence, now: float) -> None:
        """Send an admitted sequence back to the queue, so that another takes its slot."""
        self.put_back(sequence, now, "displace", "others go first")

    def path_of(self, sequence: Sequence) -> list[Node]:
        """Return the KV nodes that a sequence uses, or could use if it waits; parents first."""
        if sequence.node is not None:
            return path_to(sequence.node)
        keys = sequence.page_keys(self.config.page_tokens)
        return self._tree.match(sequence.adapter, keys, len(keys))

    # ------------------------------------------------------------ releasing

    def release(self, sequence: Sequence, now: float, last_use: float) -> None:
        """Take all pages back from an admitted sequence. Full pages stay in the tree as cached KV, which was
        used until ``last_use``."""
        node, residency = sequence.node, self.residency
        assert node is not None
        assert sequence.matched is not None
        residency.device.release(sequence.pages[sequence.num_shared :])
        residency.visits.computed(sequence.matched, node, now)
        residency.unpin(node, last_use)
        if not residency.policy.keeps_prefixes:
            self._drop_unused(node, now)
        self.resume(sequence, now)
        sequence.release()
        self.num_loading -= sequence.stage is SEQUENCE_LOADING
        self.admitted.remove(sequence)

    def _drop_unused(self, node: Node, now: float) -> None:
        """Drop all nodes of the path that no running request uses (the paper's S-LoRA baseline)."""
        step: Node | None = node
        while step is not None and step.busy == 0:
            above = step.parent
            if step.parent is not None and not step.children:
                self.residency.discard(step)
            elif step.parent is None and self._tree.may_leave(step):
                self.residency.evict(now, step, "unused")
            step = above

    def put_back(self, sequence: Sequence, now: float, action: str = "", reason: str = "") -> None:
        """Take back an admitted sequence's pages; it waits again, in its place. ``action``: for the trace."""
        assert sequence.node is not None
        if action:
            self.residency.note(action, sequence.node, reason)
        self.release(sequence, now, sequence.node.last_use)
        if sequence.forget_executor():
            self.residency.decide(commands.EndSequence(sequence.id))
        self.waiting.put_back(sequence)

    # ------------------------------------------------------------ filling

    def enter_full_pages(self, sequence: Sequence, now: float) -> None:
        """Move pages that are full now into the tree.

        If an equal node is on the device already, the sequence adopts its page and frees its own. The values
        agree up to rounding, and every full page then belongs to the tree.
        """
        size, residency, tree = self.config.page_tokens, self.residency, self._tree
        keys, node = sequence.page_keys(size), sequence.node
        assert node is not None
        for index in range(sequence.num_shared, sequence.num_computed // size):
            key, own = keys[index], sequence.pages[index]
            child = node.children.get(key)
            if child is None:
                child = residency.insert(node, key, now, node is sequence.matched)
            tree.move_pin(node, child)
            if residency.fill(child, (own,), now):
                sequence.enter(child, None)
            else:
                residency.device.release((own,))
                sequence.enter(child, child.pages[0])
            node = child
