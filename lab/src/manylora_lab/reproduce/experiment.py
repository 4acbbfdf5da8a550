"""What an experiment is, and how much of it is run."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from manylora_lab.reproduce.report import ExperimentReport, Headline, Row

T = TypeVar("T")
Scale = Literal["full", "quick", "smoke"]
Device = Literal["sim", "cpu", "cuda"]
CLEAR = "\x1b[K"
"""Empties the line of a terminal from the cursor on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """How to run. ``quick``: under two minutes on two cores; ``smoke``: a few seconds, to see that it works.

    ``workers``: processes that share independent parts; 0: as many as there are cores. For an experiment with a
    choice of ``hardwares``: which one (None: the first); ``is_run``: whether what its store misses is run, or only
    reported as missing. ``store``: the file of finished parts, from which a run that was stopped goes on.
    """

    scale: Scale = "full"
    device: Device = "sim"
    seed: int = 0
    workers: int = 0
    hardware: str | None = None
    store: Path | None = None
    is_run: bool = True
    show: Callable[[str], None] = lambda line: None

    @property
    def num_workers(self) -> int:
        return self.workers or os.cpu_count() or 1

    def pick(self, full: T, quick: T, smoke: T) -> T:
        """The value for the setup's scale."""
        choices: dict[Scale, T] = {"full": full, "quick": quick, "smoke": smoke}
        return choices[self.scale]


@dataclasses.dataclass(frozen=True, slots=True)
class GridResult:
    """What running a grid gives. ``headline`` and ``notes``: those that need the setup or more than the rows."""

    settings: dict[str, Any]
    rows: list[Row]
    headline: Sequence[Headline] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """A table or figure of a paper, as data: what is run, which figures are told first, and how it is drawn.

    ``paper``: the table or figure, and where its text is. ``grid`` runs all cells of a setup. ``headline``:
    figures of the rows, beside the paper's. ``draw``: the picture, like the paper's. ``devices``: where it can
    run, the default first. ``hardwares``: descriptions for which a simulated one can run, the default first; it
    takes a store, too. ``is_stored``: so does one whose cases are ``parts``.
    """

    name: str
    title: str
    paper: str
    grid: Callable[[Setup], GridResult]
    draw: Callable[[ExperimentReport, Path], None]
    headline: Sequence[Callable[[list[Row]], list[Headline]]] = ()
    notes: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ("sim",)
    hardwares: tuple[str, ...] = ()
    is_stored: bool = False

    def run(self, setup: Setup) -> ExperimentReport:
        """The report of a run, named after the hardware too where that is not the default. Raises ConfigError."""
        found = self.grid(setup)
        is_default = setup.hardware in (None, *self.hardwares[:1])
        name = self.name if is_default else f"{self.name}-{setup.hardware}"
        figures = [figure for each in self.headline for figure in each(found.rows)]
        headline = [*found.headline, *figures]
        notes = (*self.notes, *found.notes)
        return ExperimentReport(name, self.title, found.settings, found.rows, headline, notes)


def show_progress(line: str) -> None:
    """One line on stderr; on a terminal the next one replaces it, and "3 of 12" in it is drawn as a bar."""
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
        return
    if counted := re.search(r"(\d+) of (\d+)", line):
        done, total = map(int, counted.groups())
        line = f"[{'#' * (20 * done // max(total, 1)):<20}] {line}"
    # Whatever is printed next stands in its place.
    print(f"{CLEAR}{line[: shutil.get_terminal_size().columns - 1]}", end="\r", file=sys.stderr, flush=True)
