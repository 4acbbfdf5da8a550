"""What the command does, whatever the experiment: refusals before any work, progress, Ctrl-C, documentation."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from manylora_lab.reproduce import command
from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup, show_progress
from manylora_lab.reproduce.registry import EXPERIMENTS, experiment

from manylora.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """How experiments were run; none does anything."""
    asked: list[Setup] = []

    def grid(setup: Setup) -> GridResult:
        asked.append(setup)
        raise AssertionError("should have been refused before")

    def stand_in(name: str) -> Experiment:
        return dataclasses.replace(experiment(name), grid=grid)

    monkeypatch.setattr(command, "experiment", stand_in)
    return asked


def test_where_no_folder_is_named_it_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "caraserve-fig5", "--smoke"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"caraserve-fig5.json", "caraserve-fig5.png"}


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    runs: list[Setup], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for out in (taken, taken / "below"):
        assert main(["reproduce", "fastlibra-fig2", "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"{out} cannot be written: " in line
    for suffix in ("json", "png"):
        (tmp_path / suffix / f"fastlibra-fig2.{suffix}").mkdir(parents=True)
        assert main(["reproduce", "fastlibra-fig2", "--out", str(tmp_path / suffix)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"fastlibra-fig2.{suffix} cannot be written: " in line
    assert runs == []


def test_a_missing_matplotlib_is_told_before_the_work(
    runs: list[Setup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["reproduce", "fastlibra-fig2", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == "manylora: error: the picture needs matplotlib: pip install manylora-lab[plot]"
    assert runs == []


def test_progress_is_lines_in_a_file_and_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_progress("fig: 3 of 12 simulations done")
    assert capsys.readouterr().err == "fig: 3 of 12 simulations done\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    show_progress("fig: 3 of 12 simulations done")
    show_progress("fig: " + "long " * 40)
    first, second, rest = capsys.readouterr().err.split("\r")
    assert first == "\x1b[K[" + "#" * 5 + " " * 15 + "] fig: 3 of 12 simulations done"
    assert len(second) == len("\x1b[K") + 79, "what does not fit on one line would not be replaced"
    assert rest == ""


def test_an_interrupt_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def grid(setup: Setup) -> GridResult:
        raise KeyboardInterrupt

    interrupted = dataclasses.replace(experiment("fastlibra-fig2"), grid=grid)
    monkeypatch.setattr(command, "experiment", lambda name: interrupted)
    assert main(["reproduce", "fastlibra-fig2", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.strip() == "manylora: interrupted"


def dies_of_an_interrupt(number: int) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_an_interrupt_ends_workers_too() -> None:
    """Else each of them would go on with the next simulation."""
    assert in_parallel(dies_of_an_interrupt, {0: 0, 1: 1}, 2, lambda line: None, "done") == {0: True, 1: True}


def note_or_fail(path: Path) -> None:
    if path.name == "0":
        raise ValueError("the first one")
    time.sleep(0.2)  # all of them would take ten seconds
    path.touch()


def test_what_has_not_begun_is_left_when_one_fails(tmp_path: Path) -> None:
    wanted = {number: tmp_path / str(number) for number in range(100)}
    with pytest.raises(ValueError, match="the first one"):
        in_parallel(note_or_fail, wanted, 2, lambda line: None, "done")
    assert len(list(tmp_path.iterdir())) < 99


def test_the_documentation_has_every_experiment() -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text()
    named = re.findall(r"^\| `([a-z][a-z0-9-]+)` \|", text, re.MULTILINE)
    assert named == list(EXPERIMENTS)
    for name, each in EXPERIMENTS.items():
        devices = ", ".join(each.devices)
        assert re.search(rf"^\| `{name}` \|[^|]*\| {devices} \|", text, re.MULTILINE), (
            f"{name} runs on {devices}"
        )


def test_the_documentation_names_those_that_keep_their_cases() -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text()
    (listed,) = re.findall(r"With `--store FILE` these keep .*?They may share", text, re.DOTALL)
    named: list[str] = []
    for part in re.findall(r"`([a-z0-9-]+-[a-z0-9-]+|-[a-z0-9]+)`", listed):
        named.append(named[-1].rpartition("-")[0] + part if part.startswith("-") else part)
    assert named == [name for name, each in EXPERIMENTS.items() if each.is_stored]


@pytest.mark.parametrize("each", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_every_experiment_says_what_it_redraws(each: Experiment) -> None:
    paper, _, place = each.name.rpartition("-")
    assert each.paper.lower().startswith(paper)
    if found := re.fullmatch(r"(fig|table)(\d+)", place):
        kind = {"fig": "Figure", "table": "Table"}[found[1]]
        assert f", {kind} {found[2]} (§" in each.paper
    assert each.title
    assert re.search(r"§\d", each.paper)


def test_the_record_is_of_quick_runs() -> None:
    recorded = json.loads((ROOT / "docs" / "results" / "reproduce_quick.json").read_text())["experiments"]
    # What keeps its cells has records of its own, and the layer needs a GPU.
    stored = {"fastlibra-table", "fastlibra-seeds", "fastlibra-ablation"}
    assert set(recorded) == set(EXPERIMENTS) - stored - {"punica-fig10"}
    for name, run in recorded.items():
        assert run["settings"]["scale"] == "quick"
        assert all({"metric", "ours", "paper"} <= set(figure) for figure in run["headline"])
        assert run["settings"].get("device", "sim") == experiment(name).devices[0]
