"""Commands of other distributions: found, lazily, and named where they are missing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from manylora_lab.baselines import POLICIES
from manylora_lab.baselines.routers import MostIdle
from manylora_lab.commands import COMMANDS

from manylora import cli
from manylora.config import named
from manylora.router.policies.policy import find_router

ROOT = Path(__file__).parents[1]
SITE = next(Path(path) for path in sys.path if path.endswith("site-packages"))


def without_site(*words: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    """``manylora`` on just these folders: what was installed as editable is not found there."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, SITE]))}
    command = [sys.executable, "-S", "-m", "manylora", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)


def test_entry_points_are_the_laboratorys_commands() -> None:
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    points = {
        name: importlib.metadata.EntryPoint(name, value, named.GROUP)
        for name, value in project["entry-points"][named.GROUP].items()
    }
    assert {name: point.load() for name, point in points.items()} == COMMANDS
    assert sorted(COMMANDS) == sorted(named.LAB)
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == core["version"]
    assert f"manylora=={core['version']}" in project["dependencies"]


def test_the_laboratorys_policies_are_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    (place,) = project["entry-points"][named.POLICIES].values()
    assert importlib.metadata.EntryPoint("lab", place, named.POLICIES).load() is POLICIES
    for kind, table in POLICIES.items():
        assert named.find_policies(kind) == table
    assert find_router("most-idle") is MostIdle


@pytest.mark.parametrize(
    ("option", "name"), [("--router", "random"), ("--cache-policy", "fastlibra-wol"), ("--merge", "merged")]
)
def test_without_the_laboratory_its_policies_are_refused(option: str, name: str) -> None:
    done = without_site("serve", "/nowhere", "--replicas", "2", option, name, path=[ROOT / "src"])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"manylora: error: {option} must be one of ")
    assert line.endswith(f"or a baseline of manylora-lab (pip install manylora-lab), got {name!r}")


@pytest.mark.parametrize("name", named.LAB)
def test_without_the_laboratory_a_line_says_what_to_install(name: str) -> None:
    done = without_site(name, "--quick", "anything", path=[ROOT / "src"])
    assert done.returncode == 2
    assert done.stderr == (
        f"manylora: error: manylora {name} is part of manylora-lab: pip install manylora-lab\n"
    )
    assert done.stdout == ""


def test_without_the_laboratory_the_help_names_its_commands() -> None:
    done = without_site("--help", path=[ROOT / "src"])
    assert done.returncode == 0
    assert done.stdout.count("with manylora-lab, which is not installed") == len(named.LAB)


def test_a_laboratory_on_the_path_is_found_without_being_installed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lab" / "src" / "manylora_lab", tmp_path / "manylora_lab")
    done = without_site("reproduce", "--list", path=[ROOT / "src", tmp_path])
    assert done.returncode == 0, done.stderr
    assert "fastlibra-fig11" in done.stdout


def test_a_command_that_another_distribution_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("hello", f"{__name__}:add_hello", named.GROUP)
    gone = importlib.metadata.EntryPoint("gone", "no_such_package:add", named.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (point, gone))
    assert cli.main(["hello", "--number", "7"]) == 7
    assert set(named.find_commands()) == {"hello", *named.LAB}


def add_hello(commands: object) -> None:
    hello = commands.add_parser("hello")  # type: ignore[attr-defined]
    hello.add_argument("--number", type=int)
    hello.set_defaults(run=lambda args: args.number)


def test_the_products_own_commands_do_not_import_the_laboratory() -> None:
    code = (
        "import sys; from manylora.cli import main\n"
        "try: main(['adapters', 'list', '/nowhere', '--model', '/nowhere'])\n"
        "except SystemExit: pass\n"
        "sys.exit('manylora_lab' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
