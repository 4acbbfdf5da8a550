"""FastLibra's equations against direct computation, and the order that candidates come in against brute force."""

import math
import random

import pytest

from manylora.config import CacheConfig, PolicyConfig
from manylora.policy.cache import Cache
from manylora.policy.candidates import Candidates
from manylora.policy.tree import HostState, Node, Residence
from manylora.policy.value import FastLibraValue, LeastRecentlyUsed, RealCost, RealHostCost, ValueModel


def cache_of(policy: str, num_pages: int = 4000, num_host_pages: int = 4000) -> Cache:
    config = PolicyConfig(num_pages, 16, 4096, 64, 8192, num_host_pages, 2**21, CacheConfig(policy))
    return Cache(config, lambda command: None)


def grow(cache: Cache, adapter: int, num_nodes: int) -> Node:
    """A resident adapter with a chain of KV pages; returns the deepest."""
    tree = cache.tree
    node = tree.node(adapter)
    if node.residence is not Residence.RESIDENT:
        tree.set_device(node, Residence.RESIDENT, cache.device.take(node.num_pages))
    for number in range(num_nodes):
        child = node.children.get(bytes([number])) or tree.insert(node, bytes([number]), cache.now)
        tree.pin(child)
        cache.fill(child, cache.device.take(1))
        tree.unpin(child, cache.now)
        node = child
    return node


def visit(cache: Cache, node: Node, now: float) -> None:
    cache.now = now
    cache.tree.pin(node)
    cache.visits.matched(node, now)
    cache.tree.unpin(node, now)


def test_equations_3_to_6() -> None:
    cache = cache_of("fastlibra")
    for adapter, pages in ((1, 8), (2, 16)):
        cache.tree.add_adapter(adapter, pages)
    deep, shallow = grow(cache, 1, 3), grow(cache, 2, 1)
    for now in (1.0, 2.0, 3.0):
        visit(cache, deep, now)
    visit(cache, shallow, 4.0)
    for rows in (4, 8):
        cache.visits.batch(rows, 4.0)
    now, tau = 6.0, 10.0
    probabilities = {1: 3 / 4, 2: 1 / 4}
    wanted = sum(1 - (1 - p) ** 6.0 for p in probabilities.values())
    assert cache.visits.expected_adapters(now) == pytest.approx(wanted)

    model = FastLibraValue(cache.visits, cache.rates, tau)
    model.refresh(now, num_adapters=1)

    def evaluate(node: Node, last_use: float) -> float:
        reward = max(1.0, wanted / 1) if node.is_adapter else 1.0
        cost = node.num_pages * cache.rates.page_in_s
        sigmoid = 1 / (1 + math.exp(-(now - last_use) / tau))
        return math.log(reward * cost * probabilities[node.adapter] * (1 - sigmoid))

    for node, last_use in ((deep, 3.0), (shallow, 4.0), (cache.tree.node(1), 3.0), (cache.tree.node(2), 4.0)):
        assert model.value(node, now)[0] == pytest.approx(evaluate(node, last_use))

    without_reward = FastLibraValue(cache.visits, cache.rates, tau, rewards_adapters=False)
    without_reward.refresh(now, num_adapters=1)
    difference = model.value(cache.tree.node(1), now)[0] - without_reward.value(cache.tree.node(1), now)[0]
    assert difference == pytest.approx(math.log(wanted))


def test_old_nodes_stay_distinct_in_log_space() -> None:
    """In seconds 1 - sigmoid(t) is exactly 0 from 37 s on."""
    cache = cache_of("fastlibra")
    cache.tree.add_adapter(1, 8)
    cache.tree.add_adapter(2, 8)
    old, older = grow(cache, 1, 1), grow(cache, 2, 1)
    visit(cache, older, 1.0)
    visit(cache, old, 2.0)
    model = FastLibraValue(cache.visits, cache.rates, tau_s=1.0)
    assert 1 - 1 / (1 + math.exp(-1000.0)) == 0.0
    assert model.value(older, 1000.0)[0] < model.value(old, 1000.0)[0]


def test_visits_leave_the_window() -> None:
    cache = cache_of("fastlibra")
    cache.tree.add_adapter(1, 8)
    node = grow(cache, 1, 2)
    visit(cache, node, 1.0)
    visit(cache, node, 50.0)
    assert (node.visits, cache.tree.node(1).visits, cache.visits.num_requests) == (2, 2, 2)
    cache.visits.expire(61.5)  # the window is 60 s
    assert (node.visits, cache.tree.node(1).visits, cache.visits.num_requests) == (1, 1, 1)
    cache.visits.expire(111.0)
    assert (node.visits, cache.visits.num_requests, cache.visits.expected_adapters(111.0)) == (0, 0, 0.0)


def test_real_cost_is_what_coming_back_takes() -> None:
    cache = cache_of("manylora")
    tree, rates = cache.tree, cache.rates
    root = tree.add_adapter(1, 8)
    node = grow(cache, 1, 1)
    model = RealCost(rates, cache.counters, 60.0)
    rates.saw_copy(10, 0.01, to_device=True)
    rates.saw_copy(10, 0.02, to_device=False)
    rates.saw_read(8, 0.8)
    assert model.cost_s(root) == pytest.approx(rates.step_s + 0.8), "without a host copy it is read again"
    assert model.cost_s(node) == pytest.approx(min(0.003, rates.page_prefill_s(1))), "written, then read back"
    tree.set_host(root, HostState.HELD, cache.host.take(8))
    tree.set_host(node, HostState.HELD, cache.host.take(1))
    assert model.cost_s(root) == pytest.approx(rates.step_s + 0.008), "a transfer"
    assert rates.page_prefill_s(1) < 0.001
    assert model.cost_s(node) == pytest.approx(rates.page_prefill_s(1)), "computing it is cheaper than either"
    rates.saw_step(1, 101, 1.0)  # now prefill is slow
    assert model.cost_s(node) == pytest.approx(0.001)


def test_a_host_copy_is_worth_what_it_saves_those_who_would_wait() -> None:
    cache = cache_of("manylora")
    tree, rates = cache.tree, cache.rates
    root = tree.add_adapter(1, 8)
    node = grow(cache, 1, 1)
    model = RealHostCost(rates, cache.counters, 60.0)
    rates.saw_copy(10, 0.001, to_device=True)
    rates.saw_read(8, 0.8)
    assert model.cost_s(root) == pytest.approx(0.8 - 0.0008), "a read in place of a transfer"
    alone_s = model.cost_s(node)
    assert alone_s == pytest.approx(rates.page_prefill_s(1) - 0.0001)
    for _ in range(200):
        rates.saw_step(30, 30, 0.01)
    assert model.cost_s(node) == pytest.approx(30 * rates.page_prefill_s(1) - 0.0001), (
        "30 rows wait for a prefill"
    )
    assert model.cost_s(root) == pytest.approx(0.8 - 0.0008), "and one for a read"


def test_a_full_host_drops_what_the_device_has_too_first() -> None:
    """The last used first, since that leaves the device last; then what it alone has, oldest first."""
    cache = cache_of("manylora", num_host_pages=5)
    tree = cache.tree
    nodes = {}
    for adapter in range(1, 6):
        tree.add_adapter(adapter, 2)
        node = nodes[adapter] = grow(cache, adapter, 1)
        tree.set_host(node, HostState.HELD, cache.host.take(1))
        visit(cache, node, float(adapter))
    for adapter in (4, 2):
        cache.evict(nodes[adapter], None, "demand")
        assert nodes[adapter].residence is Residence.STANDBY
    cache.now = 6.0
    dropped = []
    for _ in nodes:
        held = {adapter for adapter, node in nodes.items() if node.host is HostState.HELD}
        assert cache._host_provide(cache.host.num_free + 1)
        dropped += held - {adapter for adapter, node in nodes.items() if node.host is HostState.HELD}
    assert dropped == [5, 3, 1, 2, 4]
    assert [adapter for adapter, node in nodes.items() if node.residence is Residence.RESIDENT] == [1, 3, 5]


@pytest.mark.parametrize("kind", ["lru", "fastlibra", "real cost", "real host cost"])
@pytest.mark.parametrize("takes_best", [False, True])
def test_candidates_come_in_order_of_value(kind: str, takes_best: bool) -> None:
    """Against sorting all of them at each decision, while visits come, age and expire in between."""
    rng = random.Random(5)
    cache = cache_of("fastlibra")
    nodes = []
    for adapter in range(1, 31):
        nodes.append(cache.tree.add_adapter(adapter, rng.choice([4, 8])))
        nodes.append(grow(cache, adapter, rng.randrange(1, 9)))
    models: dict[str, ValueModel] = {
        "lru": LeastRecentlyUsed(),
        "fastlibra": FastLibraValue(cache.visits, cache.rates, 5.0),
        "real cost": RealCost(cache.rates, cache.counters, 20.0),
        "real host cost": RealHostCost(cache.rates, cache.counters, 20.0),
    }
    model = models[kind]
    out: set[int] = set()
    members = {id(node) for node in nodes}
    candidates = Candidates(0, model, lambda node: id(node) in members - out, takes_best)
    cache.visits._changed = candidates.offer  # the class under test instead of the cache's own lists
    cache.visits._only_leaves_matter = False
    for node in nodes:
        candidates.offer(node)
    now = 0.0
    for _ in range(60):
        for _ in range(rng.randrange(6)):
            now += rng.expovariate(0.3)
            node = rng.choice(nodes)
            visit(cache, node, now)
            step: Node | None = node
            while step is not None:
                if id(step) not in out and step in nodes:
                    candidates.offer(step)
                step = step.parent
        now += rng.expovariate(0.3)
        cache.visits.expire(now)
        model.refresh(now, 7)
        candidates.begin(now)
        for _ in range(rng.randrange(4)):
            left = [node for node in nodes if id(node) not in out]
            popped = candidates.pop()
            if not left:
                assert popped is None
                break
            assert popped is not None
            best = (max if takes_best else min)(model.value(node, now)[0] for node in left)
            assert popped[1] == pytest.approx(best)
            assert model.value(popped[0], now)[0] == pytest.approx(best)
            out.add(id(popped[0]))
        candidates.end()
        if out and rng.random() < 0.5:
            back = rng.choice([node for node in nodes if id(node) in out])
            out.remove(id(back))
            candidates.offer(back)
