"""History that has left the device, on pages that nobody has taken yet: it can come back for nothing.

Owns which nodes stand by, between the tree's state and the ledger's order. Who leaves is ``cache``'s.
"""

from __future__ import annotations

from collections.abc import Callable

from manylora.policy.pages import PageLedger
from manylora.policy.tree import ABSENT, HELD, RESIDENT, SAVING, STANDBY, DependencyTree, Node
from manylora.types import PageId


class Standby:
    """Nodes that stand by. Each has a copy on the host, and its parent is resident, leaving, or stands by too.

    ``gone`` is told of every node that cannot come back any more.
    """

    def __init__(
        self, tree: DependencyTree, device: PageLedger, gone: Callable[[Node], None], is_used: bool
    ) -> None:
        """Without ``is_used`` no node may stand by."""
        self._tree = tree
        self._device = device
        self._gone = gone
        self._is_used = is_used
        self._nodes: dict[PageId, Node] = {}
        device.reclaimed = self._reclaimed

    def admits(self, node: Node) -> bool:
        """Whether a node that leaves can come back until its page is taken."""
        parent = node.parent
        if not self._is_used or parent is None or node.host is not HELD:
            return False
        return parent.residence is RESIDENT or parent.residence is STANDBY or parent.residence is SAVING

    def add(self, node: Node) -> None:
        """A node leaves that ``admits`` lets in."""
        (page,) = node.pages
        self._tree.set_device(node, STANDBY, node.pages)
        self._nodes[page] = node
        self._device.stand_by(page)

    def call_back(self, node: Node) -> None:
        """The node has its page back, for the caller to say what it is now."""
        (page,) = node.pages
        del self._nodes[page]
        self._device.call_back(page)

    def end(self, node: Node) -> None:
        """Give up the node's page."""
        (page,) = node.pages
        del self._nodes[page]
        self._device.stand_down(page)
        self._leave(node)

    def end_below(self, node: Node) -> None:
        """Give up what depends on the node, which leaves: it could not come back without it."""
        if node.num_standing:
            for child in [child for child in node.children.values() if child.residence is STANDBY]:
                self.end(child)

    def _reclaimed(self, page: PageId) -> None:
        """The page is somebody else's."""
        self._leave(self._nodes.pop(page))

    def _leave(self, node: Node) -> None:
        self.end_below(node)
        self._tree.set_device(node, ABSENT, ())
        self._gone(node)
