"""The place of every node: how nodes leave the device and the host, and how they come back.

Moves the tree, the page ledgers, the transfers and the candidates together, so that every page has one owner: a
tier's ledger, a node, a sequence, or a copy in flight that its node has disowned. Does not know requests, nor
when the swapper wants to move a node. Its caller collects the commands by ``collect``, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from manylora.config.policy import PolicyConfig
from manylora.policy import tree as trees
from manylora.policy.cache_policies import CachePolicy, Signals, find_cache
from manylora.policy.candidates import Candidates
from manylora.policy.pages import PageLedger
from manylora.policy.transfers import Transfers
from manylora.policy.tree import ABSENT, FILLING, HELD, LOADING, NO_COPY, OFFLOADING, RESIDENT, Node
from manylora.policy.value import KvTurns, Rates, Visits
from manylora.protocol import commands, events
from manylora.reports import Counters
from manylora.types import AdapterId, PageId


class Residency:
    """The nodes in two tiers. ``start_transfers`` must follow any call that queues copies."""

    def __init__(self, config: PolicyConfig, policy: CachePolicy | None = None) -> None:
        """``policy``: to use instead of the policy that the config names."""
        self.policy = policy or find_cache(config.cache.policy)
        self.tree = trees.DependencyTree(self.policy.keeps_dependencies)
        self.device = PageLedger(config.num_pages)
        self.host = PageLedger(config.num_host_pages)
        self.host_reads: dict[Node, int] = {}
        """By node, the last step in flight that reads its host pages."""
        self.transfers = Transfers(config.cold_start.num_groups)
        self.changes = trees.Changes(config.page_tokens)
        self.last_value: float | None = None
        """The value of the node that left the device last for want of room, if the policy ``prices_pages``."""
        self.rates = Rates(config.page_bytes, config.page_tokens)
        self.offload = self.policy.offload(self.rates)
        self.marks = self.policy.marks(config.cache, config.num_pages)
        self.counters = Counters()
        self.visits = Visits(
            config.cache.window_s,
            counts_window=self.policy.counts_visits,
            only_leaves_matter=self.policy.keeps_dependencies,
        )
        part = self.policy.adapter_pages(config)
        self.has_parts = part is not None
        """Whether the device has one part for adapters and another for KV."""
        self.adapter_limit = config.num_pages if part is None else part
        self.turns = KvTurns(self.policy.keeps_turns)
        signals = Signals(config.cache, self.visits, self.rates, self.counters, self.turns)
        on_device, on_host = self.policy.device_value(signals), self.policy.host_value(signals)
        can_enter = self.marks is not None
        self.candidates = Candidates(self.tree, on_device, on_host, self.has_parts, can_enter)
        self._traces = config.cache.trace
        self._decided: list[commands.Command] = []

    def collect(self) -> list[commands.Command]:
        """Return the commands decided since the last call, in order."""
        decided, self._decided = self._decided, []
        return decided

    def decide(self, command: commands.Command) -> None:
        """Add a command of a part above, in its place among the others."""
        self._decided.append(command)

    def note(self, action: str, node: Node, reason: str, value: float | None = None) -> None:
        """Add a decision to the trace, if there is one."""
        if self._traces:
            self._decided.append(commands.Decided(action, node.adapter, node.depth, node.num_pages, reason, value))

    # ------------------------------------------------------------ states

    def _set_device(self, node: Node, residence: trees.Residence, pages: tuple[PageId, ...]) -> None:
        leaf = self.tree.set_device(node, residence, pages)
        if node.parent is None:
            self.changes.moved(node.adapter)
        if leaf is not None:
            self.candidates.offer(leaf)
        # Without a host copy the node can only be a candidate to leave.
        if node.host is HELD or (residence is RESIDENT and node.busy == 0):
            self.candidates.offer(node)

    def _set_host(self, node: Node, state: trees.HostState, pages: tuple[PageId, ...]) -> None:
        self.tree.set_host(node, state, pages)
        if node.parent is None:
            self.changes.moved(node.adapter)
        self.candidates.offer(node)

    def unpin(self, node: Node, last_use: float | None = None) -> None:
        """Unpin a node; its path was used until ``last_use``, or not since it was pinned."""
        self._offer_all(self.tree.unpin(node, node.last_use if last_use is None else last_use))

    def forget_visits(self, now: float) -> None:
        """Drop the visits that have left the window."""
        self._offer_all(self.visits.expire(now))

    def source_of(self, adapter: AdapterId) -> str | None:
        """Return where an adapter would come from: "host" or "files"; None if it is on the device."""
        root = self.tree.node(adapter)
        return None if root.residence is RESIDENT else "host" if root.host is HELD else "files"

    def insert(self, parent: Node, key: trees.PageKey, now: float, begins_turn: bool) -> Node:
        """Insert a KV node under ``parent``, in neither tier; the caller fills it at once."""
        node = self.tree.insert(parent, key, now)
        self._offer_all(self.turns.add(node, begins_turn))
        return node

    def part(self, node: Node) -> None:
        """End a turn at this node: a sequence goes on below it with pages of its own."""
        self._offer_all(self.turns.part(node))

    def _offer_all(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.candidates.offer(node)

    # ------------------------------------------------------------ room on the device

    @property
    def pages_used(self) -> int:
        """Device pages that are neither free nor becoming free."""
        return self.device.num_used - self.tree.offloading_pages

    def num_free(self, for_adapters: bool) -> int:
        """Return how many pages an adapter, or KV, could take at once."""
        device = self.device
        free = device.num_free
        if not self.has_parts:
            return free
        if for_adapters:
            return min(free, self.adapter_limit - self.tree.adapter_pages)
        used = device.num_pages - free - self.tree.adapter_pages
        return min(free, device.num_pages - self.adapter_limit - used)

    def num_available_soon(self, for_adapters: bool) -> int:
        """Return how many pages are free, or become free by themselves: by offloads in flight, or the step's
        end."""
        device, leaving = self.device, self.tree.offloading_pages
        if self.has_parts:
            return self.num_free(for_adapters) + leaving + device.num_deferred
        return device.num_pages - device.num_used + leaving

    def may_provide(self, kv_pages: int, adapter_pages: int) -> bool:
        """Return whether the pages can become free while all sequences keep theirs."""
        tree, for_kv = self.tree, self.num_available_soon(for_adapters=False)
        if not self.has_parts:
            return for_kv + tree.evictable_pages >= kv_pages + adapter_pages
        for_adapters = self.num_available_soon(for_adapters=True) + tree.evictable_adapter_pages
        return for_adapters >= adapter_pages and for_kv + tree.idle_kv_pages >= kv_pages

    def provide(self, now: float, kv_pages: int, adapter_pages: int = 0) -> bool:
        """Return whether the pages are free; if not, start the evictions that will free them, as far as
        possible."""
        if not self.has_parts:
            count = kv_pages + adapter_pages
            return self.device.num_free >= count or self._provide(now, count, for_adapters=False)
        has_adapter = not adapter_pages or self._provide(now, adapter_pages, for_adapters=True)
        return self._provide(now, kv_pages, for_adapters=False) and has_adapter

    def _provide(self, now: float, count: int, for_adapters: bool) -> bool:
        if self.num_available_soon(for_adapters) + self.tree.evictable_pages >= count:
            self._make_room(now, count, for_adapters, "demand")
        return self.num_free(for_adapters) >= count

    def shrink(self, now: float, num_pages: int, reason: str) -> list[Node]:
        """Evict nodes until at most ``num_pages`` pages are used; return these nodes."""
        return self._make_room(now, self.device.num_pages - num_pages, False, reason)

    def _make_room(self, now: float, count: int, for_adapters: bool, reason: str) -> list[Node]:
        """Evict nodes until ``count`` pages are free or becoming free, as far as there are candidates."""
        sent: list[Node] = []
        if self.num_available_soon(for_adapters) >= count:
            return sent
        self.forget_visits(now)
        leaving = self.candidates.leaving_adapters if for_adapters else self.candidates.leaving
        self.candidates.begin(leaving, now)
        while self.num_available_soon(for_adapters) < count:
            chosen = leaving.pop()
            if chosen is None:
                break
            for node in self._with_turn(chosen[0]):
                self.evict(now, node, reason, chosen[1])
                sent.append(node)
            if self.policy.prices_pages:
                self.last_value = chosen[1]
        leaving.end()
        return sent

    def _with_turn(self, node: Node) -> Iterator[Node]:
        """Yield a node that leaves the device, then the nodes of its turn that can leave with it, deepest
        first."""
        yield node
        for other in [*reversed(self.turns.of(node))]:
            if other is not node and self.tree.may_leave(other):
                yield other

    # ------------------------------------------------------------ leaving the device

    def evict(self, now: float, node: Node, reason: str, value: float | None = None) -> None:
        """Evict a candidate: at once if the host has a copy, else after a copy to the host.

        Drop it if the host has no room, or if KV is not worth the copy.
        """
        if node.host is HELD:
            self._leave_device(node)
            self.note("evict", node, reason, value)
        elif node.host is FILLING and not node.is_adapter:
            # A save had begun, the node was recalled, and now it leaves after all.
            self._set_device(node, OFFLOADING, node.pages)
            self.note("save", node, reason, value)
        elif node.parent is not None and self.offload.pays(node, now) and self._provide_host(now, 1):
            self._set_device(node, OFFLOADING, node.pages)
            self._write(node)
            self.note("save", node, reason, value)
        else:
            self.note("drop", node, reason, value)
            self._lose(node)

    def _leave_device(self, node: Node) -> None:
        """Free the device pages of a node whose contents are on the host, or not wanted."""
        pages = node.pages
        self._set_device(node, ABSENT, ())
        # An aborted request's rows may still be in the step in flight.
        self.device.release(pages)
        self._has_left(node)

    def _has_left(self, node: Node) -> None:
        """Count and command the eviction of a node whose contents have left the device."""
        if node.parent is None:
            self.counters.adapter_evictions += 1
            self._decided.append(commands.EvictAdapter(node.adapter))
        else:
            self.counters.history_evictions += 1

    def _write(self, node: Node) -> None:
        """Start a KV node's copy to the host, which has room."""
        self._set_host(node, FILLING, self.host.take(1))
        self.offload.offloaded()
        self.transfers.queue(node, to_device=False)

    def _lose(self, node: Node) -> None:
        """Drop a node without a host copy, with the nodes that cannot be used without it."""
        if not node.children or self.policy.loses_kv_with(node.is_adapter):
            self.discard(node)
            return
        if node.residence is not ABSENT:
            self._leave_device(node)
        if not node.is_adapter:
            self.counters.history_drops += 1
            self.changes.lost(node)

    def discard(self, root: Node) -> None:
        """Take a node and all nodes below it out of both tiers. None of them is pinned; an adapter stays
        known."""
        for node in reversed(trees.subtree(root)) if root.children else (root,):
            self._release(node)
            if node.parent is not None and not node.is_dropped:
                self.counters.history_drops += 1
                self._remove(node)

    def _remove(self, node: Node) -> None:
        """Take a KV node that is in neither tier out of the tree."""
        self.changes.lost(node)
        above = self.tree.remove(node)
        step: Node | None = node
        while self.turns.kept and step is not None and step is not above:
            self.turns.forget(step)
            step = step.parent
        if above.host is HELD or self.turns.kept:
            # It may be a leaf of both tiers now. A leaf of the device was offered before, but its turn has shrunk.
            self.candidates.offer(above)

    def _release(self, node: Node) -> None:
        """Free the node's pages in both tiers; a copy in flight owns the pages that it still touches."""
        pages, host_pages = node.pages, node.host_pages
        move = self.transfers.current.pop(node, None)
        if move is not None:
            # It may own device pages already: of a save whose node was abandoned while it loaded.
            move.owns_pages |= bool(pages)
            move.owns_host_pages |= bool(host_pages)
        was_there = node.residence is RESIDENT
        if pages:
            self._set_device(node, ABSENT, ())
            if move is None:
                self.device.release(pages)
        if move is None:
            self._drop_copy(node)
        elif host_pages:
            self._set_host(node, NO_COPY, ())
        if was_there and pages:
            self._has_left(node)

    # ------------------------------------------------------------ the host

    def _drop_copy(self, node: Node) -> None:
        """Free the host pages of a node, if it has any, once no step reads them any more."""
        if node.host_pages:
            pages = node.host_pages
            self._set_host(node, NO_COPY, ())
            self.host.release(pages, self.host_reads.get(node))

    def host_read_ended(self, step: int) -> None:
        """Note the end of a step that read host pages; steps end in their order."""
        self.host_reads = {node: last for node, last in self.host_reads.items() if last > step}
        self.host.step_ended(step)

    def _provide_host(self, now: float, count: int) -> bool:
        """Free host pages by dropping the copies of least value; return whether there are enough."""
        if self.host.num_free >= count:
            return True
        if count > self.host.num_pages:
            return False
        leaving = self.candidates.leaving_host
        self.candidates.begin(leaving, now)
        while self.host.num_free < count:
            chosen = leaving.pop()
            if chosen is None:
                break
            turn = [*reversed(self.turns.of(chosen[0]))]
            self.leave_host(*chosen)
            for node in turn:
                if node is not chosen[0] and self.tree.may_leave_host(node):
                    self.leave_host(node, chosen[1])
        leaving.end()
        return self.host.num_free >= count

    def leave_host(self, node: Node, value: float | None = None) -> None:
        """Drop the host's copy of a node."""
        self.counters.host_evictions += 1
        self.note("drop-host", node, "host is full", value)
        self._drop_copy(node)
        if node.residence is ABSENT and not node.is_adapter:
            self.counters.history_drops += 1
            self._remove(node)

    # ------------------------------------------------------------ entering the device

    def cancel_evictions(self, path: Iterable[Node]) -> None:
        """Cancel the evictions of nodes on ``path`` (parents first) whose parents are on the device, or
        loading."""
        for node in path:
            if node.residence is not OFFLOADING:
                continue
            if self._is_parent_there(node):
                self._set_device(node, RESIDENT, node.pages)
                self._land_children(node)
            elif node.parent is not None and node.parent.residence is LOADING:
                self._set_device(node, LOADING, node.pages)
                self.tree.mark_landed(node)

    def load(self, now: float, nodes: Iterable[Node], reason: str, value: float | None = None) -> None:
        """Load absent nodes, parents first, into pages that ``provide`` has freed."""
        for node in nodes:
            if reason == "demand" and not node.is_adapter:
                self.offload.came_back(1)
            self._set_device(node, LOADING, self.device.take(node.num_pages))
            if node.host is HELD:
                self.transfers.queue(node, to_device=True)
                self.note("load", node, reason, value)
            elif node.host is NO_COPY:
                assert node.is_adapter, "KV without a host copy cannot be brought back"
                self.read(now, node, reason)

    def read(self, now: float, node: Node, reason: str) -> None:
        """Read an adapter from its source: to the host if that has room, else directly to the device."""
        self.note("read", node, reason)
        self.counters.adapter_reads += 1
        goes_to_host = self._provide_host(now, node.num_pages)
        if goes_to_host:
            self._set_host(node, FILLING, self.host.take(node.num_pages))
        else:
            assert node.residence is LOADING, "a read to the device needs pages there"
        self._decided.append(self.transfers.read(node, to_device=not goes_to_host))

    def entering_with(self, node: Node) -> list[Node]:
        """Return a node that may enter the device with the nodes of its turn that enter too, parents first."""
        turn = self.turns.of(node)
        if not self.tree.keeps_dependencies:
            return [each for each in turn if _can_come(each)]
        return [*itertools.takewhile(_can_come, turn[node.depth - turn[0].depth :])]

    def start_transfers(self) -> list[commands.SwapPages]:
        """Start the queued copies, and return them."""
        started = self.transfers.flush()
        self._decided += started
        return started

    def fill(self, node: Node, pages: tuple[PageId, ...], now: float) -> bool:
        """Give the node a page that a running sequence has computed, unless the node has one.

        Return whether the page was taken; if not, the sequence must use the node's page.
        """
        if node.residence is OFFLOADING or node.has_landed:
            self._set_device(node, RESIDENT, node.pages)
            self._land_children(node)
            return False
        if node.residence is RESIDENT:
            return False
        if node.residence is LOADING:
            # The copy in flight is not needed any more.
            self.transfers.current.pop(node).owns_pages = True
        self._set_device(node, RESIDENT, pages)
        self._land_children(node)
        if self.policy.writes_through and node.host is NO_COPY and self._provide_host(now, 1):
            self.note("save", node, "written through")
            self._write(node)
        return True

    # ------------------------------------------------------------ ends of transfers

    def read_ended(self, event: events.AdapterRead) -> Node | None:
        """Take a read's end; return the adapter's node if the read failed and the node is loading."""
        node, to_device = self.transfers.reads.pop(event.adapter)
        if event.ok:
            self.rates.saw_read(node.num_pages, event.read_s)
            if to_device:
                self._land(node)
            else:
                self._set_host(node, HELD, node.host_pages)
                if node.residence is LOADING:
                    self.transfers.queue(node, to_device=True)
            return None
        if not to_device:
            self._drop_copy(node)
        return node if node.residence is LOADING else None

    def copy_ended(self, event: events.CopyDone) -> list[Node]:
        """Take a copy's end; return the nodes whose contents did not arrive."""
        moves = self.transfers.copies.pop(event.copy, [])
        self.counters.swaps_failed += bool(moves) and not event.ok
        if moves and event.ok:
            copied = sum(len(move.pages) for move in moves), event.copy_s, moves[0].to_device
            self.rates.saw_copy(*copied)
            self.counters.copied(*copied)
        failed = []
        for move in moves:
            node = move.node
            is_current = self.transfers.end(move)
            if move.to_device:
                if is_current and event.ok:
                    self._land(node)
                elif is_current:
                    failed.append(node)
                elif event.ok and node.is_adapter:
                    self._decided.append(commands.EvictAdapter(node.adapter))  # the executor believes it resident
            elif is_current:
                self._saved(node, event.ok)
            if move.owns_pages:
                self.device.release(move.pages)
            if move.owns_host_pages:
                self.host.release(move.host_pages, self.host_reads.get(node))
        return failed

    def _saved(self, node: Node, ok: bool) -> None:
        """Take the end of a copy to the host; a node that is offloading leaves the device."""
        if ok:
            self._set_host(node, HELD, node.host_pages)
            if node.residence is OFFLOADING:
                self._leave_device(node)
            return
        self._drop_copy(node)
        if node.residence is OFFLOADING:
            self._lose(node)

    def _land(self, node: Node) -> None:
        """Make a loading node whose contents have landed resident, once its parent is."""
        if not self._is_parent_there(node):
            self.tree.mark_landed(node)
            return
        self._set_device(node, RESIDENT, node.pages)
        self._land_children(node)

    def _land_children(self, root: Node) -> None:
        """Make landed nodes below a node that became resident resident too; absent ones may enter.

        Goes down without recursion: a chain may have thousands of pages.
        """
        stack = [iter(root.children.values())]
        while stack:
            child = next(stack[-1], None)
            if child is None:
                stack.pop()
            elif child.has_landed:
                self._set_device(child, RESIDENT, child.pages)
                stack.append(iter(child.children.values()))
            elif child.residence is ABSENT:
                self.candidates.offer(child)

    def _is_parent_there(self, node: Node) -> bool:
        if node.parent is None or not self.tree.keeps_dependencies:
            return True
        return node.parent.residence is RESIDENT

    def abandon_load(self, node: Node) -> None:
        """Make a node whose contents will not arrive absent, and all loading nodes below it."""
        for member in reversed(trees.subtree(node)):
            if member.residence is not LOADING:
                continue
            pages, move = member.pages, self.transfers.current.get(member)
            if move is not None:
                move.owns_pages, pages = True, ()
                if move.to_device:
                    del self.transfers.current[member]
            self._set_device(member, ABSENT, ())
            self.device.release(pages)


def _can_come(node: Node) -> bool:
    return node.residence is ABSENT and node.host is HELD
