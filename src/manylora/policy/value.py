"""The value of a node on the device: the models that cache policies choose from.

Owns formulas and their inputs (visits in a window, batch sizes, measured rates); does not know pages, tiers or
thresholds. Values are logarithms of seconds, so that products of very small factors stay distinct.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Protocol

from manylora.policy.cost import Rates
from manylora.policy.kv_turns import KvTurns
from manylora.policy.tree import HELD, RESIDENT, Node
from manylora.policy.visits import Visits
from manylora.reports import Counters

Value = tuple[float, float]
"""What is compared first, and what decides between equals."""

REUSE_S = 15.0
"""How fast KV loses value: about the pause between two turns of a conversation."""
_LEAST_COST_S = 1e-7
_LEAST_WEIGHT = 1e-6
"""The weight of what no request has asked for yet."""
_PRIOR_TOKENS = 1000
"""Prompts begin by looking wholly reusable; so many tokens later what was seen counts half."""


class ValueModel(Protocol):
    """What candidates are ordered by. Within a bucket, order by rank and by value agree at every moment."""

    def bucket(self, node: Node) -> Hashable:
        """Which nodes keep their order among each other as time passes."""

    def rank(self, node: Node) -> float:
        """The order within the bucket; the lowest leaves first. Changes only with visits and use."""

    def value(self, node: Node, now: float) -> Value:
        """What keeping the node gains, comparable between buckets."""

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
    exp(-softplus(x)), and in seconds it is exactly 0 from 37 s on, so that all older nodes would tie. A node's
    size, and so its cost, is that of its turn, where those are kept whole.
    """

    def __init__(self, visits: Visits, rates: Rates, turns: KvTurns, tau_s: float) -> None:
        self._visits = visits
        self._rates = rates
        self._turns = turns
        self._tau_s = tau_s
        self._log_reward = 0.0

    def bucket(self, node: Node) -> Hashable:
        return (node.parent is None, self._turns.num_pages(node), node.visits)

    def rank(self, node: Node) -> float:
        return node.last_use

    def value(self, node: Node, now: float) -> Value:
        if node.visits == 0:
            return (-math.inf, node.last_use)
        log_cost = math.log(self._turns.num_pages(node) * self._rates.page_in_s)
        log_prob = math.log(node.visits / max(1, self._visits.num_requests))
        log_value = log_cost + log_prob - _softplus((now - node.last_use) / self._tau_s)
        if node.parent is None:
            log_value += self._log_reward
        return (log_value, node.last_use)

    def refresh(self, now: float, num_adapters: int) -> None:
        # Equation 4; the base needs no pages and does not count.
        wanted = self._visits.expected_adapters(now)
        self._log_reward = math.log(max(1.0, wanted / max(1, num_adapters)))


class RealCost:
    """Ours: what a miss would really cost, for each page that keeping the node takes, times how soon and how
    surely it will be asked for.

    Cost: from a host copy the transfer; without one (so that leaving costs a write, or loses it) an adapter's
    read from its source or a KV page's prefill after its prefix. A request that misses its adapter waits a step
    besides, however small the adapter. How often: an adapter's visits, aged by a factor e in ``aging_s``; for
    KV, which one conversation uses a few times and then never again, the share of prompts that cached KV served
    so far, decaying with the time since its last use. Both as rates per second, so that they compare.
    """

    def __init__(self, rates: Rates, counters: Counters, aging_s: float) -> None:
        self._rates = rates
        self._counters = counters
        self._aging_s = aging_s
        # Log seconds of a KV page that was used just now, by depth class and whether the host has a copy; made
        # as a decision asks for them.
        self._fresh_kv: dict[tuple[int, bool], float] = {}
        self._log_reuse = 0.0
        self.refresh(0.0, 0)

    def bucket(self, node: Node) -> Hashable:
        kind = -node.num_pages if node.parent is None else node.depth.bit_length()
        return (kind, node.host is HELD)

    def rank(self, node: Node) -> float:
        if node.parent is None:
            return math.log(max(node.weight, _LEAST_WEIGHT)) + node.weighed_at / self._aging_s
        return node.last_use

    def value(self, node: Node, now: float) -> Value:
        if node.parent is None:
            log_cost = math.log(self.cost_s(node) / node.num_pages)
            log_rate = self.rank(node) - now / self._aging_s - math.log(self._aging_s)
            return (log_cost + log_rate, node.last_use)
        kind = (node.depth.bit_length(), node.host is HELD)
        fresh = self._fresh_kv.get(kind)
        if fresh is None:
            fresh = self._fresh_kv[kind] = self._log_reuse + math.log(self._kv_cost_s(*kind))
        return (fresh - (now - node.last_use) / REUSE_S, node.last_use)

    def cost_s(self, node: Node) -> float:
        """Seconds to have the node again, from where it would be after leaving."""
        is_held = node.host is HELD
        if node.parent is not None:
            return self._kv_cost_s(node.depth.bit_length(), is_held)
        return self._adapter_cost_s(node.num_pages, is_held)

    def _adapter_cost_s(self, num_pages: int, is_held: bool) -> float:
        rates = self._rates
        return rates.step_s + num_pages * (rates.page_in_s if is_held else rates.page_read_s)

    def _kv_cost_s(self, depth_class: int, is_held: bool) -> float:
        """The value of one page."""
        rates = self._rates
        # Without a copy it would be offloaded: written now and read back later. Never more than computing it
        # again.
        copy_s = rates.page_in_s if is_held else rates.page_out_s + rates.page_in_s
        return min(copy_s, rates.page_prefill_s(depth_class))

    def refresh(self, now: float, num_adapters: int) -> None:
        hits = self._counters.prefix_hits_tokens + _PRIOR_TOKENS
        reuse = hits / (self._counters.prefix_queries_tokens + _PRIOR_TOKENS) / REUSE_S
        self._log_reuse = math.log(reuse)
        self._fresh_kv.clear()


class RealHostCost(RealCost):
    """The value of a copy on the host, for the node's next use from there: what the transfer saves.

    An adapter's read from its source delays the requests that wait for it; a KV page's prefill all rows of its
    step. So KV that is seldom asked for does not push adapters out, and of what is asked for often that
    stays which would take the device's time. KV that the device has as well goes before all else: nothing
    is lost with such a copy, but a write when the device lets go, which is furthest off for what was used last.
    """

    def bucket(self, node: Node) -> Hashable:
        return "doubled" if _is_doubled(node) else super().bucket(node)

    def rank(self, node: Node) -> float:
        return -node.last_use if _is_doubled(node) else super().rank(node)

    def value(self, node: Node, now: float) -> Value:
        return (-math.inf, -node.last_use) if _is_doubled(node) else super().value(node, now)

    def _adapter_cost_s(self, num_pages: int, is_held: bool) -> float:
        return num_pages * max(self._rates.page_read_s - self._rates.page_in_s, _LEAST_COST_S)

    def _kv_cost_s(self, depth_class: int, is_held: bool) -> float:
        prefill_s = self._rates.step_rows * self._rates.page_prefill_s(depth_class)
        return max(prefill_s - self._rates.page_in_s, _LEAST_COST_S)


def _is_doubled(node: Node) -> bool:
    """An adapter never is: the device's copy cannot be written back."""
    return node.parent is not None and node.residence is RESIDENT


def _softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
