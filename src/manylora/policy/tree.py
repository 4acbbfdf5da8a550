"""The dependency tree (FastLibra §4): adapters under the root, KV pages under the adapter they depend on.

Owns each node's states on the device and on the host, its pins, and the counts of both. A KV node is one full
page of tokens computed under its adapter after its parent's tokens. ``Changes`` notes for reports which
adapters have moved, and which blocks of KV are lost. Does not know free pages, copies, sequences, or a node's
value. A method that changes a state returns the other nodes that may have become candidates by it.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterator

from manylora.protocol.hashing import BLOCK_BYTES, block_hash, prefix_root
from manylora.types import BASE, AdapterId, PageId

PageKey = bytes
"""The tokens of one full page, behind the cache scope in a first page; bytes, because they keep their hash."""


class Residence(enum.Enum):
    """The state of a node on the device; all but ABSENT own device pages.

    LOADING: its contents are on the way, or there and waiting for the parent's. OFFLOADING: it leaves as soon
    as its copy on the host is complete; until then its eviction can be cancelled.
    """

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    OFFLOADING = "saving"


class HostState(enum.Enum):
    """The state of a node on the host. FILLING owns host pages whose contents are on the way."""

    NONE = "none"
    FILLING = "filling"
    HELD = "held"


# Names of their own, in the order of the classes: the policy asks for them all the time, and in Python 3.11 an
# Enum's attribute takes three times as long as a function call.
ABSENT, LOADING, RESIDENT, OFFLOADING = Residence
NO_COPY, FILLING, HELD = HostState


class Node:
    """One adapter or one page of KV.

    ``pins`` counts the sequences and reservations that hold this very node; ``busy`` counts pins in its whole
    subtree, so a node with ``busy == 0`` can leave once its children have. Sequences pin only the deepest node
    they use.
    """

    __slots__ = (
        "adapter", "busy", "children", "depth", "evicted_in", "has_landed", "host", "host_pages", "is_dropped",
        "key", "last_use", "num_on_device", "num_pages", "pages", "parent", "pins", "residence", "stamps",
        "visits", "weighed_at", "weight",
    )  # fmt: skip

    def __init__(self, adapter: AdapterId, parent: Node | None, key: PageKey, num_pages: int) -> None:
        self.adapter = adapter
        self.parent = parent
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.num_pages = num_pages
        self.children: dict[PageKey, Node] = {}
        self.num_on_device = 0  # children that are LOADING or RESIDENT
        self.pages: tuple[PageId, ...] = ()
        self.host_pages: tuple[PageId, ...] = ()
        self.residence = ABSENT
        self.host = NO_COPY
        self.has_landed = False  # LOADING, and only its parent is missing
        self.is_dropped = False
        self.pins = 0
        self.busy = 0
        # What value models go by.
        self.last_use = 0.0
        self.visits = 0
        self.weight = 0.0
        self.weighed_at = 0.0
        self.evicted_in = -2  # the interval in which the swapper last sent it away
        self.stamps = [0, 0, 0]  # one for each list of candidates

    @property
    def is_adapter(self) -> bool:
        return self.parent is None

    @property
    def is_ghost(self) -> bool:
        """Whether the node is in neither tier; a KV node then stays only for the nodes below it."""
        return self.residence is ABSENT and self.host is NO_COPY


class DependencyTree:
    """The adapters and their KV. All methods are O(1) or O(depth of the path) unless their docstrings
    differ."""

    def __init__(self, keeps_dependencies: bool = True) -> None:
        self.keeps_dependencies = keeps_dependencies
        self.base = Node(BASE, None, b"", 0)
        self.base.residence = RESIDENT
        # An adapter that was not asked for yet is its number of pages.
        self._adapters: dict[AdapterId, Node | int] = {BASE: self.base}
        self._removed: set[AdapterId] = set()
        # Device pages by what they hold, whatever the state; then some of them by state.
        self.kv_pages = 0
        self.adapter_pages = 0
        self.evictable_pages = 0  # of resident nodes without pins
        self.evictable_adapter_pages = 0
        self.idle_kv_of = collections.Counter[AdapterId]()
        """Device pages of KV under each adapter that no running request uses."""
        self.invalid_pages = 0  # of these, those whose adapter is not resident: no request could use them
        self._changed: set[AdapterId] = set()  # whose states or idle KV did, since ``take_changed``
        self.pinned_kv_pages = 0
        self.offloading_pages = 0
        self.loading_pages = 0
        self.resident_adapters = 0
        self.host_kv_pages = 0
        self.host_adapter_pages = 0

    # ------------------------------------------------------------ adapters

    def add_adapter(self, adapter: AdapterId, num_pages: int) -> None:
        """Add an adapter, which starts absent. A known one stays as it is."""
        if adapter not in self._adapters:
            self._adapters[adapter] = num_pages

    def knows(self, adapter: AdapterId) -> bool:
        """Return whether new requests may name the adapter."""
        return adapter in self._adapters and adapter not in self._removed

    def has(self, adapter: AdapterId) -> bool:
        """Return whether the adapter has a node: it may be removed, but not yet forgotten."""
        return adapter in self._adapters

    def take_changed(self) -> set[AdapterId]:
        """Return the adapters whose states or idle KV may have changed since the last call, or since they were
        added."""
        changed, self._changed = self._changed, set()
        return changed

    def node(self, adapter: AdapterId) -> Node:
        """Return the node of a known adapter, made at its first use."""
        found = self._adapters[adapter]
        if isinstance(found, int):
            found = self._adapters[adapter] = Node(adapter, None, b"", found)
        return found

    def adapters(self) -> Iterator[AdapterId]:
        """Yield all adapters but the base."""
        return (adapter for adapter in self._adapters if adapter != BASE)

    def idle_size(self, adapter: AdapterId) -> int | None:
        """Return the number of pages of an adapter without a node yet; None for others."""
        found = self._adapters[adapter]
        return found if isinstance(found, int) else None

    def mark_removed(self, adapter: AdapterId) -> bool:
        """Refuse new requests of the adapter; return False if they were refused before, or for the base."""
        if adapter == BASE or not self.knows(adapter):
            return False
        self._removed.add(adapter)
        return True

    def forget(self, adapter: AdapterId) -> None:
        """Drop an unpinned adapter that is in neither tier for good."""
        node = self.node(adapter)
        if not node.is_ghost or node.busy or node.children:
            raise AssertionError(f"adapter {adapter} is still in use")
        node.is_dropped = True
        del self._adapters[adapter], self.idle_kv_of[adapter]
        self._removed.discard(adapter)
        self._changed.discard(adapter)

    # ------------------------------------------------------------ matching and growing

    def match(self, adapter: AdapterId, keys: list[PageKey], max_pages: int) -> list[Node]:
        """Return the longest chain of KV nodes, in either tier, that spells ``keys[:max_pages]``; deepest
        last."""
        children = self.node(adapter).children
        found: list[Node] = []
        for key in keys[:max_pages]:
            child = children.get(key)
            if child is None or (child.residence is ABSENT and child.host is NO_COPY):
                break
            found.append(child)
            children = child.children
        return found

    def insert(self, parent: Node, key: PageKey, now: float) -> Node:
        """Insert a KV node under ``parent``, in neither tier; the caller fills it at once."""
        node = Node(parent.adapter, parent, key, 1)
        node.last_use = now
        parent.children[key] = node
        return node

    def remove(self, node: Node) -> Node:
        """Take a KV node that is in neither tier, and without children, out of the tree.

        Ghosts above it that stayed for its sake go too. Return the node above them, which may have become a
        leaf.
        """
        while True:
            parent = node.parent
            assert parent is not None, "an adapter is forgotten, not removed"
            if not node.is_ghost or node.children or node.busy:
                raise AssertionError("the node is still in use")
            del parent.children[node.key]
            node.is_dropped = True
            if parent.parent is None or not parent.is_ghost or parent.children or parent.busy:
                return parent
            node = parent

    # ------------------------------------------------------------ states

    def set_device(self, node: Node, residence: Residence, pages: tuple[PageId, ...]) -> Node | None:
        """Set the node's state on the device, and the pages that it owns there.

        Return the parent if that has lost its last child on the device.
        """
        before = node.residence
        if node.pages:
            self._count_device(node, -1)
        node.residence, node.pages = residence, pages
        if pages:
            self._count_device(node, 1)
        if residence is not LOADING:
            node.has_landed = False
        parent = node.parent
        if parent is None:
            self._changed.add(node.adapter)
            gone = (before is RESIDENT) - (residence is RESIDENT)
            self.invalid_pages += gone * self.idle_kv_of[node.adapter]
        else:
            was_on = before is RESIDENT or before is LOADING
            is_on = residence is RESIDENT or residence is LOADING
            if was_on != is_on:
                parent.num_on_device += 1 if is_on else -1
                if parent.num_on_device == 0:
                    return parent
        return None

    def mark_landed(self, node: Node) -> None:
        """Note that the contents of a loading node are there and its parent's are not."""
        node.has_landed = True

    def set_host(self, node: Node, state: HostState, pages: tuple[PageId, ...]) -> None:
        """Set the node's state on the host, and the pages that it owns there."""
        change = len(pages) - len(node.host_pages)
        if node.parent is None:
            self._changed.add(node.adapter)
            self.host_adapter_pages += change
        else:
            self.host_kv_pages += change
        node.host, node.host_pages = state, pages

    def _count_device(self, node: Node, sign: int) -> None:
        size, residence = sign * len(node.pages), node.residence
        is_evictable = residence is RESIDENT and node.busy == 0
        if node.parent is None:
            self.adapter_pages += size
            if residence is RESIDENT:
                self.resident_adapters += sign
            if is_evictable:
                self._add_evictable(node.adapter, 0, size)
        else:
            self.kv_pages += size
            if node.busy:
                self.pinned_kv_pages += size
            elif is_evictable:
                self._add_evictable(node.adapter, size, 0)
        if residence is OFFLOADING:
            self.offloading_pages += size
        elif residence is LOADING:
            self.loading_pages += size

    # ------------------------------------------------------------ pins

    def pin(self, node: Node) -> None:
        """Hold the node, and thereby all nodes that it depends on."""
        node.pins += 1
        num_kv_pages = 0
        step = node
        while step.parent is not None:
            step.busy += 1
            if step.busy == 1:
                self.pinned_kv_pages += len(step.pages)
                if step.residence is RESIDENT:
                    num_kv_pages += 1
            step = step.parent
        step.busy += 1
        num_pages = len(step.pages) if step.busy == 1 and step.residence is RESIDENT else 0
        self._add_evictable(node.adapter, -num_kv_pages, -num_pages)

    def unpin(self, node: Node, now: float) -> list[Node]:
        """Release the node; the whole path counts as used at ``now``. Return its nodes that became idle and may
        leave."""
        node.pins -= 1
        num_kv_pages = num_pages = 0
        idle = []
        step: Node | None = node
        while step is not None:
            step.busy -= 1
            if now > step.last_use:
                step.last_use = now
            if step.busy == 0:
                if step.parent is not None:
                    self.pinned_kv_pages -= len(step.pages)
                if step.residence is RESIDENT:
                    if step.parent is None:
                        num_pages = len(step.pages)
                    else:
                        num_kv_pages += 1
                # With dependencies only the device's leaves can leave (the path may go on in the host alone).
                if step is node or step.num_on_device == 0 or not self.keeps_dependencies:
                    idle.append(step)
            step = step.parent
        self._add_evictable(node.adapter, num_kv_pages, num_pages)
        return idle

    def move_pin(self, parent: Node, child: Node) -> None:
        """Exchange a pin on ``parent`` for one on its child. O(1): no subtree count above changes."""
        parent.pins -= 1
        child.pins += 1
        child.busy += 1
        if child.busy == 1:
            self.pinned_kv_pages += len(child.pages)
            if child.residence is RESIDENT:
                self._add_evictable(child.adapter, -len(child.pages), 0)

    def _add_evictable(self, adapter: AdapterId, kv_pages: int, adapter_pages: int) -> None:
        self.evictable_pages += kv_pages + adapter_pages
        self.evictable_adapter_pages += adapter_pages
        if kv_pages:
            self._changed.add(adapter)
            self.idle_kv_of[adapter] += kv_pages
            if self.node(adapter).residence is not RESIDENT:
                self.invalid_pages += kv_pages

    @property
    def idle_kv_pages(self) -> int:
        """Device pages of KV that no running request uses."""
        return self.evictable_pages - self.evictable_adapter_pages

    # ------------------------------------------------------------ what may leave, what may enter

    def may_leave(self, node: Node) -> bool:
        """Return whether the node may leave the device: leaves first, if dependencies are kept."""
        return (
            node.residence is RESIDENT
            and node.busy == 0
            and bool(node.pages)
            and (node.num_on_device == 0 or not self.keeps_dependencies)
        )

    def may_enter(self, node: Node) -> bool:
        """Return whether a copy from the host would make the node usable: parents first, if dependencies are
        kept."""
        if node.residence is not ABSENT or node.host is not HELD or node.is_dropped:
            return False
        if node.adapter in self._removed:
            return False
        return node.parent is None or node.parent.residence is RESIDENT or not self.keeps_dependencies

    def may_leave_host(self, node: Node) -> bool:
        """Return whether the host may drop its copy: of a node also on the device, or of a leaf of both
        tiers."""
        if node.host is not HELD or node.is_dropped:
            return False
        if node.residence is RESIDENT:
            return True
        return node.residence is ABSENT and node.busy == 0 and not node.children


def subtree(root: Node) -> list[Node]:
    """Return the node and all nodes below it, parents first."""
    order = [root]
    for node in order:
        order.extend(node.children.values())
    return order


def use(deepest: Node, above: Node | None, now: float) -> Node | None:
    """Mark the path from ``deepest`` up to ``above`` (left out) as used; return the adapter if the path ends
    there."""
    step = deepest
    while step.parent is not None and step is not above:
        step.last_use = now
        step = step.parent
    if step is above:
        return None
    step.last_use = now
    return step


def path_to(node: Node) -> list[Node]:
    """Return the KV nodes from an adapter (left out) down to ``node``."""
    path = []
    step = node
    while step.parent is not None:
        path.append(step)
        step = step.parent
    path.reverse()
    return path


class Changes:
    """The changes since the last report: adapters that moved, and blocks of KV that are lost.

    It is off, at no cost, until the first call of ``take``.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_bytes = 8 * page_tokens
        self.block_bytes = BLOCK_BYTES
        self.is_on = False
        self._adapters: set[AdapterId] = set()
        self._lost: list[int] = []
        # Of nodes that end with a block: its hash. A node that is lost takes its own along.
        self._hashes: dict[Node, int] = {}

    def take(self) -> tuple[set[AdapterId], tuple[int, ...]]:
        """Return the adapters that may have moved, and the hashes of lost blocks, since the last call."""
        self.is_on = True
        adapters, self._adapters = self._adapters, set()
        lost, self._lost = self._lost, []
        return adapters, tuple(lost)

    def moved(self, adapter: AdapterId) -> None:
        """Note that an adapter's state in one of the tiers has changed."""
        if self.is_on and adapter != BASE:
            self._adapters.add(adapter)

    def lost(self, node: Node) -> None:
        """Note that a KV node is in neither tier any more, so that the nodes below it cannot be reused."""
        if not self.is_on:
            return
        for each in subtree(node) if node.children else (node,):
            self._lost += self._blocks_of(each)
        for each in subtree(node):
            self._hashes.pop(each, None)

    def _blocks_of(self, node: Node) -> list[int]:
        """Return the hashes of the blocks that end in this node's page; O(a block's pages) if the one before is
        known."""
        path, size = [node], self.block_bytes
        step = node.parent
        while step is not None and step.parent is not None and step not in self._hashes:
            path.append(step)
            step = step.parent
        assert step is not None
        path.reverse()
        if step.parent is None:
            scope = path[0].key[: len(path[0].key) - self._page_bytes]
            last = prefix_root(node.adapter, scope)
        else:
            last = self._hashes[step]
        rest = b""
        found: list[int] = []
        for each in path:
            rest += each.key[len(each.key) - self._page_bytes :]
            found = []
            while len(rest) >= size:
                last, rest = block_hash(last, rest[:size]), rest[size:]
                found.append(last)
            if not rest:
                self._hashes[each] = last
        return found
