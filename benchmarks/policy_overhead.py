"""What the cache policy's own decisions cost (FastLibra §6.10), in this process, without a device.

    python benchmarks/policy_overhead.py [--nodes 100000 1000000] [--out FILE.json]

A tree of 1,000 adapters and N KV nodes of one page (960 tokens = 60 pages a conversation, so N / 60 of them),
nearly full. Timed: (1) match + update: a request of 960 tokens that matches 60 pages (page keys cut before) is
matched, pinned, counted as a visit, released again, and as old a visit expires; (2) a decision: choosing and
evicting victims for 64 pages at 96 % use, with host copies to fall back on and without. The paper reports 0.5 ms
and 5 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from pathlib import Path

from manylora.config import CACHE_POLICIES, CacheConfig, PolicyConfig
from manylora.policy.cache import Cache
from manylora.policy.tree import Node, PageKey

NUM_ADAPTERS = 1000
PAGES_A_CONVERSATION = 60
ADAPTER_PAGES = 8
VICTIM_PAGES = 64
WINDOW_S = 60.0


def build(
    policy: str, num_nodes: int, with_host: bool, rng: random.Random
) -> tuple[Cache, list[list[PageKey]]]:
    """A full tree at 96 % use, each conversation visited at a moment of its own."""
    used = num_nodes + NUM_ADAPTERS * ADAPTER_PAGES
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
    cache = Cache(config, lambda command: None)
    for adapter in range(1, NUM_ADAPTERS + 1):
        cache.tree.add_adapter(adapter, ADAPTER_PAGES)
    conversations = []
    now = 0.0
    spacing_s = WINDOW_S / (num_nodes // PAGES_A_CONVERSATION)  # one enters the window as one leaves it
    for number in range(num_nodes // PAGES_A_CONVERSATION):
        now += spacing_s
        cache.now = now
        adapter = 1 + number % NUM_ADAPTERS
        root = cache.tree.node(adapter)
        if not root.pages:
            load_adapter(cache, root)
        keys = [rng.randbytes(16 * 8) for _ in range(PAGES_A_CONVERSATION)]
        conversations.append(keys)
        node = root
        cache.tree.pin(root)
        for key in keys:
            child = cache.tree.insert(node, key, now)
            cache.tree.move_pin(node, child)
            cache.fill(child, cache.device.take(1))
            node = child
        cache.visits.matched(node, now)
        cache.tree.unpin(node, now)
    return cache, conversations


def load_adapter(cache: Cache, root: Node) -> None:
    from manylora.policy.tree import Residence

    cache.tree.set_device(root, Residence.RESIDENT, cache.device.take(root.num_pages))


def time_requests(
    cache: Cache, conversations: list[list[PageKey]], count: int, rng: random.Random
) -> list[float]:
    """Seconds of each request's match, pin, visit, unpin, and of the expiry of what left the window."""
    tree, visits = cache.tree, cache.visits
    seconds = []
    now = cache.now
    for _ in range(count):
        number = rng.randrange(len(conversations))
        keys = conversations[number]
        adapter = 1 + number % NUM_ADAPTERS
        now += WINDOW_S / len(conversations)  # each request sees about one expire
        cache.now = now
        began = time.perf_counter()
        path = tree.match(adapter, keys, PAGES_A_CONVERSATION)
        deepest = path[-1] if path else tree.node(adapter)
        tree.pin(deepest)
        visits.matched(deepest, now)
        tree.unpin(deepest, now)
        visits.expire(now)
        seconds.append(time.perf_counter() - began)
        assert len(path) == PAGES_A_CONVERSATION
    return seconds


def time_decisions(cache: Cache, count: int) -> list[float]:
    """Seconds of each choice of victims for 64 pages; the pages are taken, so that use stays at 96 %."""
    seconds = []
    for _ in range(count):
        cache.now += 0.1
        cache.visits.expire(cache.now)  # requests pay for this, see above
        target = cache.pages_used - VICTIM_PAGES
        began = time.perf_counter()
        cache.shrink(target, "busy")
        seconds.append(time.perf_counter() - began)
        assert cache.pages_used <= target
        cache.device.take(min(VICTIM_PAGES, cache.device.num_free))
    return seconds


def measure(policy: str, num_nodes: int, with_host: bool) -> dict[str, object]:
    rng = random.Random(7)
    cache, conversations = build(policy, num_nodes, with_host, rng)
    gc.collect()
    gc.freeze()
    requests = time_requests(cache, conversations, 2000, rng)
    decisions = time_decisions(cache, 100)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--policies", nargs="+", default=list(CACHE_POLICIES[:2]), choices=CACHE_POLICIES)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for num_nodes in args.nodes:
        for policy in args.policies:
            for with_host in (True, False):
                rows.append(measure(policy, num_nodes, with_host))
                print(json.dumps(rows[-1]), flush=True)
    if args.out:
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.out.write_text(
            json.dumps(
                {"benchmark": "policy_overhead", "commit": args.commit, "machine": machine, "rows": rows},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
