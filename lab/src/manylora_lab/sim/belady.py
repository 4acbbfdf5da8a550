"""Belady's rule with costs, as cache policies that know the stream: for simulation alone.

What is needed last leaves first, weighed by what it costs to have again: of two nodes that cost the same,
Belady's choice; else the one that saves least for each second that its pages are kept. Everything else is
``manylora``'s, so that what lies between the two is what the value of nodes can still gain. No bound: what leaves
also decides when requests are admitted, and greedy choices by cost are not the best ones.

``belady`` knows all of the stream, ``belady-seen`` only of adapters that were asked for since it began: of others
no policy can know more than that they are there, so what lies between the two is no policy's to gain.
"""

from __future__ import annotations

import array
import collections
import math
from collections.abc import Hashable, Sequence

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.policy.cache_policies import Manylora, OffloadWhereItPays, Signals
from manylora.policy.tree import Node
from manylora.policy.value import Rates, RealCost, RealHostCost, Value, ValueModel
from manylora.protocol.commands import Admitted, ClientCommand
from manylora.types import BASE, AdapterId
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.sim.prompts import StreamTurns
from manylora_lab.sim.replay import Replay, Watch
from manylora_lab.workloads.stream import Stream, StreamRequest

_LEAST_WAIT_S = 1e-3
"""What is needed now, or was before, is as if it were needed so soon."""
_UNSEEN_S = 1e6
"""From the stream's beginning until an adapter is needed of which nothing is known: after all that is known to be
needed, and before what is known not to be."""


class Foresight:
    """When adapters and pieces of conversations are needed next, by the stream's moments: those of requests that
    were not admitted yet. A turn that waits for the reply before it counts from its own moment on.

    ``of_unseen``: also of adapters that no request has named so far.
    """

    def __init__(self, stream: Stream, of_unseen: bool = True) -> None:
        self._of_unseen = of_unseen
        self._adapters: dict[int, AdapterId] = {}  # by conversation, which keeps to one
        self._seen: set[AdapterId] = set()
        self.began_s = 0.0
        self.turns: StreamTurns | None = None
        self._next_turn: collections.Counter[int] = collections.Counter()
        self._needs: dict[Hashable, collections.deque[StreamRequest]] = collections.defaultdict(
            collections.deque
        )
        said: dict[int, dict[Hashable, None]] = collections.defaultdict(dict)
        for request in stream.requests:
            if any(piece.tokens is not None for piece in request.prompt):
                raise ConfigError(f"belady knows made-up prompts alone, and {stream.name} has texts")
            adapter = BASE if request.adapter is None else request.adapter + 1
            self._adapters[request.conversation] = adapter
            if adapter != BASE:
                self._needs["adapter", adapter].append(request)
            said[request.conversation].update(dict.fromkeys(piece.identity for piece in request.prompt))
            for identity in said[request.conversation]:
                self._needs["piece", identity].append(request)

    def admitted(self, name: str) -> None:
        """The request of that name was admitted; warm-up requests are none of the stream's."""
        conversation, _, turn = name.rpartition("-")
        if conversation.isdigit():
            self._next_turn[int(conversation)] = int(turn) + 1
            self._seen.add(self._adapters[int(conversation)])

    def next_need_s(self, node: Node) -> float:
        """When a request of the stream needs the node next; infinite where none does."""
        if node.parent is None:
            if not self._of_unseen and node.adapter not in self._seen:
                return self.began_s + _UNSEEN_S
            return self._next_of(("adapter", node.adapter))
        (token,) = array.array("q", node.key[-8:])
        identity = None if self.turns is None else self.turns.identity_of(token)
        return self._next_of(("piece", identity))

    def _next_of(self, key: Hashable) -> float:
        needs = self._needs.get(key)
        while needs and needs[0].turn < self._next_turn[needs[0].conversation]:
            needs.popleft()
        return self.began_s + needs[0].arrival_s if needs else math.inf


class NextNeed(ValueModel):
    """Values by what a miss costs, over the time until the node is needed. In a bucket all cost the same."""

    def __init__(self, costs: RealCost, foresight: Foresight) -> None:
        self._costs = costs
        self._foresight = foresight

    def bucket(self, node: Node) -> Hashable:
        return self._costs.bucket(node)

    def rank(self, node: Node) -> float:
        return -self._foresight.next_need_s(node)

    def value(self, node: Node, now: float) -> Value:
        need_s = self._foresight.next_need_s(node)
        if need_s == math.inf or self._costs.bucket(node) == "doubled":
            return (-math.inf, -need_s)
        pages = node.num_pages if node.parent is None else 1
        return (math.log(self._costs.cost_s(node) / pages / max(need_s - now, _LEAST_WAIT_S)), -need_s)

    def refresh(self, now: float, num_adapters: int) -> None:
        self._costs.refresh(now, num_adapters)


class OffloadWhatIsNeeded(OffloadWhereItPays):
    """Writes what will be needed, where bringing it back holds up less than computing it."""

    def __init__(self, rates: Rates, foresight: Foresight) -> None:
        super().__init__(rates)
        self._foresight = foresight

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return self._foresight.next_need_s(node) < math.inf and self.is_copy_cheaper((node,))


class Belady(Manylora):
    """``manylora`` with the future in place of its estimates of what will be asked for again."""

    name = "belady"
    prices_pages = False

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight

    def device_value(self, signals: Signals) -> NextNeed:
        """See CachePolicy."""
        costs = RealCost(signals.rates, signals.counters, signals.config.window_s)
        return NextNeed(costs, self._foresight)

    def host_value(self, signals: Signals) -> NextNeed:
        """See CachePolicy."""
        costs = RealHostCost(signals.rates, signals.counters, signals.config.window_s)
        return NextNeed(costs, self._foresight)

    def offload(self, rates: Rates) -> OffloadWhatIsNeeded:
        """See CachePolicy."""
        return OffloadWhatIsNeeded(rates, self._foresight)


FORESIGHTS = {"belady": True, "belady-seen": False}
"""Names in the place of a policy, and whether they know of adapters that no request has named so far."""


class ForeseenReplay(Replay):
    """A replay under ``Belady``, which hears of every admission. ``of_unseen``: as ``Foresight`` has it. Raises
    ConfigError for streams with real text."""

    def __init__(
        self,
        stream: Stream,
        config: PolicyConfig,
        costs: StepCosts,
        adapter_pages: Sequence[int],
        is_warm: bool = True,
        watch: Watch | None = None,
        *,
        of_unseen: bool = True,
        copy_limit: int | None = None,
    ) -> None:
        self._foresight = Foresight(stream, of_unseen)
        cache = Belady(self._foresight)
        super().__init__(
            stream, config, costs, adapter_pages, is_warm, watch, copy_limit=copy_limit, cache=cache
        )
        self._foresight.turns = self._prompts

    def _begin(self) -> None:
        super()._begin()
        self._foresight.began_s = self.now

    def _note(self, command: ClientCommand) -> None:
        super()._note(command)
        if isinstance(command, Admitted):
            self._foresight.admitted(command.request)
