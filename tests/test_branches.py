"""``tools.branches``: what it makes of coverage's report, and of the file of known branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import branches


def report(path: Path, missing: list[list[int]], lines: list[int]) -> dict[str, object]:
    return {
        "files": {str(path): {"missing_branches": missing, "missing_lines": lines}},
        "totals": {"percent_covered": 90.0},
    }


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "choice.py"
    file.write_text("def choose(a):\n    if a:\n        return 1\n    return 2\n")
    monkeypatch.setattr(branches, "SOURCE", tmp_path)
    monkeypatch.setattr(branches, "ROOT", tmp_path)
    monkeypatch.setattr(branches, "KNOWN", tmp_path / "untaken.txt")
    return file


def test_branches_are_told_by_their_text(source: Path) -> None:
    found = branches.untaken(report(source, [[2, 3], [4, -1]], [3]))
    assert found == {"choice.py: if a: -> return 1", "choice.py: return 2 -> its end", "choice.py: return 1"}


@pytest.mark.parametrize(
    ("known", "code", "words"),
    [
        ("choice.py: if a: -> return 1\n    A reason,\n    of two lines.\n", 0, "1 not taken"),
        ("", 1, "not taken by any test: choice.py: if a: -> return 1"),
        ("choice.py: if a: -> return 1\n", 1, "without a reason"),
        (
            "choice.py: if a: -> return 1\n    Why.\nchoice.py: if b: -> x\n    Why.\n",
            1,
            "taken, though untaken.txt",
        ),
    ],
)
def test_the_file_must_be_true(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    known: str,
    code: int,
    words: str,
) -> None:
    branches.KNOWN.write_text(f"# a comment\n\n{known}")
    monkeypatch.setattr(branches, "measure", lambda: report(source, [[2, 3]], []))
    assert branches.main([]) == code
    assert words in capsys.readouterr().out


def test_what_is_missed_can_be_added(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "measure", lambda: report(source, [[2, 3]], []))
    branches.main(["--write"])
    assert branches.known() == {"choice.py: if a: -> return 1": ""}


def test_the_policys_file_names_lines_that_are_there() -> None:
    """``make coverage`` asks whether they are taken; that is too slow for every run."""
    reasons = branches.known()
    assert reasons
    for branch, reason in reasons.items():
        file, _, line = branch.partition(": ")
        source = {line.strip() for line in (branches.SOURCE / file).read_text().splitlines()}
        assert line.rpartition(" -> ")[0] in source or line in source, branch
        assert reason, branch
