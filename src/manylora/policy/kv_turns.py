"""Turns of conversations: KV pages that move between the tiers as one node, as FastLibra's do (§4).

Owns which pages belong together: what one sequence computed, from what it found to its end, until another parts
from it. A turn is a chain, parents first, from which others part at its end only. Does not know where pages lie.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.policy.tree import Node


class KvTurns:
    """The turn of each KV node. Without ``kept``, and for adapters, a node is one by itself."""

    def __init__(self, kept: bool) -> None:
        self.kept = kept
        self._of: dict[Node, list[Node]] = {}

    def of(self, node: Node) -> Sequence[Node]:
        """The node's turn, parents first."""
        return self._of.get(node) or (node,)

    def num_pages(self, node: Node) -> int:
        """What moves with the node, itself included."""
        turn = self._of.get(node)
        return node.num_pages if turn is None else len(turn)

    def add(self, node: Node, begins: bool) -> Sequence[Node]:
        """A KV node has come under its parent: it goes on with that one's turn, or begins another.

        It begins one by itself where another page follows its parent already. Returns the pages below the parent
        that have become a turn of their own by that.
        """
        above = node.parent
        if not self.kept or above is None:
            return ()
        turn = self._of.get(above)
        if turn is None or begins or len(above.children) > 1:
            self._of[node] = [node]
            return self.part(above)
        turn.append(node)
        self._of[node] = turn
        return ()

    def part(self, node: Node) -> Sequence[Node]:
        """Whatever of the node's turn comes below it is a turn of its own from now on; returns those pages."""
        turn = self._of.get(node)
        if turn is None or turn[-1] is node:
            return ()
        first = node.depth - turn[0].depth + 1
        below = turn[first:]
        del turn[first:]
        for each in below:
            self._of[each] = below
        return below

    def forget(self, node: Node) -> None:
        """A KV node without children is in the tree no more, where turns are ``kept``."""
        self._of.pop(node).pop()
