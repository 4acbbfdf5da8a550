"""What merging takes on a simulated device: what an engine would have measured before serving, from its costs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from manylora.config.declaring import ConfigError
from manylora.config.merging import MergeConfig, MergeTimes, StepTimes
from manylora_lab.pricing.costs import StepCosts, StepWork, prefill_pairs
from manylora_lab.pricing.profile import Profile
from manylora_lab.sim.device import MergeCosts
from manylora_lab.sim.stated import StatedCosts

_MERGE, _RESTORE, _CHANGE = (False, True), (True, False), (True, True)
"""Switches, by whether they begin and end at an adapter."""

_KV_TOKENS = 512
"""Of each row, where a decoding step is priced; all modes have it in common."""


def measured_times(profile: Profile, *, on_host: bool) -> MergeTimes | None:
    """What the profile's engine measured before serving; None where the profile has it not for such a copy."""
    switches = {
        (point.from_adapter, point.to_adapter): point.seconds
        for point in profile.switches
        if point.on_host == on_host
    }
    if not profile.modes or not {_MERGE, _RESTORE, _CHANGE} <= switches.keys():
        return None
    steps = tuple(
        StepTimes(point.num_rows, point.num_tokens, point.seconds, point.merged_s) for point in profile.modes
    )
    return MergeTimes(on_host, switches[_MERGE], switches[_RESTORE], steps)


def measured_costs(profile: Profile, costs: StepCosts, *, on_host: bool) -> MergeCosts | None:
    """What the profile measured of merged steps beside what its ``costs`` say of steps with and without an
    adapter, so that a step with the measured adapter gains as measured; None where ``measured_times`` is."""
    times = measured_times(profile, on_host=on_host)
    if times is None:
        return None
    change_s = next(
        point.seconds
        for point in profile.switches
        if point.on_host == on_host and (point.from_adapter, point.to_adapter) == _CHANGE
    )
    points = {point.num_tokens: point for point in sorted(profile.modes, key=lambda point: -point.num_rows)}
    sizes, merged = sorted(points), []
    for size in sizes:
        point = points[size]
        priced = _step(costs, point.adapter_bytes, size, point.num_rows == size)
        merged.append(point.merged_s / point.seconds * priced.unmerged_s / priced.merged_s)
    return MergeCosts(change_s, tuple(sizes), tuple(merged))


DEVICE_SHARE = 0.15
"""Of the pool: where a copy of the base's own weights takes more, ``--merge-copy auto`` keeps it on the host."""


def beside_pristine(
    merge: MergeConfig, pool_bytes: int, weight_bytes: int, kind: Literal["cpu", "cuda"]
) -> tuple[int, MergeConfig]:
    """The pool that is left beside a copy of the base's own weights, so that modes are compared at equal memory,
    and where the copy lies. A CPU has it outside both pools, as an engine there does. Raises ConfigError."""
    if not merge.is_on:
        return pool_bytes, merge
    copy = merge.copy
    if copy == "auto":
        copy = "device" if kind == "cpu" or weight_bytes <= DEVICE_SHARE * pool_bytes else "host"
    placed = dataclasses.replace(merge, copy=copy)
    if copy == "host" or kind == "cpu":
        return pool_bytes, placed
    if weight_bytes >= pool_bytes:
        copy_gib, pool_gib = weight_bytes / 2**30, pool_bytes / 2**30
        raise ConfigError(
            f"--merge-copy device: a copy of the weights takes {copy_gib:.1f} GiB of a pool of {pool_gib:.1f} GiB"
        )
    return pool_bytes - weight_bytes, placed


def merge_times(
    costs: StepCosts,
    adapter_bytes: int,
    weight_bytes: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    *,
    on_host: bool,
) -> MergeTimes:
    """Of an adapter of so many bytes, on a model whose adaptable weights are ``weight_bytes``.

    A switch reads and writes them once, so it is taken for two steps of one row of the base, each of which reads
    all weights; pristine weights in host memory come back as one copy. Where costs are stated, so are switches,
    wherever the copy lies. Steps: decoding ones of 1, 2, 4, ... rows, then prompts of twice as many tokens, and so
    on.
    """
    if isinstance(costs, StatedCosts):
        pass_s = restore_s = costs.times.switch_s
    else:
        pass_s = 2 * costs.step_s(StepWork(1, 0, 1))
        restore_s = costs.copy_s(weight_bytes, True) if on_host else pass_s
    sizes = []
    num_tokens = 1
    while num_tokens <= max_batch_tokens:
        sizes.append(num_tokens)
        num_tokens *= 2
    steps = tuple(_step(costs, adapter_bytes, size, size <= max_num_seqs) for size in sizes)
    return MergeTimes(on_host, pass_s, restore_s, steps)


def _step(costs: StepCosts, adapter_bytes: int, num_tokens: int, is_decode: bool) -> StepTimes:
    decodes, prefill = (num_tokens, 0) if is_decode else (0, num_tokens)
    pairs = 0 if is_decode else prefill_pairs(0, num_tokens)
    kv_tokens = num_tokens * _KV_TOKENS if is_decode else num_tokens

    def seconds(num_bytes: int) -> float:
        adapters = (num_bytes, 1 if num_bytes else 0, pairs, num_tokens * num_bytes)
        return costs.step_s(StepWork(decodes, prefill, kv_tokens, *adapters))

    num_rows = num_tokens if is_decode else 1
    return StepTimes(num_rows, num_tokens, seconds(adapter_bytes), seconds(0))
