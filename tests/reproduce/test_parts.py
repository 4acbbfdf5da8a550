"""Finished cases in a file: a stopped run goes on, and what other code ran is run again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from manylora_lab.reproduce import parts
from manylora_lab.reproduce.experiment import Setup

from manylora.cli import main
from manylora.config.declaring import ConfigError

COMMIT = "a" * 40


@dataclasses.dataclass(frozen=True)
class Case:
    number: int


class Measured:
    """Which cases were measured; the one that ``fails`` is not."""

    def __init__(self, fails: int | None = None) -> None:
        self.cases: list[int] = []
        self.fails = fails

    def __call__(self, case: Case) -> dict[str, float]:
        if case.number == self.fails:
            raise KeyboardInterrupt
        self.cases.append(case.number)
        return {"third": case.number / 3}


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "commit_of", lambda root: COMMIT)


CASES = [Case(number) for number in range(4)]
ROWS = {case: {"third": case.number / 3} for case in CASES}


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    setup = Setup(workers=1, store=tmp_path / "parts.jsonl")
    stopped, again, last = Measured(fails=2), Measured(), Measured()
    with pytest.raises(KeyboardInterrupt):
        parts.run_cases(stopped, CASES, setup)
    assert parts.run_cases(again, CASES, setup) == ROWS
    assert (stopped.cases, again.cases) == ([0, 1], [2, 3])
    assert list(parts.run_cases(last, reversed(CASES), setup).items()) == list(reversed(ROWS.items()))
    assert last.cases == []


def test_without_a_store_all_are_run(tmp_path: Path) -> None:
    for _ in range(2):
        measured = Measured()
        assert parts.run_cases(measured, CASES, Setup(workers=1)) == ROWS
        assert measured.cases == [0, 1, 2, 3]


@pytest.mark.parametrize("other", ["b" * 40, COMMIT + "+", "unknown"])
def test_what_other_or_unknown_code_ran_is_run_again(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(workers=1, store=tmp_path / "parts.jsonl")
    parts.run_cases(Measured(), CASES, setup)
    monkeypatch.setattr(parts, "commit_of", lambda root: other)
    for _ in range(1 if other.startswith("b") else 2):
        measured = Measured()
        assert parts.run_cases(measured, CASES, setup) == ROWS
        assert measured.cases == [0, 1, 2, 3]


def test_half_a_line_costs_that_line_alone(tmp_path: Path) -> None:
    setup = Setup(workers=1, store=tmp_path / "parts.jsonl")
    assert setup.store is not None
    parts.run_cases(Measured(), CASES[:2], setup)
    setup.store.write_text(setup.store.read_text()[:-5])
    measured, again = Measured(), Measured()
    assert parts.run_cases(measured, CASES, setup) == ROWS
    assert measured.cases == [1, 2, 3]
    parts.run_cases(again, CASES, setup)
    assert again.cases == []


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    path.write_text(json.dumps({"format": "manylora-cells-1"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1 of the store .* is no case"):
        parts.run_cases(Measured(), CASES, Setup(workers=1, store=path))
    with pytest.raises(ConfigError, match="cannot be read"):
        parts.run_cases(Measured(), CASES, Setup(workers=1, store=tmp_path))
    with pytest.raises(ConfigError, match="cannot be written"):
        parts.run_cases(Measured(), CASES, Setup(workers=1, store=tmp_path / "none" / "parts"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("merge-h200", "--report-only"), "merge-h200 keeps only finished cases: leave out --report-only"),
        (("s-lora-fig9", "--store", "x"), "s-lora-fig9 keeps nothing: leave out --store and --report-only"),
    ],
)
def test_who_takes_a_store(
    args: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *args, "--smoke", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == f"manylora: error: {says}"
