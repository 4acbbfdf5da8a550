"""The value of a node on the device: the models that cache policies choose from.

Owns formulas and their inputs (visits in a window, batch sizes, measured rates); does not know pages, tiers or
thresholds. Values are logarithms of seconds, so that products of very small factors stay distinct.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Sequence
from typing import Protocol

from manylora.policy.tree import HELD, RESIDENT, Node, use
from manylora.reports import Counters
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


_KEEP = 0.9
"""How much of an estimate survives one observation."""

_FIRST_COPY_BYTES_S = 20e9
_FIRST_READ_BYTES_S = 1e9
_FIRST_PREFILL_S = 50e-6  # a token
_FIRST_STEP_S = 0.01
_LEAST_PREFILL_TOKENS = 64
_HOPE = 1 / 2000
"""How much less a transfer is believed to take for each page that was computed instead."""
_MOST_HELD_UP = 2.0
"""A page that is computed holds up all sequences of its step, one that is copied only its own. Others count as one
at most: the copies' lane has a queue too."""


class Rates:
    """Seconds a page of ``page_bytes`` and ``page_tokens`` takes; ``step_s``: a step, of ``step_rows`` rows."""

    def __init__(self, page_bytes: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.page_in_s = page_bytes / _FIRST_COPY_BYTES_S
        self.page_out_s = page_bytes / _FIRST_COPY_BYTES_S
        self.page_read_s = page_bytes / _FIRST_READ_BYTES_S
        self.step_s = _FIRST_STEP_S
        self.step_rows = 1.0
        self._token_s = _FIRST_PREFILL_S
        self._decode_s = 0.0
        self._num_copies = {True: 0, False: 0}
        self._num_reads = 0

    @property
    def held_up(self) -> float:
        """How many sequences a step's time is lost to, as far as it counts (``_MOST_HELD_UP``)."""
        rows = self.step_rows
        return 1.0 if rows < 1.0 else _MOST_HELD_UP if rows > _MOST_HELD_UP else rows

    @property
    def has_copied(self) -> bool:
        """Whether a copy to the device has been seen."""
        return self._num_copies[True] > 0

    def learnt(self) -> tuple[float, float, float]:
        """Seconds of a prompt's token, of a page from the host, and of an adapter's page that is read; 0 where
        none was seen."""
        has_prefilled = self._token_s != _FIRST_PREFILL_S
        return (
            self._token_s if has_prefilled else 0.0,
            self.page_in_s if self._num_copies[True] else 0.0,
            self.page_read_s if self._num_reads else 0.0,
        )

    def page_prefill_s(self, prefix_class: int) -> float:
        """Computing one page again, after a prefix of about 2 ** (prefix_class - 1) pages.

        Attention over the prefix adds to what a token takes; a quarter more per doubling beyond 64 pages is
        about what a 7B model shows.
        """
        page_s = self._page_tokens * self._token_s
        return page_s * (1.0 + 0.25 * (prefix_class - 7)) if prefix_class > 7 else page_s

    def saw_copy(self, num_pages: int, seconds: float, to_device: bool) -> None:
        """A copy between the tiers has landed."""
        if seconds <= 0 or not num_pages:
            return
        old = self.page_in_s if to_device else self.page_out_s
        new = _blend(old, seconds / num_pages, self._num_copies[to_device])
        self._num_copies[to_device] += 1
        if to_device:
            self.page_in_s = new
        else:
            self.page_out_s = new

    def expected_step_s(self, num_prefill_tokens: int) -> float:
        """A step that decodes, and computes so many tokens of prompts beside."""
        return (self._decode_s or self.step_s) + num_prefill_tokens * self._token_s

    def weigh_copying(self, prefix_classes: Sequence[int]) -> float:
        """How much less bringing one page for each of these from the host holds up than computing them, for a
        decision: copies are made where it is 0 or more. Before the first copy has come they are believed to take
        nothing, or none might ever be tried.

        An estimate that keeps copies from being made would never be corrected, so a loss makes it more hopeful.
        """
        prefill_s = 0.0
        for prefix_class in prefix_classes:
            prefill_s += self.page_prefill_s(prefix_class)
        saved_s = self.held_up * prefill_s
        if self._num_copies[True]:
            saved_s -= len(prefix_classes) * self.page_in_s
        if saved_s < 0:
            self.page_in_s *= (1 - _HOPE) ** len(prefix_classes)
        return saved_s

    def saw_read(self, num_pages: int, seconds: float) -> None:
        """An adapter was read from its source."""
        if seconds > 0 and num_pages:
            self.page_read_s = _blend(self.page_read_s, seconds / num_pages, self._num_reads)
            self._num_reads += 1

    def saw_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step ended; with many more tokens than rows it was mostly prefill."""
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
    """The first observation replaces the assumption."""
    return seen if num_before == 0 else _KEEP * old + (1 - _KEEP) * seen


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
