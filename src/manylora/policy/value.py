"""The value of a node on the device: the models that cache policies choose from.

Owns formulas and their inputs: visits in a window, batch sizes, measured rates. Does not know pages, tiers or
thresholds. Values are logarithms of seconds, so that products of very small factors stay distinct.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Sequence

from manylora.policy.tree import HELD, RESIDENT, Node, use
from manylora.reports import Counters
from manylora.types import BASE

BATCH_WINDOW_S = 5.0
"""FastLibra §5.1: the batch size is that of the last 5 seconds."""


class Visits:
    """Counts of requests by the nodes that they used.

    A request visits the nodes that it matched when it is admitted, and the nodes that it computed when it
    releases them. (The paper also updates a node's frequency when it is generated.)

    ``counts_window``: count the visits within the window; without it no value model reads any.
    ``only_leaves_matter``: a node with children on the device is no candidate to leave it.
    """

    def __init__(self, window_s: float, *, counts_window: bool, only_leaves_matter: bool) -> None:
        self._window_s = window_s
        self._counts_window = counts_window
        self._log: collections.deque[tuple[float, Node | None, Node]] = collections.deque()
        self._batches: collections.deque[tuple[float, int]] = collections.deque()
        self._batch_rows = 0
        self._adapters: dict[Node, None] = {}  # those with visits
        self.num_requests = 0
        self._only_leaves_matter = only_leaves_matter

    def matched(self, deepest: Node, now: float) -> None:
        """Count a request that was admitted and uses the path down to ``deepest``."""
        self.num_requests += self._counts_window
        self._visit(None, deepest, now)

    def computed(self, above: Node, deepest: Node, now: float) -> None:
        """Count a request that computed the nodes below ``above``, down to ``deepest``, and now releases
        them."""
        if deepest is not above:
            self._visit(above, deepest, now)

    def _visit(self, above: Node | None, deepest: Node, now: float) -> None:
        root = use(deepest, above, now)
        if root is not None:
            root.weight = 1.0 + root.weight * math.exp((root.weighed_at - now) / self._window_s)
            root.weighed_at = now
        if not self._counts_window:
            return
        self._log.append((now, above, deepest))
        step: Node | None = deepest
        while step is not None and step is not above:
            step.visits += 1
            step = step.parent
        if root is not None and root.adapter != BASE:
            self._adapters[root] = None

    def expire(self, now: float) -> list[Node]:
        """Forget visits that have left the window; return the idle nodes whose count fell, perhaps
        candidates."""
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
        """Count a step of ``num_rows`` rows that was started."""
        if not self._counts_window:
            return
        self._batches.append((now, num_rows))
        self._batch_rows += num_rows
        while self._batches[0][0] < now - BATCH_WINDOW_S:
            self._batch_rows -= self._batches.popleft()[1]

    def expected_adapters(self, now: float) -> float:
        """Return how many adapters a batch needs: equation 3 of FastLibra (§5.1)."""
        while self._batches and self._batches[0][0] < now - BATCH_WINDOW_S:
            self._batch_rows -= self._batches.popleft()[1]
        if not self._batches or not self.num_requests:
            return 0.0
        batch_size = self._batch_rows / len(self._batches)
        total = self.num_requests
        # A visit may outlive its request's count for a moment, hence the bound.
        return sum(1.0 - math.pow(1.0 - min(1.0, n.visits / total), batch_size) for n in self._adapters)


class KvTurns:
    """The turn of each KV node. An adapter is a turn by itself, and so is each node without ``kept``."""

    def __init__(self, kept: bool) -> None:
        self.kept = kept
        self._of: dict[Node, list[Node]] = {}

    def of(self, node: Node) -> Sequence[Node]:
        """Return the nodes of the node's turn, parents first."""
        return self._of.get(node) or (node,)

    def num_pages(self, node: Node) -> int:
        """Return how many pages move with the node, its own included."""
        turn = self._of.get(node)
        return node.num_pages if turn is None else len(turn)

    def add(self, node: Node, begins: bool) -> Sequence[Node]:
        """Add a new KV node to its parent's turn, or begin another turn with it.

        A turn begins, too, if another page follows the parent already. Return the pages below the parent that
        have become a turn of their own.
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
        """Make the pages of the turn below the node a turn of their own, and return them."""
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
        """Drop a KV node without children that has left the tree, if turns are ``kept``."""
        self._of.pop(node).pop()


_KEEP = 0.9
"""The weight of an estimate against one new observation."""

_FIRST_COPY_BYTES_S = 20e9
_FIRST_READ_BYTES_S = 1e9
_FIRST_PREFILL_S = 50e-6  # a token
_FIRST_STEP_S = 0.01
_LEAST_PREFILL_TOKENS = 64
_HOPE = 1 / 2000
"""The share by which the estimate of a transfer falls for each page that was computed instead."""
_MOST_HELD_UP = 2.0
"""The most sequences that a step's time counts for. A computed page delays all sequences of its step, a copied
page only its own; but copies wait in a queue, too, so all the others count as one."""


class Rates:
    """Measured seconds of a page of ``page_bytes`` and ``page_tokens``, and of a step (``step_s``) of
    ``step_rows`` rows."""

    def __init__(self, page_bytes: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.page_in_s = page_bytes / _FIRST_COPY_BYTES_S
        self.page_out_s = page_bytes / _FIRST_COPY_BYTES_S
        self.page_read_s = page_bytes / _FIRST_READ_BYTES_S
        self.step_s = _FIRST_STEP_S
        self.step_rows = 1.0
        self._token_s = _FIRST_PREFILL_S
        self._decode_s = 0.0
        self.num_copies = {True: 0, False: 0}  # by whether they go to the device
        self._num_reads = 0

    @property
    def held_up(self) -> float:
        """How many sequences a step's time delays, at most ``_MOST_HELD_UP``."""
        rows = self.step_rows
        return 1.0 if rows < 1.0 else _MOST_HELD_UP if rows > _MOST_HELD_UP else rows

    def learnt(self) -> tuple[float, float, float]:
        """Return the seconds of a prompt's token, a page from the host, and an adapter's page that is read; 0
        if none was seen."""
        has_prefilled = self._token_s != _FIRST_PREFILL_S
        return (
            self._token_s if has_prefilled else 0.0,
            self.page_in_s if self.num_copies[True] else 0.0,
            self.page_read_s if self._num_reads else 0.0,
        )

    def page_prefill_s(self, prefix_class: int) -> float:
        """Return the seconds to compute one page again, after a prefix of about 2 ** (prefix_class - 1) pages.

        Attention over the prefix adds to the time of a token: about a quarter per doubling beyond 64 pages, as
        a 7B model shows.
        """
        page_s = self._page_tokens * self._token_s
        return page_s * (1.0 + 0.25 * (prefix_class - 7)) if prefix_class > 7 else page_s

    def saw_copy(self, num_pages: int, seconds: float, to_device: bool) -> None:
        """Learn from a copy between the tiers."""
        if seconds <= 0 or not num_pages:
            return
        old = self.page_in_s if to_device else self.page_out_s
        new = _blend(old, seconds / num_pages, self.num_copies[to_device])
        self.num_copies[to_device] += 1
        if to_device:
            self.page_in_s = new
        else:
            self.page_out_s = new

    def expected_step_s(self, num_prefill_tokens: int) -> float:
        """Return the seconds of a step that decodes and computes ``num_prefill_tokens`` tokens of prompts."""
        return (self._decode_s or self.step_s) + num_prefill_tokens * self._token_s

    def weigh_copying(self, prefix_classes: Sequence[int]) -> float:
        """Return the delay saved by copying one page for each class from the host instead of computing it.

        The caller copies if the result is 0 or more. Before the first copy has landed a copy is taken to cost
        nothing, or none might ever be tried. An estimate that prevents copies would never be corrected, so a
        negative result lowers it.
        """
        prefill_s = 0.0
        for prefix_class in prefix_classes:
            prefill_s += self.page_prefill_s(prefix_class)
        saved_s = self.held_up * prefill_s
        if self.num_copies[True]:
            saved_s -= len(prefix_classes) * self.page_in_s
        if saved_s < 0:
            self.page_in_s *= (1 - _HOPE) ** len(prefix_classes)
        return saved_s

    def saw_read(self, num_pages: int, seconds: float) -> None:
        """Learn from a read of an adapter."""
        if seconds > 0 and num_pages:
            self.page_read_s = _blend(self.page_read_s, seconds / num_pages, self._num_reads)
            self._num_reads += 1

    def saw_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step. With many more tokens than rows it was mostly prefill."""
        if seconds <= 0:
            return
        self.step_s = _KEEP * self.step_s + (1 - _KEEP) * seconds
        self.step_rows = _KEEP * self.step_rows + (1 - _KEEP) * num_rows
        if num_tokens == num_rows:
            self._decode_s = seconds if not self._decode_s else _KEEP * self._decode_s + (1 - _KEEP) * seconds
        elif num_tokens - num_rows >= _LEAST_PREFILL_TOKENS:
            marginal = max(0.1 * seconds, seconds - self._decode_s) / (num_tokens - num_rows)
            self._token_s = _KEEP * self._token_s + (1 - _KEEP) * marginal


def _blend(old: float, seen: float, num_before: int) -> float:
    """Blend an observation into an estimate; the first one replaces the assumption."""
    return seen if num_before == 0 else _KEEP * old + (1 - _KEEP) * seen


Value = tuple[float, float]
"""A value, and a second one that decides between equals."""

REUSE_S = 15.0
"""The time in which KV loses value by a factor e: about the pause between two turns of a conversation."""
_LEAST_COST_S = 1e-7
_LEAST_WEIGHT = 1e-6
"""The weight of an adapter that no request has asked for yet."""
_PRIOR_TOKENS = 1000
"""Prompts count as wholly reusable at first; after this many tokens the observed share counts half."""


class ValueModel:
    """The order of candidates; by default that of LRU. Within a bucket, order by rank and by value agree at
    every moment."""

    def bucket(self, node: Node) -> Hashable:
        """Return a key of the nodes that keep their order among each other as time passes."""
        return 0

    def rank(self, node: Node) -> float:
        """Return the order within the bucket; the lowest leaves first. It changes only with visits and use."""
        return node.last_use

    def value(self, node: Node, now: float) -> Value:
        """Return the gain of keeping the node, comparable between buckets."""
        return (node.last_use, 0.0)

    def refresh(self, now: float, num_adapters: int) -> None:
        """Prepare for a decision, with ``num_adapters`` adapters resident."""


class LeastRecentlyUsed(ValueModel):
    """The order of LRU, every default: the longest unused node leaves first."""


class FastLibraValue(ValueModel):
    """The value of FastLibra: equations 3 to 6 (§5.1, §5.2), in log space.

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


class RealCost(ValueModel):
    """The value of manylora: the real cost of a miss, for each page of the node, times its rate of use.

    Cost: from a host copy the transfer; without one (so that leaving costs a write, or loses it) an adapter's
    read from its source or a KV page's prefill after its prefix. A request that misses its adapter also waits
    for a step, however small the adapter. Rate of an adapter: its visits, aged by a factor e in ``aging_s``.
    Rate of KV, which one conversation uses a few times and then never again: the share of prompts that cached
    KV has served, decaying with the time since its last use. Both are rates per second, so that they compare.
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
        """Return the seconds to bring the node back, from where it would be after leaving."""
        is_held = node.host is HELD
        if node.parent is not None:
            return self._kv_cost_s(node.depth.bit_length(), is_held)
        return self._adapter_cost_s(node.num_pages, is_held)

    def _adapter_cost_s(self, num_pages: int, is_held: bool) -> float:
        rates = self._rates
        return rates.step_s + num_pages * (rates.page_in_s if is_held else rates.page_read_s)

    def _kv_cost_s(self, depth_class: int, is_held: bool) -> float:
        """Return the seconds of one page of KV."""
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
    """The value of a copy on the host: the seconds that a transfer saves at the node's next use.

    An adapter's read from its source delays the requests that wait for it; a KV page's prefill delays all rows
    of its step. So KV that is seldom used does not push adapters out, and among nodes that are used often KV
    stays. KV that is on the device as well leaves the host first: only a write is lost, when the node leaves
    the device. That is furthest off for the node used last.
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
    """Return whether KV is in both tiers. An adapter does not count: the device's copy cannot be written
    back."""
    return node.parent is not None and node.residence is RESIDENT


def _softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
