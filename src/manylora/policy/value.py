"""What a node is worth on the device: the value models that cache policies choose from.

Owns formulas and their inputs (visits in a window, batch sizes, measured rates); does not know pages, tiers or
thresholds. Values are logarithms of seconds, so that products of very small factors stay distinct.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Protocol

from manylora.policy.cost import Rates
from manylora.policy.tree import HostState, Node
from manylora.policy.visits import Visits

Value = tuple[float, float]
"""What is compared first, and what decides between equals."""

_LEAST_WEIGHT = 1e-6
"""Of what nobody has asked for yet."""


class ValueModel(Protocol):
    """What candidates are ordered by. Within a bucket, order by rank and by value agree at every moment."""

    def bucket(self, node: Node) -> Hashable:
        """Which nodes keep their order among each other as time passes."""

    def rank(self, node: Node) -> float:
        """The order within the bucket; the lowest leaves first. Changes only with visits and use."""

    def value(self, node: Node, now: float) -> Value:
        """What keeping the node saves, comparable between buckets."""

    def refresh(self, now: float, num_adapters: int) -> None:
        """A decision is about to be made, with so many adapters resident."""


class LeastRecentlyUsed:
    """The longest unused leaves first."""

    def bucket(self, node: Node) -> Hashable:
        return 0

    def rank(self, node: Node) -> float:
        return node.last_use

    def value(self, node: Node, now: float) -> Value:
        return (node.last_use, 0.0)

    def refresh(self, now: float, num_adapters: int) -> None:
        return


class FastLibraValue:
    """Equations 3 to 6 of FastLibra (§5.1, §5.2), in log space.

    log Eval = log LoRA_Eval (adapters only) + log cost + log prob - softplus(t / tau): 1 - sigmoid(x) is
    exp(-softplus(x)), and in seconds it is exactly 0 from 37 s on, so that all older nodes would tie.
    """

    def __init__(self, visits: Visits, rates: Rates, tau_s: float, rewards_adapters: bool = True) -> None:
        self._visits = visits
        self._rates = rates
        self._tau_s = tau_s
        self._rewards_adapters = rewards_adapters
        self._log_reward = 0.0

    def bucket(self, node: Node) -> Hashable:
        return (node.parent is None, node.num_pages, node.visits)

    def rank(self, node: Node) -> float:
        return node.last_use

    def value(self, node: Node, now: float) -> Value:
        if node.visits == 0:
            return (-math.inf, node.last_use)
        log_cost = math.log(node.num_pages * self._rates.page_in_s)
        log_prob = math.log(node.visits / max(1, self._visits.num_requests))
        log_value = log_cost + log_prob - _softplus((now - node.last_use) / self._tau_s)
        if node.parent is None:
            log_value += self._log_reward
        return (log_value, node.last_use)

    def refresh(self, now: float, num_adapters: int) -> None:
        if self._rewards_adapters:
            # Equation 4; the base needs no pages and does not count.
            wanted = self._visits.expected_adapters(now)
            self._log_reward = math.log(max(1.0, wanted / max(1, num_adapters)))


class RealCost:
    """Ours: seconds that getting the node back would really take, per page, times how often it is asked for.

    From a host copy that is the transfer; without one (so that leaving costs a write, or loses it) an
    adapter's read from its source or a KV page's prefill after its prefix. Frequencies age by a factor e in
    ``aging_s`` at every visit, which keeps the order within a bucket still: log(weight) + time / aging.
    """

    def __init__(self, rates: Rates, aging_s: float) -> None:
        self._rates = rates
        self._aging_s = aging_s

    def bucket(self, node: Node) -> Hashable:
        if node.parent is None:
            return (-1, node.num_pages, node.host is HostState.HELD)
        return (node.depth.bit_length(), 1, node.host is HostState.HELD)

    def rank(self, node: Node) -> float:
        return _log_weight(node) + node.weighed_at / self._aging_s

    def value(self, node: Node, now: float) -> Value:
        log_value = math.log(self.cost_s(node) / node.num_pages)
        return (log_value + _log_weight(node) - (now - node.weighed_at) / self._aging_s, node.last_use)

    def cost_s(self, node: Node) -> float:
        """Seconds to have the node again, from where it would be after leaving."""
        rates = self._rates
        if node.host is HostState.HELD:
            return node.num_pages * rates.page_in_s
        if node.parent is None:
            return node.num_pages * rates.page_read_s
        # It would be saved: written now and read back later, but never at more than computing it again.
        return min(rates.page_out_s + rates.page_in_s, rates.page_prefill_s(node.depth.bit_length()))

    def refresh(self, now: float, num_adapters: int) -> None:
        return


def _softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def _log_weight(node: Node) -> float:
    return math.log(max(node.weight, _LEAST_WEIGHT))
