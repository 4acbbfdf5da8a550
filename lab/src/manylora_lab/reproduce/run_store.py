"""Runs of an experiment's cases, and those that have ended in a file, a line each, so that one that was stopped
goes on where it was.

A run is found again only at the commit that made it. Does not know what a case is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from manylora.config import ConfigError
from manylora_lab.bench.provenance import ROOT, commit_of
from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.experiment import Setup

FORMAT = "manylora-runs-1"
C = TypeVar("C")
R = TypeVar("R")


def run_cases(setup: Setup, measure: Callable[[C], R], cases: Sequence[C]) -> dict[C, R]:
    """What ``measure`` says of each case, in their order; those that the setup's store has are not run again.

    Cases are dataclasses of plain values, and results what JSON can hold. Raises ConfigError.
    """
    commit = commit_of(ROOT)
    keys = {_key(measure, case): case for case in cases}
    found = {} if setup.store is None else _read(setup.store, commit)
    left = {case: case for key, case in keys.items() if key not in found}

    def keep(case: C, result: R) -> None:
        if setup.store is not None:
            line = {"format": FORMAT, "commit": commit, "case": _key(measure, case), "result": result}
            _append(setup.store, json.dumps(line))

    ran = in_parallel(measure, left, setup.num_workers, setup.show, "simulations done", keep) if left else {}
    return {case: ran[case] if case in ran else found[key] for key, case in keys.items()}


def _key(measure: Callable[[C], R], case: C) -> str:
    assert dataclasses.is_dataclass(case)
    values = dataclasses.asdict(case)  # type: ignore[arg-type]
    return json.dumps([measure.__module__, values], sort_keys=True)


def _read(path: Path, commit: str) -> dict[str, Any]:
    """Of this commit; the last line may be half written."""
    try:
        lines = path.read_text().splitlines() if path.exists() else []
    except OSError as error:
        raise ConfigError(f"the store {path} cannot be read: {error.strerror}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ConfigError(f"line {number} of the store {path} is not of the format {FORMAT}")
        if values["commit"] == commit:
            found[values["case"]] = values["result"]
    return found


def _append(path: Path, line: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.write(("\n" if is_cut else "") + line + "\n")
    except OSError as error:
        raise ConfigError(f"the store {path} cannot be written: {error.strerror}") from None
