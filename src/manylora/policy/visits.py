"""What was asked for lately: visits of nodes within a sliding window, aged weights, recent batch sizes.

Owns the bookkeeping that value models read; decides nothing.
"""

from __future__ import annotations

import collections
import math

from manylora.policy.tree import HELD, Node, use
from manylora.types import BASE

BATCH_WINDOW_S = 5.0
"""FastLibra §5.1: the batch size is that of the last 5 seconds."""


class Visits:
    """Counts requests by the nodes they used. A request visits the nodes it matched when it is admitted, and
    those it computed when it lets go of them (the paper updates a node's frequency when it is generated too).

    ``counts_window``: counts are kept of the visits within the window; without it no value model reads any.
    ``only_leaves_matter``: a node with children on the device is no candidate to leave it.
    """

    def __init__(
        self,
        window_s: float,
        aging_s: float,
        *,
        counts_window: bool,
        only_leaves_matter: bool,
    ) -> None:
        self._window_s = window_s
        self._counts_window = counts_window
        self._aging_s = aging_s
        self._log: collections.deque[tuple[float, Node | None, Node]] = collections.deque()
        self._batches: collections.deque[tuple[float, int]] = collections.deque()
        self._batch_rows = 0
        self._adapters: dict[Node, None] = {}  # those with visits
        self.num_requests = 0
        self._only_leaves_matter = only_leaves_matter

    def matched(self, deepest: Node, now: float) -> None:
        """A request was admitted that uses the path down to ``deepest``."""
        self.num_requests += self._counts_window
        self._visit(None, deepest, now)

    def computed(self, above: Node, deepest: Node, now: float) -> None:
        """A request that computed the nodes below ``above``, down to ``deepest``, lets go of them."""
        if deepest is not above:
            self._visit(above, deepest, now)

    def _visit(self, above: Node | None, deepest: Node, now: float) -> None:
        if self._counts_window:
            self._count(above, deepest, now)
        root = use(deepest, above, now)
        if root is not None:
            root.weight = 1.0 + root.weight * math.exp((root.weighed_at - now) / self._aging_s)
            root.weighed_at = now

    def _count(self, above: Node | None, deepest: Node, now: float) -> None:
        self._log.append((now, above, deepest))
        step: Node | None = deepest
        while step is not None and step is not above:
            step.visits += 1
            if step.parent is None and step.adapter != BASE:
                self._adapters[step] = None
            step = step.parent

    def expire(self, now: float) -> list[Node]:
        """Forget visits that have left the window; returns the idle nodes, candidates perhaps, whose count
        fell."""
        log, first = self._log, now - self._window_s
        fallen: list[Node] = []
        while log and log[0][0] < first:
            _, above, deepest = log.popleft()
            self.num_requests -= above is None
            step: Node | None = deepest
            while step is not None and step is not above:
                step.visits -= 1
                if step.visits == 0 and step.parent is None:
                    self._adapters.pop(step, None)
                if step.busy == 0:
                    may_be_leaf = not self._only_leaves_matter or step.num_on_device == 0
                    if may_be_leaf or step.host is HELD:
                        fallen.append(step)
                step = step.parent
        return fallen

    def batch(self, num_rows: int, now: float) -> None:
        """A step of so many rows was started."""
        if not self._counts_window:
            return
        self._batches.append((now, num_rows))
        self._batch_rows += num_rows
        while self._batches[0][0] < now - BATCH_WINDOW_S:
            self._batch_rows -= self._batches.popleft()[1]

    def expected_adapters(self, now: float) -> float:
        """How many adapters a batch needs: equation 3 of FastLibra (§5.1)."""
        while self._batches and self._batches[0][0] < now - BATCH_WINDOW_S:
            self._batch_rows -= self._batches.popleft()[1]
        if not self._batches or not self.num_requests:
            return 0.0
        batch_size = self._batch_rows / len(self._batches)
        total = self.num_requests
        # A visit may outlive its request's count for a moment, hence the bound.
        return sum(1.0 - math.pow(1.0 - min(1.0, n.visits / total), batch_size) for n in self._adapters)
