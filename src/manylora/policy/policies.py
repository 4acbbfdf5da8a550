"""The cache policies by name: each is a few choices that the same code obeys.

Owns what distinguishes the paper, its ablations, its baselines and ours; does not know how a choice is carried
out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from manylora.config import CacheConfig, PolicyConfig
from manylora.policy.cost import Rates
from manylora.policy.counters import Counters
from manylora.policy.value import FastLibraValue, LeastRecentlyUsed, RealCost, RealHostCost, ValueModel
from manylora.policy.visits import Visits

ModelMaker = Callable[[CacheConfig, Visits, Rates, Counters], ValueModel]


def _lru(config: CacheConfig, visits: Visits, rates: Rates, counters: Counters) -> ValueModel:
    return LeastRecentlyUsed()


def _fastlibra(config: CacheConfig, visits: Visits, rates: Rates, counters: Counters) -> ValueModel:
    return FastLibraValue(visits, rates, config.tau_s)


def _fastlibra_without_reward(
    config: CacheConfig, visits: Visits, rates: Rates, counters: Counters
) -> ValueModel:
    return FastLibraValue(visits, rates, config.tau_s, rewards_adapters=False)


def _real_host_cost(config: CacheConfig, visits: Visits, rates: Rates, counters: Counters) -> ValueModel:
    return RealHostCost(rates, counters, config.window_s)


def _real_cost(config: CacheConfig, visits: Visits, rates: Rates, counters: Counters) -> ValueModel:
    return RealCost(rates, counters, config.window_s)


@dataclasses.dataclass(frozen=True)
class CachePolicy:
    """What a policy does.

    ``keeps_dependencies``: no KV on the device without its adapter and its prefix. ``keeps_history``: a
    finished request's KV and an unused adapter stay until their room is needed. ``swaps_by_itself``: keeps the
    device between its two marks (FastLibra §5.3), of which ``high_mark`` is the upper, or None where that
    follows what steps take (``swap``); ``swaps_every_step``: looks at it after every step rather than every
    interval. ``weighs_recomputing``: KV is saved to the host, and comes back from there, only where that takes
    less than computing it again. ``keeps_orphans``: the host keeps history whose adapter is in neither tier,
    since that can be read again. ``keeps_standby``: history that has left can be used as long as nobody has
    taken its pages. ``prefetches``: brings what waiting requests need into idle pages (S-LoRA §5.2).
    ``has_parts``: adapters and KV have a fixed share of the device each. ``host_value``: what a copy on the
    host is worth, when that is full. ``counts_visits``: a value model reads how many requests in the window
    used a node.
    """

    device_value: ModelMaker
    host_value: ModelMaker = _lru
    keeps_dependencies: bool = True
    keeps_history: bool = True
    swaps_by_itself: bool = False
    prefetches: bool = False
    has_parts: bool = False
    counts_visits: bool = False
    high_mark: float | None = 0.95
    swaps_every_step: bool = False
    weighs_recomputing: bool = False
    keeps_orphans: bool = False
    keeps_standby: bool = False

    @property
    def makes_room_for_queue(self) -> bool:
        """Whether room is made for all that could be admitted as soon as the first must wait for it: where
        nothing is freed ahead of demand, and unused nodes lie in the way."""
        return self.keeps_history and not self.swaps_by_itself

    def loses_history_with(self, is_adapter: bool) -> bool:
        """Whether what lies below a node, in either tier, goes when the node is in neither any more."""
        return self.keeps_dependencies and not (is_adapter and self.keeps_orphans)


POLICIES: dict[str, CachePolicy] = {
    "manylora": CachePolicy(
        _real_cost,
        _real_host_cost,
        swaps_by_itself=True,
        prefetches=True,
        high_mark=None,
        swaps_every_step=True,
        weighs_recomputing=True,
        keeps_orphans=True,
        keeps_standby=True,
    ),
    "fastlibra": CachePolicy(_fastlibra, swaps_by_itself=True, counts_visits=True),
    "fastlibra-wom": CachePolicy(
        _fastlibra, keeps_dependencies=False, swaps_by_itself=True, counts_visits=True
    ),
    "fastlibra-wos": CachePolicy(_lru, swaps_by_itself=True),
    "fastlibra-wol": CachePolicy(_fastlibra_without_reward, swaps_by_itself=True, counts_visits=True),
    # The paper's vLLM (§2.2, §6.1): parts, each with its own LRU, and history offloaded to the host.
    "static-lru": CachePolicy(_lru, keeps_dependencies=False, has_parts=True),
    # The paper's S-LoRA (§6.1): one pool, adapters dropped when unused, no history.
    "s-lora": CachePolicy(_lru, keeps_history=False, prefetches=True),
    # One pool, one LRU. It keeps dependencies: only leaves leave.
    "lru": CachePolicy(_lru),
}


def adapter_pages_limit(config: PolicyConfig) -> int:
    """How many device pages adapters may take."""
    if POLICIES[config.cache.policy].has_parts:
        return max(1, int(config.num_pages * config.cache.adapter_share))
    return config.num_pages
