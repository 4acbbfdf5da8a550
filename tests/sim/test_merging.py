"""Merging in virtual time, on the shipped H200's costs: what it gains, and that it never loses."""

from __future__ import annotations

import dataclasses
import functools
import statistics

import pytest
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.sim.clairvoyant import Clairvoyant, Hindsight
from manylora_lab.sim.merging import beside_pristine, merge_times
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.shipped import find_profile
from manylora_lab.sim.summary import merging, summarize
from manylora_lab.workloads.named import named

from manylora.config.declaring import ConfigError
from manylora.config.merging import MergeConfig
from manylora.config.policy import PolicyConfig
from manylora.policy.merging.regret import RegretMerging
from manylora.policy.merging.times import StepSeconds

POOL_BYTES = 100 * 2**30


@functools.cache
def replayed(
    workload: str, rate: float, adapters: int, mode: str, minority: str = "unmerge", seed: int = 1
) -> tuple[Replay, Hindsight]:
    """Ten seconds, at equal memory: the copy of the base's weights is taken from the pool."""
    profile = find_profile("h200-llama-2-7b")
    shape, costs = profile.model, fit_profile(profile)
    stream = named(workload, rate=rate, num_adapters=adapters, duration_s=10, seed=seed)
    page_bytes = shape.page_bytes(16)
    pool_bytes, merge = beside_pristine(
        MergeConfig(mode, minority=minority), POOL_BYTES, shape.layer_bytes, "cuda"
    )
    pages = [shape.adapter_pages(rank, 16, profile.adapter_modules) for rank in stream.ranks]
    config = PolicyConfig(
        pool_bytes // page_bytes, 16, 4096, 32, 2048, 4000, page_bytes, pipeline_depth=2, merge=merge
    )
    if merge.is_on:
        adapter_bytes = statistics.median_low(pages) * page_bytes
        times = merge_times(costs, adapter_bytes, shape.layer_bytes, 32, 2048, on_host=merge.copy == "host")
        config = dataclasses.replace(config, merge=dataclasses.replace(merge, times=times))
    clairvoyant = Clairvoyant(config.merge)
    replay = Replay(stream, config, costs, pages, watch=lambda _now, command: clairvoyant.told(command))
    replay.run()
    return replay, clairvoyant.hindsight()


def gains(
    workload: str, rate: float, adapters: int, mode: str, minority: str = "unmerge", seed: int = 1
) -> tuple[float, float]:
    """Tokens a second and mean time to the first token, over those of unmerged."""
    plain = summarize(replayed(workload, rate, adapters, "unmerged", seed=seed)[0])
    found = summarize(replayed(workload, rate, adapters, mode, minority, seed)[0])
    return (
        found["output_tokens_per_s"] / plain["output_tokens_per_s"],
        found["ttft_mean_ms"] / plain["ttft_mean_ms"],
    )


TEXT = "prompt=128,output=200"
IDENTICAL = (f"synthetic:popularity=identical,{TEXT}", 60, 8)


@pytest.mark.usefixtures("remembered_fits")
@pytest.mark.parametrize("mode", ["merged", "dlora", "manylora"])
def test_one_adapter_alone_gains(mode: str) -> None:
    tokens, first_token = gains(*IDENTICAL, mode)
    assert tokens >= 1.05
    assert first_token <= 1.0
    found = merging(replayed(*IDENTICAL, mode)[0])
    assert found is not None
    assert found["switches_merged"] <= 8, "as many as adapters were warmed up"
    assert found["steps_merged"] > 0.9


LOADS = {
    "identical": IDENTICAL,
    "distinct": (f"synthetic:popularity=round-robin,{TEXT}", 30, 600),
    "uniform": (f"synthetic:popularity=uniform,{TEXT}", 20, 8),
    "skewed": (f"synthetic:popularity=geometric(1.5),{TEXT}", 20, 8),
    "zipf(1)": (f"synthetic:popularity=zipf(1),{TEXT}", 20, 50),
    "zipf(4)": (f"synthetic:popularity=zipf(4),{TEXT}", 10, 8),
    "zipf(2.5)": (f"synthetic:popularity=zipf(2.5),{TEXT}", 3, 8),
    "chat": ("chatbot", 10, 100),
}
"""Of each kind one, of zipf's also two at which adapters are alone now and then."""
HELD_BACK = ("identical", "zipf(4)", "zipf(2.5)")
"""Where the account of first tokens keeps ``unmerge`` from merging as soon as the bound, three times and two
switches ask."""
SEEDS = (11, 12, 13, 14, 15)
"""On which nothing was tuned."""
CASES = [
    pytest.param(seed, load, marks=[] if seed == SEEDS[0] else [pytest.mark.long])
    for seed in SEEDS
    for load in LOADS
]


@pytest.mark.usefixtures("remembered_fits")
@pytest.mark.parametrize(("seed", "load"), CASES)
def test_it_never_loses(load: str, seed: int) -> None:
    tokens, first_token = gains(*LOADS[load], "manylora", "unmerge", seed)
    assert tokens >= (1.05 if load == "identical" else 0.99)
    assert first_token <= 1.01
    replay, found = replayed(*LOADS[load], "manylora", "unmerge", seed)
    counters = replay.report().counters
    assert found.num_steps == counters.steps_unmerged + counters.steps_merged
    assert found.clairvoyant_s <= found.taken_s + 1e-9
    if load not in HELD_BACK:
        assert found.beyond_s <= 0, found.report()


@pytest.mark.usefixtures("remembered_fits")
def test_without_the_account_of_first_tokens_they_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of two switches is kept then, and "never worse" is not: why one goes before the other."""
    made = RegretMerging.__init__

    def endless(self: RegretMerging, config: PolicyConfig, times: StepSeconds) -> None:
        made(self, config, times)
        self.first_tokens_s = float("inf")

    load, seed = LOADS["zipf(2.5)"], SEEDS[0]
    plain = summarize(replayed(*load, "unmerged", seed=seed)[0])
    monkeypatch.setattr(RegretMerging, "__init__", endless)
    replay, found = replayed.__wrapped__(*load, "manylora", "unmerge", seed)
    assert found.beyond_s <= 0
    assert summarize(replay)["ttft_mean_ms"] > 1.01 * plain["ttft_mean_ms"]


def test_where_the_copy_lies() -> None:
    merge = MergeConfig("merged")
    assert beside_pristine(merge, 1000, 100, "cuda") == (900, dataclasses.replace(merge, copy="device"))
    assert beside_pristine(merge, 1000, 200, "cuda") == (1000, dataclasses.replace(merge, copy="host"))
    assert beside_pristine(merge, 100, 200, "cpu") == (100, dataclasses.replace(merge, copy="device"))
    assert beside_pristine(MergeConfig(), 1000, 100, "cuda") == (1000, MergeConfig())
    with pytest.raises(ConfigError, match="--merge-copy device: a copy of the weights takes"):
        beside_pristine(MergeConfig("merged", copy="device"), 200, 200, "cuda")
