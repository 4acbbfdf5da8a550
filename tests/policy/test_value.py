"""FastLibra's equations against direct computation, and the order that candidates come in against brute force."""

import math
import random

import pytest
from manylora_lab.baselines.caches import UnrewardedValue

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy.candidates import CandidateList
from manylora.policy.residency import Residency
from manylora.policy.tree import DependencyTree, HostState, Node, Residence
from manylora.policy.value import FastLibraValue, LeastRecentlyUsed, RealCost, RealHostCost, ValueModel
from manylora.types import BASE


def residency_of(policy: str, num_pages: int = 4000, num_host_pages: int = 4000) -> Residency:
    config = PolicyConfig(num_pages, 16, 4096, 64, 8192, num_host_pages, 2**21, CacheConfig(policy))
    return Residency(config)


def known(tree: DependencyTree, adapter: int, num_pages: int) -> Node:
    """The node of a new adapter."""
    tree.add_adapter(adapter, num_pages)
    return tree.node(adapter)


def grow(residency: Residency, adapter: int, num_nodes: int) -> Node:
    """A resident adapter with a chain of KV pages; returns the deepest."""
    tree = residency.tree
    node = tree.node(adapter)
    if node.residence is not Residence.RESIDENT:
        tree.set_device(node, Residence.RESIDENT, residency.device.take(node.num_pages))
    for number in range(num_nodes):
        key = bytes([number])
        child = node.children.get(key) or residency.insert(node, key, 0.0, begins_turn=number == 0)
        tree.pin(child)
        residency.fill(child, residency.device.take(1), 0.0)
        residency.unpin(child, 0.0)
        node = child
    return node


def visit(residency: Residency, node: Node, now: float) -> None:
    residency.tree.pin(node)
    residency.visits.matched(node, now)
    residency.unpin(node, now)


@pytest.mark.parametrize(("policy", "num_deep_pages"), [("fastlibra", 3), ("fastlibra-pages", 1)])
def test_equations_3_to_6(policy: str, num_deep_pages: int) -> None:
    """A node's size is that of its turn, or of its page."""
    residency = residency_of(policy)
    for adapter, pages in ((1, 8), (2, 16)):
        residency.tree.add_adapter(adapter, pages)
    deep, shallow = grow(residency, 1, 3), grow(residency, 2, 1)
    for now in (1.0, 2.0, 3.0):
        visit(residency, deep, now)
    visit(residency, shallow, 4.0)
    for rows in (4, 8):
        residency.visits.batch(rows, 4.0)
    now, tau = 6.0, 10.0
    probabilities = {1: 3 / 4, 2: 1 / 4}
    wanted = sum(1 - (1 - p) ** 6.0 for p in probabilities.values())
    assert residency.visits.expected_adapters(now) == pytest.approx(wanted)

    model = FastLibraValue(residency.visits, residency.rates, residency.turns, tau)
    model.refresh(now, num_adapters=1)

    def evaluate(node: Node, last_use: float) -> float:
        reward = max(1.0, wanted / 1) if node.is_adapter else 1.0
        num_pages = num_deep_pages if node is deep else node.num_pages
        cost = num_pages * residency.rates.page_in_s
        sigmoid = 1 / (1 + math.exp(-(now - last_use) / tau))
        return math.log(reward * cost * probabilities[node.adapter] * (1 - sigmoid))

    roots = (residency.tree.node(1), 3.0), (residency.tree.node(2), 4.0)
    for node, last_use in ((deep, 3.0), (shallow, 4.0), *roots):
        assert model.value(node, now)[0] == pytest.approx(evaluate(node, last_use))

    without_reward = UnrewardedValue(residency.visits, residency.rates, residency.turns, tau)
    without_reward.refresh(now, num_adapters=1)
    difference = (
        model.value(residency.tree.node(1), now)[0] - without_reward.value(residency.tree.node(1), now)[0]
    )
    assert difference == pytest.approx(math.log(wanted))


@pytest.mark.parametrize(
    ("policy", "what_leaves"),
    [
        ("fastlibra", "history"),
        ("fastlibra-wol", "adapter"),
        ("fastlibra-pages", "history"),
        ("fastlibra-pages-wol", "history"),
    ],
)
def test_the_least_example_of_what_the_reward_decides(policy: str, what_leaves: str) -> None:
    """A turn of five pages and an adapter of two, asked for once each, at the same time, while a batch wants more
    adapters than the one that is there (equation 4). The turn costs more to bring back, so without the reward the
    adapter goes. By pages it stays either way: a page costs less than any adapter, and the reward says nothing."""
    residency = residency_of(policy)
    for adapter in (1, 2, 3, 4):
        residency.tree.add_adapter(adapter, 2)
        visit(residency, residency.tree.node(adapter), 1.0)
    root, history = known(residency.tree, 1, 2), grow(residency, BASE, 5)
    residency.tree.set_device(root, Residence.RESIDENT, residency.device.take(2))
    residency.candidates.offer(root)
    visit(residency, history, 1.0)
    residency.visits.batch(8, 1.0)
    assert residency.visits.expected_adapters(1.0) > 3, "2 x 3 is more than 5"
    (first, *_) = residency.shrink(1.0, residency.pages_used - 1, "demand")
    assert ("adapter" if first is root else "history") == what_leaves


@pytest.mark.parametrize(("num_turn_pages", "what_leaves"), [(5, "history"), (12, "adapter")])
def test_the_least_example_of_what_dependencies_decide(num_turn_pages: int, what_leaves: str) -> None:
    """Every request for KV is one for its adapter, which so has at least its visits and its last use. So where
    dependencies are ignored, equation 5 still sends KV first, unless its turn takes more pages than the adapter:
    only then is there invalid KV, and only then can -WOM be worse than the whole."""
    residency = residency_of("fastlibra-wom")
    root = known(residency.tree, 1, 8)
    history = grow(residency, 1, num_turn_pages)
    visit(residency, history, 1.0)
    (first, *_) = residency.shrink(2.0, residency.pages_used - 1, "demand")
    assert ("adapter" if first is root else "history") == what_leaves
    assert bool(residency.tree.invalid_pages) is (what_leaves == "adapter")


def test_old_nodes_stay_distinct_in_log_space() -> None:
    """In seconds 1 - sigmoid(t) is exactly 0 from 37 s on."""
    residency = residency_of("fastlibra")
    residency.tree.add_adapter(1, 8)
    residency.tree.add_adapter(2, 8)
    old, older = grow(residency, 1, 1), grow(residency, 2, 1)
    visit(residency, older, 1.0)
    visit(residency, old, 2.0)
    model = FastLibraValue(residency.visits, residency.rates, residency.turns, tau_s=1.0)
    assert 1 - 1 / (1 + math.exp(-1000.0)) == 0.0
    assert model.value(older, 1000.0)[0] < model.value(old, 1000.0)[0]


def test_visits_leave_the_window() -> None:
    residency = residency_of("fastlibra")
    residency.tree.add_adapter(1, 8)
    node = grow(residency, 1, 2)
    visit(residency, node, 1.0)
    visit(residency, node, 50.0)
    assert (node.visits, residency.tree.node(1).visits, residency.visits.num_requests) == (2, 2, 2)
    residency.visits.expire(61.5)  # the window is 60 s
    assert (node.visits, residency.tree.node(1).visits, residency.visits.num_requests) == (1, 1, 1)
    residency.visits.expire(111.0)
    assert (node.visits, residency.visits.num_requests, residency.visits.expected_adapters(111.0)) == (
        0,
        0,
        0.0,
    )


def test_real_cost_is_what_coming_back_takes() -> None:
    residency = residency_of("manylora")
    tree, rates = residency.tree, residency.rates
    root = known(tree, 1, 8)
    node = grow(residency, 1, 1)
    model = RealCost(rates, residency.counters, 60.0)
    rates.saw_copy(10, 0.01, to_device=True)
    rates.saw_copy(10, 0.02, to_device=False)
    rates.saw_read(8, 0.8)
    assert model.cost_s(root) == pytest.approx(rates.step_s + 0.8), "without a host copy it is read again"
    assert model.cost_s(node) == pytest.approx(min(0.003, rates.page_prefill_s(1))), "written, then read back"
    tree.set_host(root, HostState.HELD, residency.host.take(8))
    tree.set_host(node, HostState.HELD, residency.host.take(1))
    assert model.cost_s(root) == pytest.approx(rates.step_s + 0.008), "a transfer"
    assert rates.page_prefill_s(1) < 0.001
    assert model.cost_s(node) == pytest.approx(rates.page_prefill_s(1)), "computing it is cheaper than either"
    rates.saw_step(1, 101, 1.0)  # now prefill is slow
    assert model.cost_s(node) == pytest.approx(0.001)


def test_a_host_copy_is_worth_what_it_saves_those_who_would_wait() -> None:
    residency = residency_of("manylora")
    tree, rates = residency.tree, residency.rates
    root = known(tree, 1, 8)
    node = grow(residency, 1, 1)
    model = RealHostCost(rates, residency.counters, 60.0)
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
    residency = residency_of("manylora", num_host_pages=5)
    tree = residency.tree
    nodes = {}
    for adapter in range(1, 6):
        tree.add_adapter(adapter, 2)
        node = nodes[adapter] = grow(residency, adapter, 1)
        tree.set_host(node, HostState.HELD, residency.host.take(1))
        visit(residency, node, float(adapter))
    for adapter in (4, 2):
        residency.evict(5.0, nodes[adapter], "demand")
        assert nodes[adapter].residence is Residence.ABSENT
    dropped: list[int] = []
    for _ in nodes:
        held = {adapter for adapter, node in nodes.items() if node.host is HostState.HELD}
        assert residency._provide_host(6.0, residency.host.num_free + 1)
        dropped += held - {adapter for adapter, node in nodes.items() if node.host is HostState.HELD}
    assert dropped == [5, 3, 1, 2, 4]
    assert [adapter for adapter, node in nodes.items() if node.residence is Residence.RESIDENT] == [1, 3, 5]


@pytest.mark.parametrize("kind", ["lru", "fastlibra", "real cost", "real host cost"])
@pytest.mark.parametrize("takes_best", [False, True])
def test_candidates_come_in_order_of_value(kind: str, takes_best: bool) -> None:
    """Against sorting all of them at each decision, while visits come, age and expire in between."""
    rng = random.Random(5)
    residency = residency_of("fastlibra")
    nodes = []
    for adapter in range(1, 31):
        nodes.append(known(residency.tree, adapter, rng.choice([4, 8])))
        nodes.append(grow(residency, adapter, rng.randrange(1, 9)))
    models: dict[str, ValueModel] = {
        "lru": LeastRecentlyUsed(),
        "fastlibra": FastLibraValue(residency.visits, residency.rates, residency.turns, 5.0),
        "real cost": RealCost(residency.rates, residency.counters, 20.0),
        "real host cost": RealHostCost(residency.rates, residency.counters, 20.0),
    }
    model = models[kind]
    out: set[int] = set()
    members = {id(node) for node in nodes}
    candidates = CandidateList(0, model, lambda node: id(node) in members - out, takes_best)
    residency.visits._only_leaves_matter = False
    for node in nodes:
        candidates.offer(node)
    now = 0.0
    for _ in range(60):
        for _ in range(rng.randrange(6)):
            now += rng.expovariate(0.3)
            node = rng.choice(nodes)
            visit(residency, node, now)
            step: Node | None = node
            while step is not None:
                if id(step) not in out and step in nodes:
                    candidates.offer(step)
                step = step.parent
        now += rng.expovariate(0.3)
        for fallen in residency.visits.expire(now):
            candidates.offer(fallen)
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
