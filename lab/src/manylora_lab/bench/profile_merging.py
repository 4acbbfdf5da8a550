"""What merging takes on this device, for a profile: an engine with ``--merge`` measures it before it serves.

Builds one engine for each place of the pristine copy, one after the other, and closes it. Does not know the
profile's other measurements.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from manylora.config.declaring import ConfigError
from manylora.config.sections import lora_sharding_of
from manylora.executor.build import build_worker
from manylora.executor.probing import RANK, Pretends
from manylora.executor.ranks.start import build_ranks
from manylora.flags import build_settings
from manylora.models.spec import ModelConfig
from manylora.protocol.commands import SetMerged
from manylora.types import BASE, AdapterId
from manylora_lab.bench.direct import DirectExecutor
from manylora_lab.bench.profile_rig import rounded
from manylora_lab.pricing.profile import ModePoint, SwitchPoint
from manylora_lab.pricing.shapes import ModelShape
from manylora_lab.sim.parallel import adapter_pages, held_shape

_ONE, _OTHER = -1, -2
"""Adapters that are none."""
_ROUNDS = 5


class Merging(NamedTuple):
    """See Profile."""

    switches: tuple[SwitchPoint, ...]
    modes: tuple[ModePoint, ...]


def measure_merging(
    engine: Mapping[str, Any],
    config: ModelConfig,
    shape: ModelShape,
    progress: Callable[[str, int, int], None],
) -> Merging:
    """Switches with the copy in either place, and steps with it on the device. ``engine``: settings by flag name.
    Raises ConfigError."""
    plain = build_settings(engine)[0]
    count = plain.tensor_parallel_size
    held = held_shape(shape, count)
    switches: list[SwitchPoint] = []
    modes: tuple[ModePoint, ...] = ()
    modules = {
        projection.module.rpartition(".")[2] for group in config.groups for projection in group.projections
    }
    places = ("device", "host")
    for done, copy in enumerate(places):
        progress("merging", done, len(places))
        asked: dict[str, Any] = {"merge": "manylora", "merge_copy": copy}
        build = build_worker if count == 1 else build_ranks
        worker, policy, _ = build(build_settings({**engine, **asked})[0])
        try:
            times = policy.merge.times
            if not times.steps:
                raise ConfigError("merging could not be measured: the log says why")
            change_s = _change_s(worker)
        except RuntimeError as error:
            raise ConfigError(f"merging could not be measured: {error}") from error
        finally:
            worker.close()
        for from_adapter, to_adapter, seconds in (
            (False, True, times.merge_s), (True, False, times.restore_s), (True, True, change_s),
        ):  # fmt: skip
            switches.append(
                SwitchPoint(from_adapter, to_adapter, copy == "host", held.layer_bytes, rounded(seconds))
            )
        if copy == "device":
            sharding = lora_sharding_of(plain.lora_sharding, count)
            num_pages = adapter_pages(shape, count, sharding, RANK, policy.page_tokens, modules)
            num_bytes = num_pages * policy.page_bytes
            modes = tuple(
                ModePoint(
                    step.num_rows, step.num_tokens, num_bytes,
                    rounded(step.unmerged_s), rounded(step.merged_s),
                )
                for step in times.steps
            )  # fmt: skip
    progress("merging", len(places), len(places))
    return Merging(tuple(switches), modes)


def _change_s(worker: Pretends) -> float:
    """Median seconds of a switch from one adapter straight to another, both pretended. Raises RuntimeError where
    it fails."""
    direct, numbers = DirectExecutor(worker), itertools.count(1)

    def switch(adapter: AdapterId) -> float:
        done = direct.set_merged(SetMerged(next(numbers), adapter))
        if not done.ok:
            raise RuntimeError(done.error)
        return done.switch_s

    try:
        if not all(worker.pretend_adapter(adapter, RANK) for adapter in (_ONE, _OTHER)):
            raise RuntimeError(f"the pool has no room for an adapter of rank {RANK}")
        switch(_ONE)
        return statistics.median([switch(to) for to in (_OTHER, _ONE) * _ROUNDS][2:])
    finally:
        switch(BASE)
        for adapter in (_ONE, _OTHER):
            direct.evict_adapter(adapter)
