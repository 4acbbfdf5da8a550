"""Random events under every ``--merge``: switches late or failed, merged adapters removed, pools tiny."""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.config.merging import MergeConfig, MergeTimes, StepTimes
from manylora.config.policy import ADMISSIONS, CacheConfig, PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.protocol.commands import Report
from manylora.protocol.events import AdapterRead, AdapterRemoved, ReportDue
from manylora.types import BASE
from tests.policy.device_model import DeviceModel
from tests.policy.test_replica_properties import EVENT_S, QUEUES, ReplicaMachine

STEPS = (StepTimes(1, 1, 0.5, 0.3, 0.32), StepTimes(8, 8, 0.6, 0.3, 0.35))
"""So slow that switches pay within an example."""
KINDS: list[dict[str, Any]] = [
    {"mode": "merged"}, {"mode": "dlora", "alpha": 0.6, "beta": 0.3, "window": 4}, {"mode": "dlora"},
    {"mode": "manylora"}, {"mode": "manylora", "minority": "wait"},
]  # fmt: skip


class MergingMachine(ReplicaMachine):
    """As there, with few adapters, so that one has most requests, and more requests than may run."""

    counts: ClassVar = collections.defaultdict[str, float](float)
    """What all examples together have shown."""

    @initialize(
        num_pages=st.sampled_from([8, 12, 12, 20, 40]),
        page_tokens=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 8),
        num_host_pages=st.sampled_from([0, 5, 40]),
        policy=st.sampled_from(["manylora", "manylora", *ALL_CACHE_POLICIES]),
        admission=st.sampled_from(["fcfs", "fcfs", *ADMISSIONS]),
        pipeline_depth=st.sampled_from([1, 2]),
        queue=st.sampled_from([{}] * 2 * len(QUEUES) + QUEUES),
        kind=st.sampled_from(KINDS),
        starve_s=st.sampled_from([0.5, 2.0, 8.0]),
        steps_wait=st.booleans(),
        opening=st.sampled_from([0, 8, 8, 16]),
        first_fails=st.booleans(),
    )
    def start(
        self,
        num_pages: int,
        page_tokens: int,
        max_num_seqs: int,
        extra_budget: int,
        num_host_pages: int,
        policy: str,
        admission: str,
        pipeline_depth: int,
        queue: dict[str, Any],
        kind: dict[str, Any],
        starve_s: float,
        steps_wait: bool,
        opening: int,
        first_fails: bool,
    ) -> None:
        merge = MergeConfig(**kind, starve_s=starve_s, times=MergeTimes(steps_wait, 0.1, 0.1, STEPS))
        config = PolicyConfig(
            num_pages, page_tokens, 40, max_num_seqs, max_num_seqs + extra_budget, num_host_pages, 1000,
            CacheConfig(policy, adapter_share=0.5, tau_s=2.0, window_s=8.0, trace=True), admission, 5.0,
            pipeline_depth, None, QueueConfig(**queue), merge,
        )  # fmt: skip
        self.begin(config, DeviceModel(page_tokens, pipeline_depth, steps_wait))
        self.device.fails_switch = first_fails
        for num_adapter_pages in (2, 1):
            self.add_adapter(num_adapter_pages)
        if opening:  # most are of one adapter, and steps end well for a while
            for adapter in (1, 1, 1, 2, BASE):
                self.ask(adapter, [0], 16)
            while self.device.reads:
                read = self.device.reads[0]
                self.device.land(read, ok=True)
                self.feed(AdapterRead(read.adapter, True))
            self.run_steps(opening)

    @precondition(lambda self: self.adapters)
    @rule(
        data=st.data(),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        together=st.integers(1, 5),
    )
    def crowd(self, data: st.DataObject, prompt: list[int], max_tokens: int, together: int) -> None:
        """More requests of one adapter."""
        adapter = data.draw(st.sampled_from(sorted(self.adapters)[:2]))
        for _ in range(together):
            self.ask(adapter, prompt, max_tokens)

    @precondition(lambda self: self.device.steps)
    @rule(num_steps=st.integers(1, 8))
    def steps_end_well(self, num_steps: int) -> None:
        """One after the other."""
        self.run_steps(num_steps)

    def run_steps(self, num_steps: int) -> None:
        """A switch ends where steps wait for it."""
        for _ in range(num_steps):
            if self.device.switches and not self.device.steps:
                self.feed(self.device.end_switch(0.1))
            elif self.device.steps:
                done = self.device.finish_step(ok=True)
                done.device_s = 0.5
                self.feed(done)

    @precondition(lambda self: self.device.named in self.adapters)
    @rule(data=st.data(), max_tokens=st.integers(2, 12), num_steps=st.integers(1, 8))
    def run_others_beside(self, data: st.DataObject, max_tokens: int, num_steps: int) -> None:
        """While an adapter is merged others and the base ask for something, and steps end well."""
        others = [adapter for adapter in (BASE, *sorted(self.adapters)[:2]) if adapter != self.device.named]
        for adapter in (self.device.named, *data.draw(st.permutations(others))):
            self.ask(adapter, [0], max_tokens)
        self.run_steps(num_steps)

    @precondition(lambda self: self.device.switches)
    @rule()
    def end_switch(self) -> None:
        self.feed(self.device.end_switch(0.1))

    @rule(fails=st.sampled_from([False, False, True]))
    def next_switch(self, fails: bool) -> None:
        self.device.fails_switch = fails

    @precondition(lambda self: self.device.named != BASE and self.device.named in self.adapters)
    @rule()
    def remove_merged(self) -> None:
        adapter = self.device.named
        del self.adapters[adapter]
        self.removed.add(adapter)
        self.feed(AdapterRemoved(adapter))

    @rule()
    def rest(self) -> None:
        """Long enough to try again after a failed switch, which then works."""
        self.now += 61 - EVENT_S
        self.device.fails_switch = False

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "device"):
            self.counts["switches"] += self.device.num_switches
            self.counts["merged"] += self.device.num_merged_steps
            (report,) = self.replica.handle(ReportDue(), self.now)
            assert isinstance(report, Report)
            counters = report.counters
            assert counters.steps_merged == self.device.num_merged_steps, "steps are counted by mode"
            num_ended = counters.switches_merged + counters.switches_base + counters.switches_failed
            assert num_ended == self.device.num_switches
            assert report.gauges.merged == self.device.named
            self.counts["failed"] += counters.switches_failed
            self.counts["paused"] += counters.paused_s


SETTINGS = settings(
    stateful_step_count=50,
    deadline=None,
    derandomize=True,  # else there is a run now and then in which no switch fails
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Far below what is seen: hypothesis draws constants of the modules that are loaded, so that a run of other files
# has other examples.
EXAMPLES, LEAST = 160, {"switches": 100, "failed": 3, "merged": 500, "paused": 2}


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])
def test_every_history(times: int) -> None:
    counts = MergingMachine.counts
    counts.clear()
    found = settings(SETTINGS, max_examples=times * EXAMPLES, derandomize=times == 1)
    run_state_machine_as_test(MergingMachine, settings=found)
    assert all(counts[name] >= times * number for name, number in LEAST.items()), counts
