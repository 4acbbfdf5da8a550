"""The dependency tree (FastLibra §4): adapters under the root, KV pages under the adapter they depend on.

Owns which node is resident, who pins what, and which node may leave next. A KV node is one full page of
tokens computed under its adapter after its parent's tokens, so evicting leaves first can never strand KV
whose adapter or prefix is gone. Does not know sequences, the free list, or why a page is wanted.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
from collections.abc import Iterator

from manylora.types import BASE, AdapterId, PageId

PageKey = tuple[int, ...]
"""The tokens of one full page."""


class Residence(enum.Enum):
    """Where an adapter node stands on the device. KV nodes exist only while resident."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


class Node:
    """One adapter or one page of KV.

    ``pins`` counts holders of this very node; ``busy`` counts pins in its whole subtree, so a node with
    ``busy == 0`` can leave once its children have. Sequences pin only the deepest node they use.
    """

    __slots__ = (
        "adapter", "busy", "children", "key", "last_use",
        "pages", "parent", "pins", "residence", "stamp",
    )  # fmt: skip

    def __init__(
        self, adapter: AdapterId, parent: Node | None, key: PageKey, pages: tuple[PageId, ...]
    ) -> None:
        self.adapter = adapter
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[PageKey, Node] = {}
        self.pins = 0
        self.busy = 0
        self.last_use = 0.0
        self.residence = Residence.RESIDENT
        self.stamp = 0

    @property
    def is_adapter(self) -> bool:
        return self.parent is None


@dataclasses.dataclass
class _AdapterEntry:
    node: Node
    num_pages: int
    removed: bool = False


class DependencyTree:
    """Adapters and their KV. All methods are O(1) or O(depth of the path)."""

    def __init__(self) -> None:
        self.base = Node(BASE, None, (), ())
        self._adapters: dict[AdapterId, _AdapterEntry] = {BASE: _AdapterEntry(self.base, 0)}
        # Candidates to leave, by (last use, order of becoming one). Entries go stale; pop checks them.
        self._history_heap: list[tuple[float, int, Node]] = []
        self._adapter_heap: list[tuple[float, int, Node]] = []
        self._stamps = 0
        self.evictable_pages = 0
        self.history_pages = 0
        self.adapter_pages = 0

    # ------------------------------------------------------------ adapters

    def add_adapter(self, adapter: AdapterId, num_pages: int) -> None:
        """Make an adapter known; it starts absent."""
        if adapter in self._adapters:
            raise AssertionError(f"adapter {adapter} was added before")
        node = Node(adapter, None, (), ())
        node.residence = Residence.ABSENT
        self._adapters[adapter] = _AdapterEntry(node, num_pages)

    def knows(self, adapter: AdapterId) -> bool:
        """Whether new requests may name the adapter."""
        entry = self._adapters.get(adapter)
        return entry is not None and not entry.removed

    def node(self, adapter: AdapterId) -> Node:
        return self._adapters[adapter].node

    def num_pages(self, adapter: AdapterId) -> int:
        """Pages that the adapter takes when resident."""
        return self._adapters[adapter].num_pages

    def adapters(self) -> Iterator[Node]:
        """All adapter nodes but the base's."""
        return (entry.node for adapter, entry in self._adapters.items() if adapter != BASE)

    def mark_removed(self, adapter: AdapterId) -> None:
        """No new request may name it."""
        self._adapters[adapter].removed = True

    def begin_load(self, adapter: AdapterId, pages: tuple[PageId, ...]) -> Node:
        """An absent adapter gets pages that a read will fill."""
        node = self.node(adapter)
        if node.residence is not Residence.ABSENT:
            raise AssertionError(f"adapter {adapter} is {node.residence.value}, not absent")
        node.pages = pages
        node.residence = Residence.LOADING
        self.adapter_pages += len(pages)
        return node

    def finish_load(self, adapter: AdapterId, now: float) -> None:
        """The read has landed: the adapter is resident, and may leave if nobody pins it."""
        node = self.node(adapter)
        node.residence = Residence.RESIDENT
        node.last_use = now
        if node.busy == 0:
            self.evictable_pages += len(node.pages)
            self._offer(node)

    def cancel_load(self, adapter: AdapterId) -> tuple[PageId, ...]:
        """The read failed: the adapter is absent again; its pages are the caller's."""
        node = self.node(adapter)
        pages, node.pages = node.pages, ()
        node.residence = Residence.ABSENT
        self.adapter_pages -= len(pages)
        return pages

    def forget(self, adapter: AdapterId) -> None:
        """Drop an absent, unpinned adapter for good."""
        node = self.node(adapter)
        if node.residence is not Residence.ABSENT or node.busy or node.children:
            raise AssertionError(f"adapter {adapter} is still in use")
        del self._adapters[adapter]

    # ------------------------------------------------------------ matching and growing

    def match(self, adapter: AdapterId, tokens: list[int], page_tokens: int, max_pages: int) -> list[Node]:
        """The longest chain of resident KV nodes that spells a prefix of ``tokens``, deepest last."""
        node = self.node(adapter)
        found: list[Node] = []
        for index in range(max_pages):
            child = node.children.get(tuple(tokens[index * page_tokens : (index + 1) * page_tokens]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def child(self, parent: Node, key: PageKey) -> Node | None:
        """The KV node that follows ``parent`` with these tokens, if there is one."""
        return parent.children.get(key)

    def insert(self, parent: Node, key: PageKey, page: PageId, now: float) -> Node:
        """A full page becomes history under ``parent``. The new node is unpinned."""
        node = Node(parent.adapter, parent, key, (page,))
        node.last_use = now
        parent.children[key] = node
        self.history_pages += 1
        self.evictable_pages += 1
        self._offer(node)
        return node

    def pin(self, node: Node) -> None:
        """Hold the node, and thereby all it depends on, on the device."""
        node.pins += 1
        self._add_busy(node, 1)

    def unpin(self, node: Node, now: float) -> None:
        """Let go of the node; the whole path counts as used now."""
        node.pins -= 1
        self._add_busy(node, -1)
        step: Node | None = node
        while step is not None:
            step.last_use = max(step.last_use, now)
            step = step.parent
        self._offer_if_leaf(node)

    def move_pin(self, parent: Node, child: Node) -> None:
        """Exchange a pin on ``parent`` for one on its child. O(1): no subtree count above changes."""
        parent.pins -= 1
        child.pins += 1
        child.busy += 1
        if child.busy == 1:
            self.evictable_pages -= len(child.pages)

    def _add_busy(self, node: Node, change: int) -> None:
        step: Node | None = node
        while step is not None:
            was_idle = step.busy == 0
            step.busy += change
            is_idle = step.busy == 0
            if was_idle != is_idle and step.residence is Residence.RESIDENT:
                self.evictable_pages += len(step.pages) if is_idle else -len(step.pages)
            step = step.parent

    # ------------------------------------------------------------ leaving

    def _offer_if_leaf(self, node: Node) -> None:
        """Walk up from a node that lost a pin: the first idle node without children may leave."""
        if node.busy == 0 and not node.children and node.residence is Residence.RESIDENT:
            self._offer(node)

    def _offer(self, node: Node) -> None:
        if node.is_adapter and (node.adapter == BASE or not node.pages):
            return
        self._stamps += 1
        node.stamp = self._stamps
        heap = self._adapter_heap if node.is_adapter else self._history_heap
        heapq.heappush(heap, (node.last_use, node.stamp, node))
        # Without pressure nothing is ever popped; keep stale entries from piling up.
        if len(heap) > 64 + 2 * (self.history_pages + len(self._adapters)):
            heap[:] = [entry for entry in heap if self._may_leave(entry[2], entry[1])]
            heapq.heapify(heap)

    def _may_leave(self, node: Node, stamp: int) -> bool:
        return (
            node.stamp == stamp
            and node.busy == 0
            and not node.children
            and bool(node.pages)
            and node.residence is Residence.RESIDENT
        )

    def evict_next(self) -> tuple[Node, tuple[PageId, ...]] | None:
        """Evict the least recently used leaf: history first, adapters once no history can leave.

        Returns the node and its pages, now the caller's; None when nothing may leave.
        """
        for heap in (self._history_heap, self._adapter_heap):
            while heap:
                _, stamp, node = heapq.heappop(heap)
                if self._may_leave(node, stamp):
                    return node, self._evict(node)
        return None

    def _evict(self, node: Node) -> tuple[PageId, ...]:
        pages, node.pages = node.pages, ()
        self.evictable_pages -= len(pages)
        node.residence = Residence.ABSENT
        if node.is_adapter:
            self.adapter_pages -= len(pages)
            return pages
        self.history_pages -= len(pages)
        parent = node.parent
        assert parent is not None  # KV nodes always have one
        del parent.children[node.key]
        self._offer_if_leaf(parent)
        return pages

    def drop_subtree(self, adapter: AdapterId) -> tuple[PageId, ...]:
        """Evict an idle adapter with all its KV; returns every page, now the caller's."""
        root = self.node(adapter)
        if root.busy or root.residence is Residence.LOADING:
            raise AssertionError(f"adapter {adapter} is in use")
        freed: list[PageId] = []
        stack = [root]
        order: list[Node] = []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            if node.pages:
                freed.extend(self._evict(node))
        return tuple(freed)

    def all_nodes(self) -> Iterator[Node]:
        """Every node, parents first, for invariant checks."""
        stack = [entry.node for entry in self._adapters.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
