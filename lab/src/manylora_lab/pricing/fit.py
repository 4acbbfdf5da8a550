"""Costs fitted to a profile: a step takes the largest of a few planes over its numbers, none with a falling slope.

One plane for each thing that may bound a step: launches, memory, arithmetic; within one, the first rows and tokens
may weigh more than the rest. How many planes there are, one to three, is decided by the steps that the fit did not
see, so the held-out error is of the best of three. The planes' form is that of typical steps, their level that of
the mean: an engine's steps are now and then late, by much, and by chance. Copies, reads and the engine's own time
are lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from manylora.config.declaring import ConfigError
from manylora_lab.pricing.costs import Spread, StepWork
from manylora_lab.pricing.profile import OverheadPoint, Profile, StepPoint

Array = NDArray[np.float64]

FEATURES = (
    "a step", "with prefill", "with adapters", "num_decodes", "first decodes", "num_prefill_tokens",
    "first prefill tokens", "num_kv_tokens", "adapter_bytes", "num_adapters", "num_prefill_pairs",
    "adapter_token_bytes",
)  # fmt: skip
"""What a plane has a coefficient for, in seconds each."""

FIRST_DECODES, FIRST_TOKENS = 16, 64
"""The first rows and the first tokens of a batch may cost more than those after, which use a device better."""

_MOST_PLANES = 3
_WORTH, _LEAST_WORTH = 0.9, 1e-3
"""Another plane must bring the held-out error down to this share, and by so much."""
_ROUNDS = 40
_POLISHES = 5
_LEAST_SHARE = 0.1
_LEAST_ERROR = 1e-6
_SURE_STEPS = 10
_FAR = 2.0
"""Times the median error: a step further off counts by its error, not by the square (Huber 1964)."""
_STALL = 4.0
"""Times what is fitted: a stall, not what a step takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class FitError:
    """|fitted / measured - 1| over some points."""

    mean: float
    largest: float
    num_points: int


@dataclasses.dataclass(frozen=True, slots=True)
class FittedCosts:
    """``StepCosts`` from measurements. ``planes``: coefficients in the order of FEATURES; lines: (seconds,
    seconds a byte). ``overhead``: seconds, seconds a row, seconds if any sequence is new. ``seen`` and
    ``held_out``: the steps' errors."""

    planes: tuple[tuple[float, ...], ...]
    copy_in: tuple[float, float]
    copy_out: tuple[float, float]
    read_in: tuple[float, float]
    read_out: tuple[float, float]
    overhead: tuple[float, float, float]
    wake_s: float
    answer_s: float
    copy_drag: float
    spread: Spread
    reads_at_once: int
    seen: FitError
    held_out: FitError

    def on_cards(self, cards: int) -> FittedCosts:
        """The same device ``cards`` times, split ideally: a step takes that much less, launches included, and
        bytes cross that many links. Reads and the engine's own time stay. Raises ConfigError."""
        if cards < 1:
            raise ConfigError(f"cards must be at least 1, got {cards}")
        return dataclasses.replace(
            self,
            planes=tuple(tuple(seconds / cards for seconds in plane) for plane in self.planes),
            copy_in=(self.copy_in[0], self.copy_in[1] / cards),
            copy_out=(self.copy_out[0], self.copy_out[1] / cards),
        )

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        decodes, prefill_tokens, kv_tokens, adapter_bytes, num_adapters, pairs, token_bytes = work
        longest = 0.0
        first_decodes = decodes if decodes < FIRST_DECODES else FIRST_DECODES
        first_tokens = prefill_tokens if prefill_tokens < FIRST_TOKENS else FIRST_TOKENS
        for plane in self.planes:
            step, prefill, lora, row, first_row, token, first_token, kv, byte, adapter, pair, token_byte = (
                plane
            )
            seconds = step + decodes * row + first_decodes * first_row + kv_tokens * kv
            if prefill_tokens:
                seconds += prefill + prefill_tokens * token + first_tokens * first_token
                seconds += pairs * pair
            if adapter_bytes:
                seconds += lora + adapter_bytes * byte + num_adapters * adapter + token_bytes * token_byte
            if seconds > longest:
                longest = seconds
        return longest

    def overhead_s(self, num_rows: int, num_new: int, /) -> float:
        """See StepCosts."""
        base_s, row_s, new_s = self.overhead
        return base_s + num_rows * row_s + (new_s if num_new else 0.0)

    def copy_s(self, num_bytes: int, to_device: bool = True, /) -> float:
        """See StepCosts."""
        base_s, byte_s = self.copy_in if to_device else self.copy_out
        return base_s + num_bytes * byte_s

    def read_s(self, num_bytes: int, to_device: bool = False, /) -> float:
        """See StepCosts."""
        base_s, byte_s = self.read_in if to_device else self.read_out
        return base_s + num_bytes * byte_s


def fit_profile(profile: Profile) -> FittedCosts:
    """Costs with the least relative errors, to four digits: equal on every machine, whatever its linear algebra
    does in the last bits."""
    seen = [point for point in profile.steps if not point.is_held_out]
    held_out = [point for point in profile.steps if point.is_held_out]
    planes = _four_digits(_levelled(_best_planes(seen, held_out), seen))
    return FittedCosts(
        planes=tuple(tuple(plane) for plane in planes.tolist()),
        copy_in=_line([(p.num_bytes, p.seconds) for p in profile.copies if p.to_device]),
        copy_out=_line([(p.num_bytes, p.seconds) for p in profile.copies if not p.to_device]),
        read_in=_line([(p.num_bytes, p.seconds) for p in profile.reads if p.to_device]),
        read_out=_line([(p.num_bytes, p.seconds) for p in profile.reads if not p.to_device]),
        overhead=_overhead(profile.overheads),
        wake_s=_wake_s(planes, profile.wakes),
        answer_s=profile.answer_s,
        copy_drag=profile.copy_drag,
        spread=profile.spread,
        reads_at_once=profile.reads_at_once,
        seen=_error(planes, seen),
        held_out=_error(planes, held_out),
    )


def fit_exchanges(profile: Profile) -> tuple[float, float]:
    """Seconds of a sum over all ranks, and of a byte that each puts in; zeros where the profile has it not."""
    if not profile.exchanges:
        return 0.0, 0.0
    return _line([(point.num_bytes, point.seconds) for point in profile.exchanges])


def _best_planes(seen: Sequence[StepPoint], held_out: Sequence[StepPoint]) -> Array:
    best, best_error = None, float("inf")
    for count in range(1, _MOST_PLANES + 1):
        planes = fit_planes(_features(seen), _seconds(seen), count, _weights(seen))
        error = _error(planes, held_out).mean
        if error < min(_WORTH * best_error, best_error - _LEAST_WORTH):
            best, best_error = planes, error
    if best is None:
        raise ConfigError("no plane fits the profile's steps")
    return best


def _levelled(planes: Array, points: Sequence[StepPoint]) -> Array:
    """So much higher or lower that all steps together take what they took."""
    fitted, seconds = (_features(points) @ planes.T).max(axis=1), _seconds(points)
    num_steps = np.array([point.num_steps for point in points])
    counted = num_steps * (seconds <= _STALL * fitted)
    return np.asarray(planes * (counted @ seconds) / (counted @ fitted))


def _wake_s(planes: Array, points: Sequence[StepPoint]) -> float:
    """The median of what these steps took besides, to four digits: a kernel's first use, or an error of the fit in
    a step of thousands of tokens, is many times as much."""
    if not points:
        return 0.0
    besides = _seconds(points) - (_features(points) @ planes.T).max(axis=1)
    each = np.repeat(besides, [point.num_steps for point in points])
    return max(0.0, float(f"{np.median(each):.4g}"))


def _features(points: Sequence[StepPoint]) -> Array:
    """[points, FEATURES]."""
    return np.array(
        [
            (
                1, p.num_prefill_tokens > 0, p.adapter_bytes > 0, p.num_decodes,
                min(p.num_decodes, FIRST_DECODES), p.num_prefill_tokens,
                min(p.num_prefill_tokens, FIRST_TOKENS), p.num_kv_tokens, p.adapter_bytes, p.num_adapters,
                p.num_prefill_pairs, p.adapter_token_bytes,
            )
            for p in points
        ],
        dtype=np.float64,
    )  # fmt: skip


def _seconds(points: Sequence[StepPoint]) -> Array:
    return np.array([point.seconds for point in points])


def _weights(points: Sequence[StepPoint]) -> Array:
    """A mean is the surer, the more steps it is of; that soon ceases to matter beside what no plane has."""
    return np.array([min(point.num_steps, _SURE_STEPS) for point in points], dtype=np.float64)


def _error(planes: Array, points: Sequence[StepPoint]) -> FitError:
    errors = np.abs((_features(points) @ planes.T).max(axis=1) / _seconds(points) - 1)
    return FitError(float(np.average(errors, weights=_weights(points))), float(errors.max()), len(points))


def fit_planes(features: Array, seconds: Array, count: int, weights: Array | None = None) -> Array:
    """``count`` planes [count, features], coefficients from 0, whose largest comes nearest to ``seconds``.

    ``weights``: of the points' squared errors. Alternates between giving each point to its largest plane and
    fitting each plane to its points, from several first divisions of the points: by their seconds and by each
    feature. The best is polished.
    """
    roots = np.sqrt(np.ones(len(seconds)) if weights is None else weights)
    scale = roots / seconds
    # Divisions by the features that tell points apart, and by the time itself.
    keys = [seconds, *(column for column in features.T if len(np.unique(column)) > count)]
    best, best_loss = np.zeros((count, features.shape[1])), float("inf")
    for key in keys[:1] if count == 1 else keys:
        owner = np.argsort(np.argsort(key, kind="stable"), kind="stable") * count // len(key)
        for planes in _alternate(features * scale[:, None], seconds * scale, owner, count):
            loss = float(((((features @ planes.T).max(axis=1) - seconds) * scale) ** 2).sum())
            if loss < best_loss:
                best, best_loss = planes, loss
    return _polished(features, seconds, roots, best)


def _polished(features: Array, seconds: Array, roots: Array, planes: Array) -> Array:
    """The planes refitted a few times, with errors relative to what was fitted, not measured: else points that
    happened to be short would count for more than those that were long. Points far off count for less. Of all
    rounds the one with the least error; its measure, the logarithm, favours neither the short nor the long."""
    best, best_loss = planes, float("inf")
    for _ in range(_POLISHES + 1):
        values = features @ planes.T
        fitted = np.maximum(values.max(axis=1), _LEAST_SHARE * seconds)
        loss = float((roots**2) @ np.abs(np.log(seconds / fitted)))
        if loss < best_loss:
            best, best_loss = planes, loss
        errors = np.abs(seconds / fitted - 1)
        far = max(_FAR * float(np.median(errors)), _LEAST_ERROR)
        trust = np.where(seconds > _STALL * fitted, 0.0, far / np.maximum(errors, far))
        scale = roots * np.sqrt(trust) / fitted
        planes = _refitted(features * scale[:, None], seconds * scale, values.argmax(axis=1), planes)
    return best


def _alternate(features: Array, targets: Array, owner: NDArray[np.int64], count: int) -> list[Array]:
    """The planes after every round, until the division stands still."""
    rounds = []
    planes = np.zeros((count, features.shape[1]))
    for _ in range(_ROUNDS):
        planes = _refitted(features, targets, owner, planes)
        rounds.append(planes)
        largest = (features @ planes.T).argmax(axis=1)
        if np.array_equal(largest, owner):
            break
        owner = largest
    return rounds


def _refitted(features: Array, targets: Array, owner: NDArray[np.int64], planes: Array) -> Array:
    """Each plane fitted to the points that it owns; one that owns none stays."""
    planes = planes.copy()
    for plane in range(len(planes)):
        own = owner == plane
        if own.any():
            planes[plane] = nonnegative_least_squares(features[own], targets[own])
    return planes


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds, seconds for each unit), from 0, with the least relative error."""
    base_s, unit_s = relative_fit([(1, units) for units, _ in points], [seconds for _, seconds in points])
    return base_s, unit_s


def _overhead(points: Sequence[OverheadPoint]) -> tuple[float, float, float]:
    """(seconds, seconds a row, seconds if a sequence is new: more of them hardly take more); older profiles do not
    tell these apart."""
    base_s, row_s, new_s = relative_fit(
        [(1, point.num_rows, point.num_new > 0) for point in points], [point.seconds for point in points]
    )
    return base_s, row_s, new_s


def relative_fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients from 0 with the least relative error, to four digits."""
    features = np.array(rows, dtype=np.float64) / np.array(seconds)[:, None]
    found: list[float] = _four_digits(nonnegative_least_squares(features, np.ones(len(rows)))).tolist()
    return found


def _four_digits(values: Array) -> Array:
    return np.array([float(f"{value:.4g}") for value in values.flat]).reshape(values.shape)


def nonnegative_least_squares(features: Array, targets: Array) -> Array:
    """The x >= 0 that minimises |features @ x - targets|, by Lawson and Hanson's active sets (1974)."""
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale
    size = features.shape[1]
    x = np.zeros(size)
    active = np.zeros(size, dtype=bool)
    for _ in range(3 * size):
        gradient = scaled.T @ (targets - scaled @ x)
        gradient[active] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= 1e-10 * len(targets):
            break
        active[entering] = True
        while True:
            solved = np.zeros(size)
            solved[active] = np.linalg.lstsq(scaled[:, active], targets, rcond=None)[0]
            bad = active & (solved <= 0)
            if not bad.any():
                break
            # As far towards the solution as no coefficient falls below 0; those at 0 leave.
            step = float((x[bad] / (x[bad] - solved[bad])).min())
            x = x + step * (solved - x)
            active &= x > 1e-12
            x[~active] = 0.0
        x = solved
    return np.asarray(x / scale)
