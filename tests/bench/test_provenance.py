"""What a record tells of itself, in real repositories and real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench import provenance
from manylora_lab.bench.provenance import ROOT, UNKNOWN, Provenance, commit_of, tells_code

FIELDS = {"command", "commit", "machine", "versions", "seed", "others"}


def git(folder: Path, *words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_the_commit_is_the_repositorys(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "notes.md").write_text("that decides nothing\n")
    assert commit_of(repository) == head
    (repository / "src" / "a.py").write_text("a = 2\n")
    assert commit_of(repository) == head + "+", "changed sources are no commit"
    assert commit_of(repository / "src") == UNKNOWN, "a package that lies in somebody's repository"


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path) == UNKNOWN
    monkeypatch.setenv("PATH", "")
    assert commit_of(ROOT) == UNKNOWN


@pytest.mark.parametrize(
    ("commit", "tells"),
    [("f50f534", True), ("f50f534+", False), (UNKNOWN, False), ("f50f534 or so", False)],
)
def test_which_commits_tell_what_ran(commit: str, tells: bool) -> None:
    assert tells_code(commit) is tells


def test_entries() -> None:
    (whole,) = Provenance(7, "f50f534", "a simulation on the other core").provenance()
    assert set(whole) == FIELDS
    assert (whole["seed"], whole["commit"]) == (7, "f50f534")
    assert whole["machine"]["cpu"]
    assert whole["machine"]["cores"] >= 1
    assert {"python", "torch"} <= set(whole["versions"])
    assert whole["others"]["said"] == "a simulation on the other core"
    assert json.loads(json.dumps(whole)) == whole
    parts = Provenance(0).provenance("runs/0", "runs/1")
    assert [entry.pop("part") for entry in parts] == ["runs/0", "runs/1"]
    assert parts[0] == parts[1]


def test_others_are_measured_apart_from_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cores were busy for ten seconds, one of them with the work."""
    loads = [
        provenance._Load(100.0, 5000.0, 40.0, 0.5, 1),
        provenance._Load(110.0, 5030.0, 50.0, 2.5, 2),
    ]
    monkeypatch.setattr(provenance._Load, "now", classmethod(lambda cls: loads.pop(0)))
    (entry,) = Provenance(0).provenance()
    assert entry["others"] == {
        "busy_cores": 2.0,
        "load_before": 0.5,
        "load_after": 2.5,
        "gpu_processes_before": 1,
    }


def test_where_nothing_can_be_measured_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance._Load, "now", classmethod(lambda cls: cls(0.0, None, 0.0, None, None)))
    (entry,) = Provenance(0).provenance()
    assert entry["others"] == {}


PROGRAM = "from manylora_lab.bench.provenance import command_line; print(command_line())"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "x.json", "--rates", "10*1.4,5"], "--out x.json --rates '10*1.4,5'"),
        (["--out", "/somewhere/private/x.json", "--work=/tmp/y"], "--out x.json --work=y"),
        (["--out", "{here}/made/x.json"], "--out made/x.json"),
    ],
)
def test_the_command_is_what_was_typed(words: list[str], told: str, tmp_path: Path) -> None:
    """As a module, and without the folders of one machine."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "one.py").write_text(PROGRAM)
    given = [word.format(here=tmp_path) for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "bench.one", *given], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"python -m bench.one {told}"


def test_manylora_is_called_by_its_name(tmp_path: Path) -> None:
    words = ["reproduce", "punica-fig1", "--device", "sim", "--smoke", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "manylora", *words], check=True, capture_output=True)
    record: dict[str, Any] = json.loads((tmp_path / "punica-fig1.json").read_text())
    (entry,) = record["provenance"]
    assert entry["command"] == f"manylora reproduce punica-fig1 --device sim --smoke --out {tmp_path.name}"
    assert set(entry) == FIELDS
    assert entry["seed"] == 0
