"""The runs behind FastLibra's §2: its vLLM under loads that it does not quite bear, watched over time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from manylora.reproduce.cells import Cell, CellResult, run_cells
from manylora.reproduce.experiment import Setup
from manylora.reproduce.fastlibra_grid import FIRST_RATES, SIMULATION_NOTES, find_peaks

NUM_ADAPTERS = 100
OVERLOAD = 1.1
ADAPTER_SHARE = 0.2
"""§2.2."""
NOTES = (
    *SIMULATION_NOTES,
    "100 adapters, since the paper speaks of 75 that were asked for (§2.3.2); none was asked for before the "
    "start.",
    f"The paper names no rates. Its means are above the 500 ms with which it defines a peak, so the load here is "
    f"{OVERLOAD} x the peak of static-lru, found by bisection with adapters asked for once before (assumed).",
)


def watched_cells(setup: Setup, scenarios: Sequence[str]) -> dict[str, Cell]:
    """By scenario: ``static-lru`` on one card with the 7B model, as long as the paper's."""
    duration_s = setup.pick(1800.0, 150.0, 6.0)
    cells = {
        scenario: Cell(
            scenario, "static-lru", FIRST_RATES[scenario], NUM_ADAPTERS, duration_s, seed=setup.seed
        )
        for scenario in scenarios
    }
    peaks = find_peaks(setup, cells)
    return {
        scenario: dataclasses.replace(
            cell,
            rate=OVERLOAD * peaks[scenario],
            adapter_share=ADAPTER_SHARE,
            is_warm=False,
            sample_s=duration_s / 60,
        )
        for scenario, cell in cells.items()
    }


def watch(setup: Setup, cells: dict[str, Cell]) -> dict[str, CellResult]:
    """What came of them, by scenario."""
    results = run_cells(cells.values(), setup.num_workers, setup.show)
    return {scenario: results[cell] for scenario, cell in cells.items()}


def settings(setup: Setup, cells: dict[str, Cell]) -> dict[str, Any]:
    """All that a repetition needs."""
    return {
        "scale": setup.scale, "seed": setup.seed, "hardware": "fastlibra-npu",
        "cells": {scenario: dataclasses.asdict(cell) for scenario, cell in cells.items()},
    }  # fmt: skip
