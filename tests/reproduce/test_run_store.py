"""A store of runs: what has ended is not run again, at the same commit and for the same case only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from manylora_lab.reproduce import run_store
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.run_store import run_cases

from manylora.config import ConfigError

RAN: list[int] = []


@dataclasses.dataclass(frozen=True)
class NumberCase:
    number: int


def doubled(case: NumberCase) -> dict[str, int]:
    RAN.append(case.number)
    if case.number == 3:
        raise KeyboardInterrupt
    return {"double": 2 * case.number}


def run(store: Path | None, *numbers: int) -> list[int]:
    """What was run; the results are right."""
    RAN.clear()
    found = run_cases(Setup("smoke", workers=1, store=store), doubled, [NumberCase(n) for n in numbers])
    assert [(case.number, row["double"]) for case, row in found.items()] == [(n, 2 * n) for n in numbers]
    return RAN


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "folder" / "runs.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(store, 1, 2, 3)
    with store.open("a") as file:
        file.write('{"format": "manylora-ru')  # killed while it wrote
    assert run(store, 2, 4, 1) == [4]
    assert run(store, 4, 1) == []
    assert run(None, 1) == [1]


def test_another_commit_s_runs_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "runs.jsonl"
    run(store, 1)
    monkeypatch.setattr(run_store, "commit_of", lambda root: "another")
    assert run(store, 1) == [1]


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "runs.jsonl"
    store.write_text(json.dumps({"format": "manylora-cells-1"}) + "\n")
    with pytest.raises(ConfigError, match="line 1 of the store"):
        run(store, 1)
