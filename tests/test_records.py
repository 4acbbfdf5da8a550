"""Every record says where it comes from, and its command is one of the commit that it names."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.provenance import ROOT

FOLDER = ROOT / "docs" / "results"
FIELDS = {"command", "commit", "machine", "versions", "seed", "others"}
COMMAND = re.compile(r"(?P<manylora>manylora) |python -m (?P<module>[\w.]+)|python (?P<script>[\w/]+\.py)")
Entry = dict[str, Any]


def records() -> list[Path]:
    """Files of records; stores of lines, which their entries lie beside."""
    named = [path for path in FOLDER.glob("*.json") if not path.name.endswith(".provenance.json")]
    return sorted([*named, *FOLDER.glob("*.jsonl.gz")])


def _entries(path: Path) -> list[Entry]:
    if path.name.endswith(".jsonl.gz"):
        path = path.with_name(path.name.removesuffix(".jsonl.gz") + ".provenance.json")
    found = json.loads(path.read_text()).get("provenance", []) if path.exists() else []
    return found if isinstance(found, list) else []


def provenance_of(path: Path) -> list[Entry]:
    found = _entries(path)
    assert found, f"{path.name} has no provenance"
    return found


def entries() -> Iterator[Any]:
    for path in records():
        for number, entry in enumerate(_entries(path)):
            yield pytest.param(path, entry, id=f"{path.name}-{number}")


@functools.cache
def git(*words: str) -> str | None:
    """What git says in the repository; None where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def require_history() -> None:
    """Skips, saying so, where the history is not there to look in."""
    if git("rev-parse", "--show-toplevel") is None:
        pytest.skip("no git, or no repository: commits are not looked up")
    if (git("rev-parse", "--is-shallow-repository") or "").strip() != "false":
        pytest.skip("a shallow clone: commits are not looked up")


# ---- what an entry says --------------------------------------------------------------------------------


def test_there_are_records() -> None:
    assert len(records()) > 20
    stores = {path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz")}
    beside = {path.name.removesuffix(".provenance.json") for path in FOLDER.glob("*.provenance.json")}
    assert stores == beside


@pytest.mark.parametrize("path", records(), ids=lambda path: path.name)
def test_a_record_says_where_all_of_it_comes_from(path: Path) -> None:
    record = {} if path.name.endswith(".gz") else json.loads(path.read_text())
    parts = [entry.get("part", "") for entry in provenance_of(path)]
    assert len(set(parts)) == len(parts)
    for part in filter(None, parts):
        at: Any = record
        for step in part.split("/"):
            at = at[int(step)] if isinstance(at, list) else at[step]
    if "" not in parts:  # then the parts are all that is measured
        (name,) = {part.split("/")[0] for part in parts}
        assert {part.split("/")[1] for part in parts} == set(
            map(str, range(len(record[name]))) if isinstance(record[name], list) else record[name]
        )


@pytest.mark.parametrize(("path", "entry"), entries())
def test_an_entry_is_whole(path: Path, entry: Entry) -> None:
    assert FIELDS <= set(entry) <= FIELDS | {"part", "completed"}
    assert COMMAND.match(entry["command"])
    assert re.fullmatch(r"[0-9a-f]{40}", entry["commit"]), "with changes, or unknown, it is no record"
    assert set(entry["machine"]) <= {"cpu", "cores", "gpu"}
    assert entry["machine"]["cpu"]
    assert entry["machine"]["cores"] > 0
    assert entry["versions"]["python"].startswith("3.")
    if "gpu" in entry["machine"]:
        assert {"torch", "triton", "cuda"} <= set(entry["versions"])
    assert entry["seed"] not in (None, "")
    assert entry["others"], "nothing is said of others on the machine"
    assert "/home" not in entry["command"]
    assert "/tmp" not in entry["command"]


def test_what_a_record_says_beside_its_provenance_is_the_same() -> None:
    """A commit or a command in the record itself, from before there was a provenance."""
    for path in records():
        if path.name.endswith(".gz"):
            continue
        record = json.loads(path.read_text())
        for entry in provenance_of(path):
            at: Any = record
            for step in filter(None, entry.get("part", "").split("/")):
                at = at[int(step)] if isinstance(at, list) else at[step]
            if "commit" in at:
                assert entry["commit"].startswith(at["commit"]), path.name
            if "gpu" in entry["machine"] and "device" in record:
                names = set(entry["machine"]["gpu"].split(", "))  # of all that the command could see
                assert record["device"] in ("cpu", "cuda") or all(name in record["device"] for name in names)
            if "torch" in record and "torch" in entry["versions"]:
                assert entry["versions"]["torch"].partition("+")[0] == record["torch"].partition("+")[0]


# ---- what the history says -----------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "entry"), entries())
def test_the_commit_is_in_the_history(path: Path, entry: Entry) -> None:
    require_history()
    assert git("cat-file", "-e", entry["commit"] + "^{commit}") is not None
    assert git("merge-base", "--is-ancestor", entry["commit"], "HEAD") is not None


def source_at(commit: str, path: str) -> str | None:
    return git("show", f"{commit}:{path}")


def test_the_checks_see_what_is_not_there() -> None:
    require_history()
    assert git("cat-file", "-e", "dd64e05^{commit}") is None
    head = (git("rev-parse", "HEAD") or "").strip()
    assert source_at(head, "lab/src/manylora_lab/benchmarks/no_such_thing.py") is None
    with pytest.raises(AssertionError, match="no_such_thing"):
        check_command("python -m manylora_lab.benchmarks.no_such_thing --out x", head)
    with pytest.raises(AssertionError, match="--no-such-flag"):
        check_command("python -m manylora_lab.benchmarks.simulator_speed --no-such-flag", head)
    with pytest.raises(AssertionError, match="fig99"):
        check_command("manylora reproduce punica-fig99 --quick", head)
    with pytest.raises(AssertionError, match="--no-such-flag"):
        check_command("manylora bench kernels --no-such-flag", head)


PACKAGES = ("src/manylora", "lab/src/manylora_lab")
REPRODUCE = ("src/manylora/reproduce", "lab/src/manylora_lab/reproduce")


def check_command(command: str, commit: str) -> None:
    """The module, script or experiment exists at the commit, and every flag stands in its source there."""
    command = command.replace("python -m manylora.cli ", "manylora ")  # which is the same
    found = COMMAND.match(command)
    assert found, command
    words = shlex.split(command)
    if found["manylora"]:
        source = git(
            "grep", "-hE", "--", r'"--[a-z]|"[a-z_]+"', commit, "--", "src/manylora", "lab/src/manylora_lab"
        )
        assert source, f"{commit} has no package"
        assert words[1] in ("bench", "reproduce", "profile"), command
        if words[1] == "reproduce":
            assert git("grep", "-lF", f'"{words[2]}"', commit, "--", *REPRODUCE), (
                f"{words[2]} is not there at {commit}"
            )
    else:
        path = found["script"] or found["module"].replace(".", "/") + ".py"
        source = source_at(commit, f"lab/src/{path}" if path.startswith("manylora_lab/") else path)
        assert source is not None, f"{path} is not there at {commit}"
        if "run_parser" in source:
            source += source_at(commit, "lab/src/manylora_lab/benchmarks/run_report.py") or ""
        if path == "tools/long_tests.py":
            source += '"--timeout" "--durations"'  # pytest's, to which it hands on what it does not know
        if "bench.provenance" in source:
            for package in ("src/manylora", "lab/src/manylora_lab"):
                source += source_at(commit, f"{package}/bench/provenance.py") or ""
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        # A setting of the engine is declared by its name, without dashes.
        names = (f'"{flag}"', f'"{flag[2:].replace("-", "_")}"') if found["manylora"] else (f'"{flag}"',)
        assert any(name in source for name in names), f"{flag} is not there at {commit}: {command}"


@pytest.mark.parametrize(("path", "entry"), entries())
def test_the_command_is_one_of_its_commit(path: Path, entry: Entry) -> None:
    require_history()
    check_command(entry["command"], entry["commit"])
