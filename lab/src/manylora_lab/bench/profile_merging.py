"""What merging takes on this device, for a profile: an engine with ``--merge`` measures it before it serves.

Builds one engine for each place of the pristine copy, one after the other, and closes it. Does not know the
profile's other measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from manylora.config import ConfigError, lora_sharding_of
from manylora.executor.build import build_worker
from manylora.executor.merge_times import RANK, measure_change
from manylora.executor.ranks.start import build_ranks
from manylora.flags import build_settings
from manylora.models.spec import ModelConfig
from manylora_lab.bench.profile_rig import rounded
from manylora_lab.pricing.profile import ModePoint, SwitchPoint
from manylora_lab.pricing.shapes import ModelShape
from manylora_lab.sim.parallel import adapter_pages, held_shape


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
            change_s = measure_change(worker, policy, None)
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
