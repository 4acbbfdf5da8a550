"""Decode steps by the ranks of their adapters: CaraServe's two lines (§5, its figure 9), and one for prefills.

A kernel that pads every row to the batch's largest rank (bgmv) takes a line over rows times that rank; one that
does not pad (mbgmv) a line over the sum of ranks. Ranks count once a row, whether rows share an adapter or not.
These are what CaraServe's router goes by; the simulator's costs are ``pricing.fit``'s.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from manylora.config.declaring import ConfigError


class RankedStep(NamedTuple):
    """One decode step of which some rows have adapters: ``rank_padded`` is its rows times the largest rank."""

    rank_sum: int
    rank_padded: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class RankLine:
    """``slope_s`` for each unit and ``base_s`` besides; ``r2``: the share of the variance that the line has."""

    slope_s: float
    base_s: float
    r2: float
    num_points: int

    def __post_init__(self) -> None:
        if not (0 <= self.slope_s < float("inf") and 0 <= self.base_s < float("inf") and self.r2 <= 1):
            raise ConfigError(f"no line has slope_s {self.slope_s}, base_s {self.base_s} and r2 {self.r2}")


@dataclasses.dataclass(frozen=True, slots=True)
class RankLines:
    """Decode steps by both of the paper's kernels' measures, and prefills by their tokens."""

    bgmv: RankLine
    mbgmv: RankLine
    prefill: RankLine


def fit_rank_lines(decodes: Sequence[RankedStep], prefills: Sequence[tuple[int, float]]) -> RankLines | None:
    """Lines over the means of steps that are alike; None where there are not two kinds of each.

    ``prefills``: tokens and seconds of steps without decodes.
    """
    alike: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
    for step in decodes:
        alike[step.rank_sum, step.rank_padded].append(step.seconds)
    means = [(*ranks, statistics.fmean(seconds)) for ranks, seconds in sorted(alike.items())]
    bgmv = rank_line([(padded, seconds) for _, padded, seconds in means])
    mbgmv = rank_line([(total, seconds) for total, _, seconds in means])
    prefill = rank_line(sorted(prefills))
    return RankLines(bgmv, mbgmv, prefill) if bgmv and mbgmv and prefill else None


def rank_line(points: Sequence[tuple[int, float]]) -> RankLine | None:
    """Through units and seconds by least squares, to four digits, with neither a falling slope nor a negative
    base; None where all units are the same."""
    units, seconds = [unit for unit, _ in points], [each for _, each in points]
    if len(set(units)) < 2:
        return None
    slope_s, base_s = statistics.linear_regression(units, seconds)
    if slope_s < 0:
        slope_s, base_s = 0.0, statistics.fmean(seconds)
    elif base_s < 0:
        slope_s, base_s = statistics.linear_regression(units, seconds, proportional=True).slope, 0.0
    slope_s, base_s = float(f"{slope_s:.4g}"), float(f"{base_s:.4g}")
    mean_s = statistics.fmean(seconds)
    around = sum((each - mean_s) ** 2 for each in seconds)
    missed = sum((each - slope_s * unit - base_s) ** 2 for unit, each in points)
    return RankLine(slope_s, base_s, round(1 - missed / around, 4) if around else 1.0, len(points))
