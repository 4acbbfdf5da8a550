"""What has changed in a replica's tiers since it was last asked: adapters that moved, blocks of KV that are lost.

Owns the notes, and the hashes of blocks below which something was lost. Knows no tier, and no report.
"""

from __future__ import annotations

from manylora.policy.tree import Node, subtree
from manylora.protocol.hashing import BLOCK_BYTES, block_hash, prefix_root
from manylora.types import BASE, AdapterId


class Changes:
    """Off, and then at no cost, until it is asked for the first time."""

    def __init__(self, page_tokens: int) -> None:
        self._page_bytes = 8 * page_tokens
        self.block_bytes = BLOCK_BYTES
        self.is_on = False
        self._adapters: set[AdapterId] = set()
        self._lost: list[int] = []
        # Of nodes that end with a block: its hash. A node that is lost takes its own along.
        self._hashes: dict[Node, int] = {}

    def take(self) -> tuple[set[AdapterId], tuple[int, ...]]:
        """Adapters that may have moved, and hashes of the blocks that were lost, since the last call."""
        self.is_on = True
        adapters, self._adapters = self._adapters, set()
        lost, self._lost = self._lost, []
        return adapters, tuple(lost)

    def moved(self, adapter: AdapterId) -> None:
        """Its state in one of the tiers is another."""
        if self.is_on and adapter != BASE:
            self._adapters.add(adapter)

    def lost(self, node: Node) -> None:
        """A KV node is in neither tier any more, and what hangs below it cannot be reused."""
        if not self.is_on:
            return
        for each in subtree(node) if node.children else (node,):
            self._lost += self._blocks_of(each)
        for each in subtree(node):
            self._hashes.pop(each, None)

    def _blocks_of(self, node: Node) -> list[int]:
        """The hashes of the blocks that end in this node's page; O(a block's pages) where that before is known."""
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
