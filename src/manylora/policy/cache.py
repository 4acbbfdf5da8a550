"""What lies where: the tree, the pages of both tiers, and the copies between them, moved together.

Every page has one owner: a tier's ledger, a node, a sequence, or a copy in flight whose node has gone another
way. Owns how nodes leave and come; does not know requests, nor when the swapper thinks that they should.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from manylora.config import PolicyConfig
from manylora.policy.candidates import Candidates
from manylora.policy.cost import Rates
from manylora.policy.counters import Counters
from manylora.policy.moves import Move
from manylora.policy.pages import PageLedger
from manylora.policy.policies import POLICIES, adapter_pages_limit
from manylora.policy.saving import Saving
from manylora.policy.standby import Standby
from manylora.policy.tree import (
    ABSENT,
    FILLING,
    HELD,
    LOADING,
    NO_COPY,
    RESIDENT,
    SAVING,
    STANDBY,
    DependencyTree,
    Node,
    subtree,
)
from manylora.policy.visits import Visits
from manylora.protocol import AdapterRead, Command, CopyDone, Decided, EvictAdapter, ReadAdapter, SwapPages
from manylora.types import AdapterId, CopyId, PageId

MOST_PAGES_A_COPY = 64
"""A longer queue is cut, so that what arrived first can be used while the rest is on its way."""


class Cache:
    """Nodes in two tiers. ``emit`` takes commands; ``flush`` must follow whatever started copies."""

    def __init__(self, config: PolicyConfig, emit: Callable[[Command], None]) -> None:
        self.policy = POLICIES[config.cache.policy]
        self.tree = DependencyTree(self.policy.keeps_dependencies)
        self.device = PageLedger(config.num_pages)
        self.host = PageLedger(config.num_host_pages)
        self.rates = Rates(config.page_bytes, config.page_tokens)
        self.saving = Saving(self.rates, self.policy.weighs_recomputing)
        self.counters = Counters()
        self.now = 0.0
        self.interval = 0
        self.adapter_limit = adapter_pages_limit(config)
        self._emit = emit
        self._traces = config.cache.trace
        self.visits = Visits(
            config.cache.window_s,
            config.cache.window_s,
            self._offer,
            counts_window=self.policy.counts_visits,
            only_leaves_matter=self.policy.keeps_dependencies,
        )
        known = config.cache, self.visits, self.rates, self.counters
        self._device_value = device_value = self.policy.device_value(*known)
        self._host_value = self.policy.host_value(*known)
        self._leaving = Candidates(0, device_value, self.tree.may_leave)
        self._leaving_adapters = self._leaving
        if self.policy.has_parts:  # which need lists of their own
            self._leaving_adapters = Candidates(0, device_value, self.tree.may_leave)
        self.entering = Candidates(1, device_value, self.tree.may_enter, takes_best=True)
        self._leaving_host = Candidates(2, self._host_value, self.tree.may_leave_host)
        self.tree.changed = self._offer
        self.standby = Standby(self.tree, self.device, self._note_left, self.policy.keeps_standby)
        self.reads: dict[AdapterId, tuple[Node, bool]] = {}  # with whether it goes to the device
        self._queued: list[Move] = []
        self._copies: dict[CopyId, list[Move]] = {}
        self._num_copies = 0
        self.moves_of: collections.Counter[AdapterId] = collections.Counter()
        self.pages_coming = 0  # of copies to the device in flight

    def _offer(self, node: Node) -> None:
        """Something about the node changed: it may have become a candidate, or one of another value."""
        tree = self.tree
        if node.residence is RESIDENT and node.busy == 0 and tree.may_leave(node):
            (self._leaving_adapters if node.parent is None else self._leaving).offer(node)
        if node.host is HELD:
            if self.policy.swaps_by_itself and tree.may_enter(node):
                self.entering.offer(node)
            if tree.may_leave_host(node):
                self._leaving_host.offer(node)

    def decided(self, action: str, node: Node, reason: str, value: float | None = None) -> None:
        """Say what was decided, where somebody wants to know."""
        if self._traces:
            self._emit(Decided(action, node.adapter, node.depth, node.num_pages, reason, value))

    # ------------------------------------------------------------ room on the device

    @property
    def pages_used(self) -> int:
        """Device pages that are neither free nor about to be."""
        return self.device.num_used - self.tree.saving_pages

    def _free_for_adapters(self) -> int:
        return min(self.device.num_free, self.adapter_limit - self.tree.adapter_pages)

    def _free_for_kv(self) -> int:
        if not self.policy.has_parts:
            return self.device.num_free
        used = self.device.num_pages - self.device.num_free - self.tree.adapter_pages
        return min(self.device.num_free, self.device.num_pages - self.adapter_limit - used)

    def provide(self, kv_pages: int, adapter_pages: int = 0) -> bool:
        """Whether so many pages are free now. Where not, starts what will free them, as far as can be."""
        if not self.policy.has_parts:
            count = kv_pages + adapter_pages
            return self.device.num_free >= count or self._provide(count, self._free_for_kv, self._leaving)
        for_adapters = self._free_for_adapters, self._leaving_adapters
        has_adapter = not adapter_pages or self._provide(adapter_pages, *for_adapters)
        return self._provide(kv_pages, self._free_for_kv, self._leaving) and has_adapter

    def _provide(self, count: int, free: Callable[[], int], leaving: Candidates) -> bool:
        if free() + self.tree.evictable_pages + self.pages_pending >= count:
            self._make_room(lambda: free() + self.pages_pending >= count, leaving, "demand")
        return free() >= count

    def may_provide(self, kv_pages: int, adapter_pages: int) -> bool:
        """Whether so many pages can become free while nobody lets go of any."""
        tree, for_kv = self.tree, self._free_for_kv() + self.pages_pending
        if not self.policy.has_parts:
            return for_kv + tree.evictable_pages >= kv_pages + adapter_pages
        for_adapters = self._free_for_adapters() + self.pages_pending + tree.evictable_adapter_pages
        return for_adapters >= adapter_pages and for_kv + tree.idle_history_pages >= kv_pages

    def will_provide(self, kv_pages: int) -> bool:
        """Whether so many pages will be free when those that are on their way have come."""
        return self._free_for_kv() + self.pages_pending >= kv_pages

    @property
    def pages_pending(self) -> int:
        """Device pages that become free by themselves: saves in flight, and the step's end."""
        return self.tree.saving_pages + self.device.num_deferred

    def _make_room(self, is_enough: Callable[[], bool], leaving: Candidates, reason: str) -> None:
        if is_enough():
            return
        self.visits.expire(self.now)
        self._device_value.refresh(self.now, self.tree.resident_adapters)
        leaving.begin(self.now)
        while not is_enough():
            chosen = leaving.pop()
            if chosen is None:
                break
            self.evict(*chosen, reason)
        leaving.end()

    def shrink(self, num_pages: int, reason: str) -> None:
        """Send nodes away until at most so many pages are used."""
        self._make_room(lambda: self.pages_used <= num_pages, self._leaving, reason)

    # ------------------------------------------------------------ leaving

    def evict(self, node: Node, value: float | None, reason: str) -> None:
        """Send a candidate away: at once where the host has a copy, else by way of one, else for good.

        For good, too, where KV is not worth the copy.
        """
        if reason == "busy":
            node.evicted_in = self.interval
        if node.host is HELD:
            self._leave_device(node)
            self.decided("evict", node, reason, value)
        elif node.host is FILLING and not node.is_adapter:
            # A save was begun, the node was kept meanwhile, and now is not after all.
            self.tree.set_device(node, SAVING, node.pages)
            self.decided("save", node, reason, value)
        elif node.parent is not None and self._is_worth_saving(node) and self._host_provide(1):
            self._save(node)
            self.decided("save", node, reason, value)
        else:
            self.decided("drop", node, reason, value)
            self._lose(node)

    def _is_worth_saving(self, node: Node) -> bool:
        return self.saving.pays(node.depth.bit_length(), self.now)

    def _leave_device(self, node: Node) -> None:
        """Free the device pages of a node whose contents are safe, or not wanted."""
        if self.standby.admits(node):
            self.standby.add(node)
            return
        self.standby.end_below(node)
        pages = node.pages
        self.tree.set_device(node, ABSENT, ())
        # An aborted request's rows may still be in the step in flight.
        self.device.release(pages)
        self._note_left(node)

    def _note_left(self, node: Node) -> None:
        """A node whose contents were on the device is there no more, nor stands by."""
        if node.parent is None:
            self.counters.adapter_evictions += 1
            self._emit(EvictAdapter(node.adapter))
        else:
            self.counters.history_evictions += 1

    def _save(self, node: Node) -> None:
        self.tree.set_device(node, SAVING, node.pages)
        self.tree.set_host(node, FILLING, self.host.take(1))
        self.saving.saved()
        self._queue(node, to_device=False)

    def _lose(self, node: Node) -> None:
        """Drop a node that nothing can bring back from the host, with what cannot be used without it."""
        if not node.children or self.policy.loses_history_with(node.is_adapter):
            self.discard(node)
            return
        if node.residence is not ABSENT:
            self._leave_device(node)
        self.counters.history_drops += not node.is_adapter

    def discard(self, root: Node) -> None:
        """Take a node and all below it out of both tiers. Nobody pins them; an adapter stays known."""
        for node in reversed(subtree(root)) if root.children else (root,):
            self._let_go(node)
            if node.parent is not None and not node.is_dropped:
                self.counters.history_drops += 1
                self.tree.remove(node)

    def _let_go(self, node: Node) -> None:
        """Give up the node's pages in both tiers; what a copy still touches is the copy's until it ends."""
        move, pages, host_pages = node.move, node.pages, node.host_pages
        if move is not None:
            node.move = None
            move.owns_pages = bool(pages)
            move.owns_host_pages = bool(host_pages)
        was_there = node.residence is RESIDENT or node.residence is STANDBY
        if node.residence is STANDBY:
            self.standby.call_back(node)
        if pages:
            self.tree.set_device(node, ABSENT, ())
            if move is None:
                self.device.release(pages)
        if host_pages:
            self.tree.set_host(node, NO_COPY, ())
            if move is None:
                self.host.release(host_pages)
        if was_there and pages:
            self._note_left(node)

    # ------------------------------------------------------------ the host

    def _host_provide(self, count: int) -> bool:
        """Free host pages, dropping what the host can best do without."""
        if self.host.num_free >= count:
            return True
        if count > self.host.num_pages:
            return False
        self._host_value.refresh(self.now, self.tree.resident_adapters)
        self._leaving_host.begin(self.now)
        while self.host.num_free < count:
            chosen = self._leaving_host.pop()
            if chosen is None:
                break
            self._leave_host(*chosen)
        self._leaving_host.end()
        return self.host.num_free >= count

    def _leave_host(self, node: Node, value: float | None = None) -> None:
        self.counters.host_evictions += 1
        self.decided("drop-host", node, "host is full", value)
        if node.residence is STANDBY:
            self.standby.end(node)
        pages = node.host_pages
        self.tree.set_host(node, NO_COPY, ())
        self.host.release(pages)
        if node.residence is ABSENT and not node.is_adapter:
            self.counters.history_drops += 1
            self.tree.remove(node)

    # ------------------------------------------------------------ coming

    def rescue(self, path: Iterable[Node], with_standby: bool = True) -> None:
        """Keep nodes of a path, parents first, that were about to leave or have just left, and whose parents have
        not. What stands by below a parent that is not there has to be copied like any other."""
        for node in path:
            if node.residence is STANDBY and with_standby:
                if not self._parent_is_there(node):
                    self.standby.end(node)
                    continue
                self.standby.call_back(node)
            elif node.residence is not SAVING:
                continue
            if self._parent_is_there(node):
                self.tree.set_device(node, RESIDENT, node.pages)
                self._land_children(node)
            elif node.parent is not None and node.parent.residence is LOADING:
                self.tree.set_device(node, LOADING, node.pages)
                node.has_landed = True

    def begin_entering(self, now: float) -> None:
        """Start a decision about what to bring in."""
        self._device_value.refresh(now, self.tree.resident_adapters)
        self.entering.begin(now)

    def load(self, nodes: Iterable[Node], reason: str, value: float | None = None) -> None:
        """Bring absent nodes, parents first, into pages that ``provide`` has freed."""
        for node in nodes:
            if reason == "demand" and not node.is_adapter:
                self.saving.came_back(1)
            self.tree.set_device(node, LOADING, self.device.take(node.num_pages))
            if node.host is HELD:
                self._queue(node, to_device=True)
                self.decided("load", node, reason, value)
            elif node.host is NO_COPY:
                assert node.is_adapter, "KV without a host copy cannot be brought back"
                self.read(node, reason)

    def read(self, node: Node, reason: str) -> None:
        """Read an adapter from its source: to the host where it finds room, else to the device at once."""
        self.decided("read", node, reason)
        self.counters.adapter_reads += 1
        goes_to_host = self._host_provide(node.num_pages)
        self.reads[node.adapter] = (node, not goes_to_host)
        if goes_to_host:
            self.tree.set_host(node, FILLING, self.host.take(node.num_pages))
            self._emit(ReadAdapter(node.adapter, node.host_pages, "host"))
        else:
            assert node.residence is LOADING, "a read to the device needs pages there"
            self._emit(ReadAdapter(node.adapter, node.pages, "device"))

    def read_ended(self, event: AdapterRead) -> Node | None:
        """A read has ended; returns the adapter's node where that leaves a loading one without contents."""
        node, to_device = self.reads.pop(event.adapter)
        if event.ok:
            self.rates.saw_read(node.num_pages, event.read_s)
            if to_device:
                self._land(node)
            else:
                self.tree.set_host(node, HELD, node.host_pages)
                if node.residence is LOADING:
                    self._queue(node, to_device=True)
            return None
        if not to_device:
            pages = node.host_pages
            self.tree.set_host(node, NO_COPY, ())
            self.host.release(pages)
        return node if node.residence is LOADING else None

    def fill(self, node: Node, pages: tuple[PageId, ...]) -> bool:
        """A running sequence has computed this page: it becomes the node's, unless the node has its own.

        Whether the sequence's page was taken; if not, it is to use the node's.
        """
        if node.residence is STANDBY:
            self.standby.call_back(node)
        if node.residence is SAVING or node.residence is STANDBY or node.has_landed:
            self.tree.set_device(node, RESIDENT, node.pages)
            self._land_children(node)
            return False
        if node.residence is RESIDENT:
            return False
        if node.residence is LOADING:
            assert node.move is not None
            node.move.owns_pages = True  # what was coming comes for nobody
            node.move = None
        self.tree.set_device(node, RESIDENT, pages)
        self._land_children(node)
        return True

    # ------------------------------------------------------------ copies

    def _queue(self, node: Node, to_device: bool) -> None:
        node.move = Move(node, to_device, node.pages, node.host_pages)
        self._queued.append(node.move)
        self.moves_of[node.adapter] += 1
        if to_device:
            self.pages_coming += len(node.pages)

    def flush(self) -> None:
        """Start the copies that were queued: adapters one by one, KV in batches, what leaves first."""
        if not self._queued:
            return
        queued, self._queued = self._queued, []
        for to_device in (False, True):
            batch: list[Move] = []
            for move in queued:
                if move.to_device is not to_device:
                    continue
                if move.node.is_adapter:
                    self._start([move], move.node.adapter)
                else:
                    batch.append(move)
            for first in range(0, len(batch), MOST_PAGES_A_COPY):
                self._start(batch[first : first + MOST_PAGES_A_COPY], None)

    def _start(self, moves: list[Move], adapter: AdapterId | None) -> None:
        self._num_copies += 1
        self._copies[self._num_copies] = moves
        to_device = moves[0].to_device
        pairs = tuple(
            (host, page) if to_device else (page, host)
            for move in moves
            for page, host in zip(move.pages, move.host_pages, strict=True)
        )
        self._emit(SwapPages(self._num_copies, to_device, pairs, adapter))

    def copy_ended(self, event: CopyDone) -> list[Node]:
        """A copy has landed or failed; returns the nodes whose contents did not come."""
        moves = self._copies.pop(event.copy, [])
        if moves:
            self._count_copy(moves, event)
        failed = []
        for move in moves:
            node = move.node
            self.moves_of[node.adapter] -= 1
            is_current = node.move is move
            if is_current:
                node.move = None
            if move.to_device:
                self.pages_coming -= len(move.pages)
                if is_current and event.ok:
                    self._land(node)
                elif is_current:
                    failed.append(node)
                elif event.ok and node.is_adapter:
                    self._emit(EvictAdapter(node.adapter))  # the executor believes it resident
            elif is_current:
                self._saved(node, event.ok)
            if move.owns_pages:
                self.device.release(move.pages)
            if move.owns_host_pages:
                self.host.release(move.host_pages)
        return failed

    def _count_copy(self, moves: list[Move], event: CopyDone) -> None:
        num_pages, to_device = sum(len(move.pages) for move in moves), moves[0].to_device
        self.counters.swaps_failed += not event.ok
        if event.ok:
            self.rates.saw_copy(num_pages, event.copy_s, to_device)
            self.counters.copied(num_pages, event.copy_s, to_device)

    def _saved(self, node: Node, ok: bool) -> None:
        """A copy to the host has ended: a node that still wants to leave now does."""
        if ok:
            self.tree.set_host(node, HELD, node.host_pages)
            if node.residence is SAVING:
                self._leave_device(node)
            return
        pages = node.host_pages
        self.tree.set_host(node, NO_COPY, ())
        self.host.release(pages)
        if node.residence is SAVING:
            self._lose(node)

    def _land(self, node: Node) -> None:
        """A loading node's contents are there: it is resident once its parent is."""
        if not self._parent_is_there(node):
            node.has_landed = True
            return
        self.tree.set_device(node, RESIDENT, node.pages)
        self._land_children(node)

    def _land_children(self, node: Node) -> None:
        """The node is resident: so are children that had landed before it, and others may enter."""
        for child in node.children.values():
            if child.has_landed:
                self._land(child)
            elif child.residence is ABSENT:
                self._offer(child)

    def _parent_is_there(self, node: Node) -> bool:
        if node.parent is None or not self.tree.keeps_dependencies:
            return True
        return node.parent.residence is RESIDENT

    def abandon_load(self, node: Node) -> None:
        """What a loading node waited for will not come: it, and whatever below it is loading, is absent."""
        for member in reversed(subtree(node)):
            if member.residence is not LOADING:
                continue
            pages, move = member.pages, member.move
            if move is not None:
                move.owns_pages, pages = True, ()
                if move.to_device:
                    member.move = None
            self.tree.set_device(member, ABSENT, ())
            self.device.release(pages)

    def candidates(self) -> tuple[set[Node], set[Node]]:
        """Who is on the lists of what may leave the device, and the host; for invariant checks."""
        return {*self._leaving.members(), *self._leaving_adapters.members()}, {*self._leaving_host.members()}

    def moves(self) -> Iterable[Move]:
        """Every copy's part that is queued or in flight, for invariant checks."""
        yield from self._queued
        for moves in self._copies.values():
            yield from moves
