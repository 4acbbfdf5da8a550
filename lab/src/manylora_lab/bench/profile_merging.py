"""What merging takes on this device, for a profile: an engine with ``--merge`` measures it before it serves.

Builds one engine for each place of the pristine copy, one after the other, and closes it. Does not know the
profile's other measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from manylora.config import ConfigError
from manylora.executor.build import build_worker
from manylora.executor.merge_times import RANK, measure_change
from manylora.flags import build_settings
from manylora.models.config import ModelConfig
from manylora.pricing.profile import ModePoint, SwitchPoint
from manylora.pricing.shapes import ModelShape
from manylora_lab.bench.profile_rig import rounded


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
    switches: list[SwitchPoint] = []
    modes: tuple[ModePoint, ...] = ()
    modules = {
        projection.module.rpartition(".")[2] for group in config.groups for projection in group.projections
    }
    places = ("device", "host")
    for done, copy in enumerate(places):
        progress("merging", done, len(places))
        asked = {
            "merge": "manylora", "merge_minority": "mixed", "merge_mixed_16bit": True, "merge_copy": copy,
        }  # fmt: skip
        worker, policy, _ = build_worker(build_settings({**engine, **asked})[0])
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
                SwitchPoint(from_adapter, to_adapter, copy == "host", shape.layer_bytes, rounded(seconds))
            )
        if copy == "device":
            num_bytes = shape.adapter_pages(RANK, policy.page_tokens, modules) * policy.page_bytes
            modes = tuple(
                ModePoint(
                    step.num_rows, step.num_tokens, num_bytes,
                    rounded(step.unmerged_s), rounded(step.merged_s), rounded(step.mixed_s),
                )
                for step in times.steps
            )  # fmt: skip
    progress("merging", len(places), len(places))
    return Merging(tuple(switches), modes)
