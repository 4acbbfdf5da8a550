"""Random events under every ``--cold-start`` but ``wait``: copies land, fail or are late, and so does the CPU."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, precondition, rule
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.config.cold_start import ColdStartConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from tests.policy.device_model import DeviceModel
from tests.policy.test_replica_properties import ReplicaMachine

COUNTS = {"awaiting": 0, "invalid": 0, "kv": 0, "served": 0}
"""What all examples together have shown."""


class ColdStartMachine(ReplicaMachine):
    """As there, with a small device and a large host, so that what is needed is mostly on the host."""

    @initialize(
        num_pages=st.sampled_from([6, 8, 12, 20]),
        page_tokens=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        num_host_pages=st.sampled_from([5, 16, 40, 40]),
        policy=st.sampled_from(["manylora", *ALL_CACHE_POLICIES]),
        pipeline_depth=st.sampled_from([1, 2]),
        cold_start=st.sampled_from(["block", "layerwise", "layerwise", "cpu", "auto"]),
        stall=st.sampled_from([0.02, 1.0]),
    )
    def start(
        self,
        num_pages: int,
        page_tokens: int,
        max_num_seqs: int,
        extra_budget: int,
        num_host_pages: int,
        policy: str,
        pipeline_depth: int,
        cold_start: str,
        stall: float,
    ) -> None:
        cache = CacheConfig(policy, adapter_share=0.5, tau_s=2.0, window_s=8.0)
        config = PolicyConfig(
            num_pages,
            page_tokens,
            40,
            max_num_seqs,
            max_num_seqs + extra_budget,
            num_host_pages,
            1000,
            cache,
            pipeline_depth=pipeline_depth,
            cold_start=ColdStartConfig(
                cold_start,
                stall if cold_start in ("layerwise", "auto") else 0.02,
                num_workers=2 if cold_start == "cpu" else 0,
            ),
        )
        self.begin(config, DeviceModel(page_tokens, pipeline_depth))
        for num_pages in (1, 2, 3):
            self.add_adapter(num_pages)

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def ask_of_an_adapter(self, data: st.DataObject, prompt: list[int]) -> None:
        if len(self.live()) < 6:
            self.ask(data.draw(st.sampled_from(sorted(self.adapters))), prompt, 2)

    @precondition(lambda self: self.device.steps and self.device.steps[0].command.cpu)
    @rule(ends=st.booleans(), fails=st.booleans(), num_workers=st.sampled_from([2, 2, 2, 0]))
    def end_a_served_step(self, ends: bool, fails: bool, num_workers: int) -> None:
        """Before or after the copies that bring the adapters meanwhile, or with workers that die."""
        for copy in self.device.awaited():
            self.end_copy_of(copy, True, 0.001)
        if ends:
            for served in self.device.steps[0].command.cpu:
                if served.copy in self.device.copies:
                    self.end_copy_of(served.copy, not fails, 0.001)
        self.device.cpu_workers = num_workers
        self.feed(self.device.finish_step(ok=True, cpu_fails=fails and not ends))

    @precondition(lambda self: self.device.steps)
    @rule(own_s=st.sampled_from([0.0, 0.01, 2.0]), stall_s=st.sampled_from([0.0, 0.001, 0.5]))
    def end_step_well(self, own_s: float, stall_s: float) -> None:
        """What it awaits has landed by then."""
        for copy in self.device.awaited():
            self.end_copy_of(copy, True, 0.001)
        done = self.device.finish_step(ok=True)
        done.stall_s = stall_s
        done.device_s = own_s + stall_s
        self.feed(done)

    @precondition(lambda self: self.device.steps and self.device.steps[0].command.awaits)
    @rule(is_late=st.booleans())
    def invalidate_step(self, is_late: bool) -> None:
        """What it awaits has failed, or has landed after the step was tired of waiting."""
        late = tuple(wanted.copy for wanted in self.device.steps[0].command.awaits if is_late)
        for copy in self.device.awaited():
            self.end_copy_of(copy, is_late, 0.001)
        self.feed(self.device.finish_step(ok=True, late=late))

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "device"):
            COUNTS["awaiting"] += self.device.num_awaiting_steps
            COUNTS["invalid"] += self.replica._residency.counters.spoilt_rows
            COUNTS["kv"] += self.device.num_awaited_kv
            COUNTS["served"] += self.device.num_served_steps


ColdStartMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,  # else there is a run now and then in which no row is invalid, or no KV awaited
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestColdStartProperties = ColdStartMachine.TestCase


def test_the_examples_have_awaited_adapters_and_kv_and_invalid_rows() -> None:
    """Runs after them."""
    assert not COUNTS["awaiting"] or all(COUNTS.values()), COUNTS
