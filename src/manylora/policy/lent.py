"""Adapters' host pages that steps in flight read: given back by their nodes, they stay as they are until then.

Owns which steps these are. Does not know why a step reads them.
"""

from __future__ import annotations

from manylora.policy.pages import PageLedger
from manylora.policy.tree import Node
from manylora.types import PageId


class LentPages:
    """Of the host's ledger ``pages``, which hears of the ends of such steps through this alone."""

    def __init__(self, pages: PageLedger) -> None:
        self._pages = pages
        self._steps: dict[Node, int] = {}  # the last step that reads a node's

    def lend(self, node: Node, step: int) -> None:
        """A step that begins reads the node's pages."""
        self._steps[node] = step

    def step_ended(self, step: int) -> None:
        """Such a step has ended; steps end in their order."""
        self._steps = {node: last for node, last in self._steps.items() if last > step}
        self._pages.step_ended(step)

    def release(self, node: Node, pages: tuple[PageId, ...]) -> None:
        """The node gives up these; others get them when no step reads them any more."""
        step = self._steps.get(node)
        if step is None:
            self._pages.release(pages)
        else:
            self._pages.release_after(step, pages)
