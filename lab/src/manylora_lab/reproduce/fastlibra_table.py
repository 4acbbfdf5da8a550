"""FastLibra's evaluation in one table: its policies, ours and limits, in all cases of §6.3 and §6.9.

The peaks of ``fastlibra-pages`` are found first and written down; then every policy runs at the same shares of
them. What is finished lies in a store, so that a run that was stopped goes on, and a part of the table can be
read before.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

from manylora.config.declaring import ConfigError
from manylora_lab.reproduce.cells import Cell, in_parallel
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.fastlibra_table_cases import COMPARED, HARDWARE, RatesFile, Table, table
from manylora_lab.reproduce.fastlibra_table_peaks import Peak, Search, peak, rounded, run_into
from manylora_lab.reproduce.fastlibra_table_report import grid_result, headline
from manylora_lab.reproduce.fastlibra_table_store import CellStore
from manylora_lab.reproduce.fastlibra_table_text import draw

GUESSED_BY = 6
"""A peak is guessed with runs so much shorter, where runs are long."""
_LONG_S = 600.0


def run(setup: Setup) -> GridResult:
    """Run what the store does not have, and report all that it has. Without ``setup.is_run``: only report.

    The rates lie beside the store, in ``fastlibra_rates_HARDWARE.json``; where that file is there already, they
    are taken from it. Raises ConfigError, also where there is no store to report from.
    """
    store = setup.store
    if not setup.is_run and not (store and store.exists()):
        raise ConfigError(
            f"there is no store {store} to report from" if store else "name a store to report from"
        )
    if store is None:
        with tempfile.TemporaryDirectory() as folder:
            return run(dataclasses.replace(setup, store=Path(folder) / "cells.jsonl"))
    hardware = setup.hardware or next(iter(HARDWARE))
    shown = table(setup, hardware)
    rates = RatesFile(store.with_name(f"fastlibra_rates_{hardware}.json"), shown)
    if setup.is_run:
        find_rates(setup, shown, rates, store)
        fill(setup, shown, rates, store)
    return grid_result(setup, shown, rates.rates, CellStore(store))


def find_rates(setup: Setup, shown: Table, rates: RatesFile, store: Path) -> None:
    """``fastlibra-pages``'s peaks where they are not written down yet, each written at once."""
    unknown = {case: cell for case, cell in shown.cases.items() if case not in rates.rates}
    if unknown:
        search = functools.partial(_first_peak, store, shown)
        in_parallel(search, unknown, setup.num_workers, setup.show, "rates found", rates.fix)


def fill(setup: Setup, shown: Table, rates: RatesFile, store: Path) -> None:
    """Batch by batch: every policy at every rate, then the policies' peaks.

    Cases without rates are left out: they come when their rates are known.
    """
    for number, batch in enumerate(shown.batches, 1):
        cases = [case for case in batch if case in rates.rates]
        which = f"part {number} of {len(shown.batches)}"
        finished = CellStore(store)
        cells = [cell for case in cases for cell in shown.cells(case, rates.rates).values()]
        missing = {cell: cell for cell in cells if finished.find(cell) is None}
        if missing:
            run_one = functools.partial(_run, store)
            in_parallel(run_one, missing, setup.num_workers, setup.show, f"simulations done, {which}")
        searched = {
            (case, policy): shown.peak_cell(case, policy, rates.rates)
            for case in cases
            if case in shown.main
            for policy in COMPARED
        }
        if searched:
            search = functools.partial(_peak, store, shown.search)
            in_parallel(search, searched, setup.num_workers, setup.show, f"peaks found, {which}")


@functools.lru_cache(maxsize=1)
def _opened(path: Path) -> CellStore:
    """Once in each process."""
    return CellStore(path)


def _run(store: Path, cell: Cell) -> None:
    run_into(_opened(store), cell)


def _peak(store: Path, search: Search, cell: Cell) -> Peak:
    opened = _opened(store)
    opened.refresh()
    return peak(cell, opened, search)


def _first_peak(store: Path, shown: Table, cell: Cell) -> Peak:
    """Find the peak from a guess that shorter runs make, where runs are long."""
    guess = cell
    if cell.duration_s >= _LONG_S:
        shorter = dataclasses.replace(cell, duration_s=cell.duration_s / GUESSED_BY)
        guessed = _peak(store, shown.guess, shorter).per_s
        guess = dataclasses.replace(cell, rate=rounded(guessed)) if guessed else cell
    return _peak(store, shown.search, guess)


TABLE = Experiment(
    "fastlibra-table",
    "Every cache policy and limit in every FastLibra case",
    "FastLibra, §6.3 to §6.9",
    run,
    draw,
    (headline,),
    hardwares=tuple(HARDWARE),
)
