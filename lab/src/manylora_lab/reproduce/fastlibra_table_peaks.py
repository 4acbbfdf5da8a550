"""Peak rates by bisection, from what a store of cells has and with few further runs (FastLibra §6.1).

Owns the search; every run that it makes goes into the store, and is found there by the next search.
"""

from __future__ import annotations

import dataclasses
import gc
import time

from manylora_lab.reproduce.cells import Cell, CellResult, run_cell
from manylora_lab.reproduce.fastlibra_table_store import CellStore

LIMIT_MS = 500.0
"""§6.1: of the mean TTFT."""
RECORDED = ("manylora",)
"""Policies whose runs are recorded, for the most that any policy could have kept of what they were asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """``tolerance``: of a peak, as a share of itself; ``stride``: the first step from a guess, as a factor;
    ``highest``: requests a second beyond which the search does not go."""

    tolerance: float
    stride: float
    highest: float


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """``per_s``: the highest rate that was borne, below which none was missed; ``missed_per_s``: the lowest that
    was not, None where the search ended before."""

    per_s: float
    missed_per_s: float | None


def peak(cell: Cell, store: CellStore, search: Search) -> Peak:
    """Of the cell, whatever its rate, which is a guess: strides that double from there, then bisection."""
    bracket = _bracket(cell, store)
    while (rate := next_rate(cell.rate, bracket, search)) is not None:
        run_into(store, dataclasses.replace(cell, rate=rate), LIMIT_MS)
        bracket = _bracket(cell, store)
    return bracket


def known_peak(cell: Cell, store: CellStore, search: Search) -> Peak | None:
    """The same from the store alone; None where it does not tell."""
    bracket = _bracket(cell, store)
    return bracket if next_rate(cell.rate, bracket, search) is None else None


def run_into(store: CellStore, cell: Cell, most_ttft_ms: float | None = None) -> CellResult:
    """Simulate and remember."""
    began = time.process_time()
    # A run leaves next to no cycles, and looking for them takes a fifth of its time.
    gc.disable()
    try:
        result = run_cell(cell, most_ttft_ms, with_limits=cell.policy in RECORDED)
    finally:
        gc.enable()
        gc.collect()
    store.add(cell, result, time.process_time() - began, most_ttft_ms)
    return result


def rounded(rate: float) -> float:
    """The rate to four digits, so that a rate reads the same everywhere."""
    return float(f"{rate:.4g}")


def _bracket(cell: Cell, store: CellStore) -> Peak:
    known = store.borne(cell, LIMIT_MS)
    missed = min((rate for rate, is_borne in known.items() if not is_borne), default=None)
    below = (rate for rate, is_borne in known.items() if is_borne and (missed is None or rate < missed))
    return Peak(max(below, default=0.0), missed)


def next_rate(guess: float, bracket: Peak, search: Search) -> float | None:
    """The rate to try next, None when the peak is known."""
    low, high = bracket.per_s, bracket.missed_per_s
    if high is None:
        if low >= search.highest:
            return None
        return rounded(low + _stride(low, guess, search) if low else guess)
    if high - low <= search.tolerance * high or (low == 0 and high < guess / 100):
        return None
    if low == 0:
        return rounded(max(high - _stride(high, guess, search), high / 2))
    middle = rounded((low + high) / 2)
    return middle if low < middle < high else None


def _stride(rate: float, guess: float, search: Search) -> float:
    """How far the next rate lies from this one: as far as this one from the guess, at least the first step."""
    return max((search.stride - 1) * guess, abs(rate - guess))
