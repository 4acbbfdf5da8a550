"""Finished cases of an experiment in a file, so that a run that was stopped goes on where it was.

Owns the file's form: a line for each case, an object of ``commit``, ``case`` (its settings, as text) and ``row``.
A case is found again only at the commit that ran it, and not at all where sources have changes. FastLibra's table
has a store of its own, whose cells outlive commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TypeVar

from manylora.config.declaring import ConfigError
from manylora_lab.bench.provenance import ROOT, commit_of, tells_code
from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.report import Row

C = TypeVar("C", bound=Hashable)


def run_cases(measure: Callable[[C], Row], cases: Iterable[C], setup: Setup) -> dict[C, Row]:
    """A row for each case, in their order: of ``measure``, which gives equal cases equal rows, or of the store."""
    wanted, run = dict.fromkeys(cases), "simulations done"
    if setup.store is None:
        return in_parallel(measure, {case: case for case in wanted}, setup.num_workers, setup.show, run)
    store = _Store(setup.store)
    missing = {case: case for case in wanted if repr(case) not in store.rows}
    found = in_parallel(measure, missing, setup.num_workers, setup.show, run, store.add)
    return {case: found[case] if case in found else store.rows[repr(case)] for case in wanted}


class _Store:
    """``rows``: of today's code, by the case's text."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for lines that are none of ours."""
        self.path, self.commit = path, commit_of(ROOT)
        self.rows: dict[str, Row] = {}
        try:
            lines = path.read_text().splitlines() if path.exists() else []
        except OSError as error:
            raise ConfigError(f"the store {path} cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
            except ValueError:
                continue  # half a line of a process that was killed, or an empty one
            try:
                commit, case, row = (values[key] for key in ("commit", "case", "row"))
            except (KeyError, TypeError):
                raise ConfigError(f"line {number} of the store {path} is no case") from None
            if commit == self.commit and tells_code(commit):
                self.rows[case] = row

    def add(self, case: object, row: Row) -> None:
        """Raises ConfigError. The line's end comes before it, so that half a line invalidates no other."""
        line = json.dumps({"commit": self.commit, "case": repr(case), "row": row})
        try:
            with self.path.open("a") as file:
                file.write("\n" + line)
        except OSError as error:
            raise ConfigError(f"the store {self.path} cannot be written: {error.strerror}") from None
