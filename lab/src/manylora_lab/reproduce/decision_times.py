"""What the cache policy's own decisions cost in real time (FastLibra §6.10), in this process, without a device.

A tree of adapters and N KV nodes of one page (960 tokens = 60 pages a conversation, so N / 60 of them), nearly
full. Timed: (1) match and update: a request of 960 tokens that matches 60 pages (page keys cut before) is matched,
pinned, counted as a visit, released again, and as old a visit expires; (2) a decision: choosing and evicting
victims for 64 pages at 96 % use, with host copies to fall back on or without.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy.residency import Residency
from manylora.policy.tree import Node, PageKey, Residence

NUM_ADAPTERS = 1000
PAGES_A_CONVERSATION = 60
ADAPTER_PAGES = 8
VICTIM_PAGES = 64
WINDOW_S = 60.0


def build(
    policy: str, num_nodes: int, with_host: bool, rng: random.Random
) -> tuple[Residency, list[list[PageKey]]]:
    """A full tree at 96 % use, each conversation visited at a moment of its own within the first window."""
    num_conversations = num_nodes // PAGES_A_CONVERSATION
    num_adapters = min(NUM_ADAPTERS, num_conversations)
    used = num_nodes + num_adapters * ADAPTER_PAGES
    num_pages = int(used / 0.96)
    config = PolicyConfig(
        num_pages,
        16,
        4096,
        64,
        8192,
        4 * num_pages if with_host else 0,
        2**21,
        CacheConfig(policy, window_s=WINDOW_S),
    )
    residency = Residency(config)
    tree = residency.tree
    for adapter in range(1, num_adapters + 1):
        tree.add_adapter(adapter, ADAPTER_PAGES)
    conversations = []
    now = 0.0
    spacing_s = WINDOW_S / num_conversations  # one enters the window as one leaves it
    for number in range(num_conversations):
        now += spacing_s
        root = tree.node(_adapter_of(number))
        if not root.pages:
            tree.set_device(root, Residence.RESIDENT, residency.device.take(root.num_pages))
        keys = [rng.randbytes(16 * 8) for _ in range(PAGES_A_CONVERSATION)]
        conversations.append(keys)
        node: Node = root
        tree.pin(root)
        for key in keys:
            child = residency.insert(node, key, now, begins_turn=False)
            tree.move_pin(node, child)
            residency.fill(child, residency.device.take(1), now)
            node = child
        residency.visits.matched(node, now)
        residency.unpin(node, now)
    return residency, conversations


def _adapter_of(conversation: int) -> int:
    return 1 + conversation % NUM_ADAPTERS


def time_requests(
    residency: Residency, conversations: list[list[PageKey]], count: int, rng: random.Random
) -> tuple[list[float], float]:
    """Seconds of each request's match, pin, visit, unpin, and of the expiry of what left the window; and the
    moment of the last one."""
    tree, visits = residency.tree, residency.visits
    seconds = []
    now = WINDOW_S
    for _ in range(count):
        number = rng.randrange(len(conversations))
        keys, adapter = conversations[number], _adapter_of(number)
        now += WINDOW_S / len(conversations)  # each request sees about one expire
        began = time.perf_counter()
        path = tree.match(adapter, keys, PAGES_A_CONVERSATION)
        deepest = path[-1] if path else tree.node(adapter)
        tree.pin(deepest)
        visits.matched(deepest, now)
        residency.unpin(deepest, now)
        residency.forget_visits(now)
        seconds.append(time.perf_counter() - began)
        assert len(path) == PAGES_A_CONVERSATION
    return seconds, now


def time_decisions(residency: Residency, count: int, now: float) -> list[float]:
    """Seconds of each choice of victims for 64 pages; the pages are taken, so that use stays at 96 %."""
    seconds = []
    for _ in range(count):
        now += 0.1
        residency.forget_visits(now)  # requests pay for this, see above
        target = residency.pages_used - VICTIM_PAGES
        began = time.perf_counter()
        residency.shrink(now, target, "busy")
        seconds.append(time.perf_counter() - began)
        assert residency.pages_used <= target
        residency.device.take(min(VICTIM_PAGES, residency.device.num_free))
    return seconds


def measure(
    policy: str, num_nodes: int, with_host: bool, num_requests: int = 2000, num_decisions: int = 100
) -> dict[str, object]:
    """Milliseconds of real time of requests and of decisions; raises AssertionError for a tree that is too small
    for so many decisions."""
    rng = random.Random(7)
    residency, conversations = build(policy, num_nodes, with_host, rng)
    gc.collect()
    gc.freeze()
    requests, now = time_requests(residency, conversations, num_requests, rng)
    decisions = time_decisions(residency, num_decisions, now)
    gc.unfreeze()
    return {
        "policy": policy,
        "nodes": num_nodes,
        "host_pool": with_host,
        "request_mean_ms": 1e3 * statistics.fmean(requests),
        "request_p99_ms": 1e3 * sorted(requests)[int(0.99 * len(requests))],
        "decision_mean_ms": 1e3 * statistics.fmean(decisions),
        "decision_median_ms": 1e3 * statistics.median(decisions),
        "decision_max_ms": 1e3 * max(decisions),
    }
