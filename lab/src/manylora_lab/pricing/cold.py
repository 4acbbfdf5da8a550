"""What CPU workers take, fitted to a profile.

Owns the line through products on the CPU: a fixed part, one for each byte of the adapter, and one for each byte
and token of a worker's slice; and the lines of what awaited copies cost their steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manylora.config.cold_start import SLICE_SHARE
from manylora_lab.pricing.fit import FitError, nonnegative_least_squares, relative_fit
from manylora_lab.pricing.profile import CpuPoint, Profile


@dataclasses.dataclass(frozen=True, slots=True)
class CpuRates:
    """What the CPU takes for the LoRA of a step's cold rows, of one worker. A step costs ``step_s`` for its
    hand-overs; each adapter that a worker reads ``byte_s`` a byte, and each token of it ``token_byte_s`` for each
    byte of its adapter. ``slice_tokens``: as many tokens as one worker takes before another one helps."""

    step_s: float = 0.002
    byte_s: float = 2e-10
    token_byte_s: float = 1e-11
    slice_tokens: int = 16

    def busy_s(self, num_tokens: int, adapter_bytes: int, num_workers: int) -> float:
        """How long the busiest worker computes for the tokens of one adapter (CaraServe §4.2)."""
        num_busy = max(1, min(num_workers, -(-num_tokens // self.slice_tokens)))
        return adapter_bytes * (self.byte_s + -(-num_tokens // num_busy) * self.token_byte_s)


class CpuLine(NamedTuple):
    """Seconds of one product: of any, a byte of the adapter, and a byte and token of a slice; its errors."""

    fixed_s: float
    byte_s: float
    token_byte_s: float
    seen: FitError
    held_out: FitError


def fit_cpu(points: Sequence[CpuPoint]) -> CpuLine:
    """The line with the least relative error over the points that are not held out."""
    seen = [point for point in points if not point.is_held_out]
    held_out = [point for point in points if point.is_held_out]
    fixed_s, byte_s, token_byte_s = relative_fit(list(map(_features, seen)), [p.seconds for p in seen])
    line = np.array([fixed_s, byte_s, token_byte_s])
    return CpuLine(fixed_s, byte_s, token_byte_s, _error(line, seen), _error(line, held_out))


def cpu_rates(profile: Profile) -> CpuRates | None:
    """None where the profile has them not."""
    if not profile.cpu_products:
        return None
    line = fit_cpu(profile.cpu_products)
    one_s = line.fixed_s + profile.handover_s
    # Of adapters as large as the median one.
    size = float(np.median([point.adapter_bytes for point in profile.cpu_products]))
    token_s = max(line.token_byte_s * size, 1e-12)
    slice_tokens = max(1, int(SLICE_SHARE * (one_s + line.byte_s * size) / token_s))
    return CpuRates(profile.num_products * one_s, line.byte_s, line.token_byte_s, slice_tokens)


class GateLines(NamedTuple):
    """Seconds, and seconds a byte, that an awaited copy takes before its step and of it."""

    issue: tuple[float, float] = (0.0, 0.0)
    step: tuple[float, float] = (0.0, 0.0)


NO_GATES = GateLines()


def gate_lines(profile: Profile) -> GateLines:
    """Zeros where the profile has them not."""
    points = profile.gates
    if not points:
        return NO_GATES
    sizes = np.array([(1.0, point.num_bytes) for point in points])

    def line(seconds: list[float]) -> tuple[float, float]:
        base_s, byte_s = nonnegative_least_squares(sizes, np.array(seconds)).tolist()
        return float(f"{base_s:.4g}"), float(f"{byte_s:.4g}")

    return GateLines(line([point.issue_s for point in points]), line([point.seconds for point in points]))


def _features(point: CpuPoint) -> tuple[float, float, float]:
    share = -(-point.num_tokens // point.num_workers)
    return 1.0, float(point.adapter_bytes), float(share * point.adapter_bytes)


def _error(line: np.ndarray, points: Sequence[CpuPoint]) -> FitError:
    found = np.array([_features(point) for point in points]) @ line
    errors = np.abs(found / np.array([point.seconds for point in points]) - 1)
    return FitError(float(errors.mean()), float(errors.max()), len(points))
