"""Chains of 5,000 pages through all that moves, frees or withdraws them: no walk may go by Python's stack."""

from __future__ import annotations

import dataclasses
import itertools
import random
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy import transfers
from manylora.policy.residency import Residency
from manylora.policy.tree import Node, Residence, path_to
from manylora.protocol.events import Arrive, CopyDone, Event
from tests.policy.device_model import VOCABULARY, DeviceModel
from tests.policy.test_cold_start_properties import ColdStartMachine
from tests.policy.test_merging_properties import MergingMachine
from tests.policy.test_replica_properties import ReplicaMachine

DEPTH = 5_000
"""Pages of one chain; Python's recursion ends at 1,000 calls."""


def stem(adapter: int) -> tuple[int, ...]:
    """The first tokens of all prompts of an adapter."""
    return tuple(random.Random(adapter).choices(range(VOCABULARY), k=DEPTH))


def deep(machine: type[ReplicaMachine]) -> type[ReplicaMachine]:
    """The machine with pages of one token, prompts that begin with a stem, and tiers that hold two of these."""

    class Deep(machine):  # type: ignore[misc, valid-type]
        def begin(self, config: PolicyConfig, device: DeviceModel) -> None:
            config = dataclasses.replace(
                config, num_pages=12_000, num_host_pages=min(config.num_host_pages, 1) * 13_000, page_tokens=1,
                max_model_len=DEPTH + 40, max_batch_tokens=DEPTH, max_waiting=None,
            )  # fmt: skip
            device.page_tokens = 1
            super().begin(config, device)
            self.events = itertools.count()

        def check(self) -> None:
            """It looks at 10,000 nodes: after each event it would take minutes, and shallow trees have it."""
            if next(self.events) % 4 == 0:
                super().check()

        def feed(self, event: Event) -> None:
            if isinstance(event, Arrive) and len(event.request.prompt) < DEPTH:
                prompt = stem(event.request.adapter) + event.request.prompt
                request = dataclasses.replace(event.request, prompt=prompt)
                self.requests[request.id] = request
                event = dataclasses.replace(event, request=request)
            super().feed(event)

        tell_router = None  # hashes every path from its start: too slow for such chains

    return Deep


@pytest.mark.parametrize(
    ("machine", "examples"), [(ReplicaMachine, 3), (ColdStartMachine, 4), (MergingMachine, 3)]
)
def test_every_history(machine: type[ReplicaMachine], examples: int) -> None:
    found = settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with mock.patch.object(transfers, "MOST_PAGES_A_COPY", DEPTH // 2):  # so that fewer end
        run_state_machine_as_test(deep(machine), settings=found)


def chain(residency: Residency) -> Node:
    """The base's chain of computed pages; returns the deepest."""
    node = residency.tree.base
    residency.tree.pin(node)
    for number in range(DEPTH):
        child = residency.insert(node, number.to_bytes(2, "big"), 0.0, begins_turn=number == 0)
        residency.tree.move_pin(node, child)
        residency.fill(child, residency.device.take(1), 0.0)
        node = child
    residency.unpin(node, 0.0)
    return node


def copies(residency: Residency) -> list[int]:
    return [copy.copy for copy in residency.start_transfers()]


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_a_chain_leaves_comes_back_deepest_first_and_is_removed(policy: str) -> None:
    config = PolicyConfig(6_000, 1, DEPTH, 4, DEPTH, 6_000, 2**20, CacheConfig(policy))
    residency = Residency(config)
    deepest = chain(residency)
    path = path_to(deepest)
    residency.shrink(0.0, 0, "busy")
    for copy in copies(residency):
        residency.copy_ended(CopyDone(copy, True, 1e-5))
    assert residency.device.num_free == 6_000
    back = [node for node in path if node.residence is Residence.ABSENT and node.host_pages]
    assert not back or back == path
    if back:
        residency.load(1.0, back, "idle")
        for copy in reversed(copies(residency)):
            residency.copy_ended(CopyDone(copy, True, 1e-5))
        assert all(node.residence is Residence.RESIDENT for node in path)
        residency.shrink(2.0, 0, "busy")
        residency.load(3.0, back, "idle")
        started = copies(residency)
        residency.abandon_load(path[0])
        for copy in started:
            residency.copy_ended(CopyDone(copy, True, 1e-5))
        residency.discard(path[0])
    assert residency.device.num_free == residency.host.num_free == 6_000
