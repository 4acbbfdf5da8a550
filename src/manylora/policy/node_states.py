"""The state of nodes in both tiers: where each stands, which may leave or come, and what was decided of them.

Every change of a state goes through here, so that the tree, the candidates and what the router is told agree.
Knows neither copies' ends nor why anything moves; that is ``residency``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.config import PolicyConfig
from manylora.policy.caches import find_cache
from manylora.policy.caches.policy import CachePolicy, Signals
from manylora.policy.candidates import Candidates
from manylora.policy.changes import Changes
from manylora.policy.cost import Rates
from manylora.policy.kv_turns import KvTurns
from manylora.policy.lent import LentPages
from manylora.policy.pages import PageLedger
from manylora.policy.room import Room
from manylora.policy.transfers import Transfers
from manylora.policy.tree import HELD, RESIDENT, DependencyTree, HostState, Node, PageKey, Residence
from manylora.policy.visits import Visits
from manylora.protocol import Command, Decided
from manylora.reports import Counters
from manylora.types import AdapterId, PageId


class NodeStates:
    """What of residency is about states; ``Residency`` does the rest."""

    def __init__(self, config: PolicyConfig, policy: CachePolicy | None = None) -> None:
        """``policy``: instead of the one that the config names."""
        self.policy = policy or find_cache(config.cache.policy)
        self.tree = DependencyTree(self.policy.keeps_dependencies)
        self.device = PageLedger(config.num_pages)
        self.host = PageLedger(config.num_host_pages)
        self.lent = LentPages(self.host)
        self.transfers = Transfers(config.cold_start.num_groups)
        self.changes = Changes(config.page_tokens)
        self.last_value: float | None = None
        """Of what left the device last for want of room, where the policy ``prices_pages``."""
        self.rates = Rates(config.page_bytes, config.page_tokens)
        self.offload = self.policy.offload(self.rates)
        self.marks = self.policy.marks(config.cache, config.num_pages)
        self.counters = Counters()
        self.visits = Visits(
            config.cache.window_s,
            config.cache.window_s,
            counts_window=self.policy.counts_visits,
            only_leaves_matter=self.policy.keeps_dependencies,
        )
        self.room = Room(self.tree, self.device, self.policy.adapter_pages(config))
        self.turns = KvTurns(self.policy.keeps_turns)
        signals = Signals(config.cache, self.visits, self.rates, self.counters, self.turns)
        self.candidates = Candidates(
            self.tree,
            self.policy.device_value(signals),
            self.policy.host_value(signals),
            has_parts=self.room.has_parts,
            can_enter=self.marks is not None,
        )
        self._traces = config.cache.trace
        self._decided: list[Command] = []

    def collect(self) -> list[Command]:
        """What was decided since the last time, in order."""
        decided, self._decided = self._decided, []
        return decided

    def decide(self, command: Command) -> None:
        """Something that a part above decides in the course of it, in its place among the rest."""
        self._decided.append(command)

    def note(self, action: str, node: Node, reason: str, value: float | None = None) -> None:
        """Say what was decided, where it is traced."""
        if self._traces:
            self._decided.append(Decided(action, node.adapter, node.depth, node.num_pages, reason, value))

    # ------------------------------------------------------------ states

    def _set_device(self, node: Node, residence: Residence, pages: tuple[PageId, ...]) -> None:
        leaf = self.tree.set_device(node, residence, pages)
        if node.parent is None:
            self.changes.moved(node.adapter)
        if leaf is not None:
            self.candidates.offer(leaf)
        # Without a copy on the host it is at most a candidate to leave.
        if node.host is HELD or (residence is RESIDENT and node.busy == 0):
            self.candidates.offer(node)

    def _set_host(self, node: Node, state: HostState, pages: tuple[PageId, ...]) -> None:
        self.tree.set_host(node, state, pages)
        if node.parent is None:
            self.changes.moved(node.adapter)
        self.candidates.offer(node)

    def unpin(self, node: Node, last_use: float) -> None:
        """Let go of a node that a sequence or a reservation has pinned; its path was used until then."""
        for idle in self.tree.unpin(node, last_use):
            self.candidates.offer(idle)

    def forget_visits(self, now: float) -> None:
        """Visits that have left the window count no more."""
        for node in self.visits.expire(now):
            self.candidates.offer(node)

    def source_of(self, adapter: AdapterId) -> str | None:
        """Where an adapter would come from: "host" or "files"; None where it is on the device."""
        root = self.tree.node(adapter)
        return None if root.residence is RESIDENT else "host" if root.host is HELD else "files"

    def insert(self, parent: Node, key: PageKey, now: float, begins_turn: bool) -> Node:
        """A KV node under ``parent``: absent, in neither tier, for the caller to fill at once."""
        node = self.tree.insert(parent, key, now)
        self._offer_all(self.turns.add(node, begins_turn))
        return node

    def part(self, node: Node) -> None:
        """A sequence goes on below this node with what it computes itself."""
        self._offer_all(self.turns.part(node))

    def _offer_all(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.candidates.offer(node)
