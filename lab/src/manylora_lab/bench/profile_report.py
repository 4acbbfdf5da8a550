"""A profile for people: how far it is, and what its costs come to."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from tqdm import tqdm

from manylora_lab.bench.profile_cold import describe_cold
from manylora_lab.pricing.caraserve import caraserve_settings, slo_of
from manylora_lab.pricing.fit import FittedCosts, fit_exchanges
from manylora_lab.pricing.profile import Profile


class ProgressBars:
    """A bar on stderr for each part; silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None or what != self._what:
            self._what = what
            self._bar = tqdm(total=total, desc=what, file=sys.stderr, disable=None, leave=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()


def describe(profile: Profile, costs: FittedCosts) -> str:
    """How many points there are and how far the fitted costs are from them."""

    def error(of: Any) -> str:
        return f"mean {100 * of.mean:.1f} %, largest {100 * of.largest:.1f} %, {of.num_points} batches"

    def rate(line: tuple[float, float]) -> str:
        per_s = f"{1e-9 / line[1]:.3g} GB/s" if line[1] else "any rate"
        return f"{1e6 * line[0]:.0f} us + {per_s}"

    most_rows = max(point.num_rows for point in profile.overheads)
    return "\n".join(
        (
            f"model         {profile.model}, {profile.dtype}",
            f"machine       {profile.machine}, pipeline_depth {profile.steps_in_flight}",
            f"fit           {len(costs.planes)} planes",
            f"  error       {error(costs.seen)}",
            f"  held out    {error(costs.held_out)}",
            f"to device     {rate(costs.copy_in)}",
            f"to host       {rate(costs.copy_out)}",
            f"reads         {rate(costs.read_out)} to the host, {rate(costs.read_in)} to the device",
            f"between steps {1e6 * costs.overhead_s(1, 0):.0f} us with 1 row, "
            f"{1e6 * costs.overhead_s(most_rows, 0):.0f} us with {most_rows}, "
            f"{1e6 * costs.overhead[2]:.0f} us more with new ones",
            f"copies        told {1e6 * statistics.fmean(costs.spread.landings or (0.0,)):.0f} us later than when "
            f"idle; a second of them takes {costs.copy_drag:.2f} s of the steps beside them",
            f"answers       {1e6 * costs.answer_s:.0f} us after their step",
            f"after idling  {1e3 * costs.wake_s:.2f} ms more",
            *_ranks(profile),
            *_caraserve(profile, costs),
            *_exchanged(profile),
            *describe_cold(profile),
        )
    )


def _exchanged(profile: Profile) -> list[str]:
    """What several ranks add up, and how well that fits."""
    if not profile.exchanges:
        return []
    base_s, byte_s = fit_exchanges(profile)
    errors = [abs((base_s + p.num_bytes * byte_s) / p.seconds - 1) for p in profile.exchanges]
    return [
        f"exchanges     of {profile.tensor_parallel_size} ranks, adapters {profile.lora_sharding}: a sum takes "
        f"{1e6 * base_s:.1f} us + {1e-9 / max(byte_s, 1e-15):.3g} GB/s; error: mean "
        f"{100 * statistics.fmean(errors):.0f} %, largest {100 * max(errors):.0f} %, {len(errors)} sizes"
    ]


def _caraserve(profile: Profile, costs: FittedCosts) -> list[str]:
    """What to type for --router caraserve on this device, with an objective of 1.5 merged steps."""
    if profile.ranks is None:
        return []
    lines = []
    for kernel in ("bgmv", "mbgmv"):
        given = [("kernel", kernel)]
        pairs = given + caraserve_settings("caraserve", given, profile, slo_of("1.5x", costs))
        options = " ".join(f"--router-set caraserve.{key}={value}" for key, value in pairs)
        lines.append(f"{kernel:<13} --router caraserve {options}")
    return lines


def _ranks(profile: Profile) -> list[str]:
    """The lines over ranks, with how well they fit."""
    if profile.ranks is None:
        return ["by ranks      not enough different steps"]
    named = (
        ("rows times the largest rank", profile.ranks.bgmv), ("the sum of ranks", profile.ranks.mbgmv),
        ("tokens of prefills", profile.ranks.prefill),
    )  # fmt: skip
    return [
        f"by {what}: {1e3 * line.base_s:.2f} ms + {1e6 * line.slope_s:.3f} us each, R2 {line.r2:.2f} of "
        f"{line.num_points} kinds"
        for what, line in named
    ]
