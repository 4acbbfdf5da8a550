"""What an experiment is, and how much of it is run.

Every experiment is a file of its own that ends in ``EXPERIMENT``; ``registry`` knows their names.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from manylora.reproduce.report import Report

T = TypeVar("T")
Scale = Literal["full", "quick", "smoke"]
Device = Literal["sim", "cpu", "cuda"]
CLEAR = "\x1b[K"
"""Empties the line of a terminal from the cursor on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """How to run. ``quick``: under two minutes on two cores; ``smoke``: a few seconds, to see that it works.

    ``workers``: processes that share independent parts; 0: as many as there are cores. For an experiment with a
    choice of ``hardwares``: which one (None: the first); ``store``: the file of its finished parts, from which a
    run that was stopped goes on; ``is_run``: whether what is missing there is run, or only reported as missing.
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
        """By scale."""
        choices: dict[Scale, T] = {"full": full, "quick": quick, "smoke": smoke}
        return choices[self.scale]


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """``devices``: where it can run, the default first. ``draw``: the picture, like the paper's.

    ``hardwares``: descriptions for which a simulated one can run, the default first; it takes a store, too.
    """

    name: str
    title: str
    devices: tuple[Device, ...]
    run: Callable[[Setup], Report]
    draw: Callable[[Report, Path], None]
    hardwares: tuple[str, ...] = ()


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
