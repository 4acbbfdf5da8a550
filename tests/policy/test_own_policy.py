"""The policy of docs/write-a-policy.md, from its code to a simulated comparison."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.config.declaring import ConfigError
from manylora.config.policy import CacheConfig
from manylora.policy.cache_policies import CachePolicy, find_cache
from tests.policy.rig import Rig, prompt

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "write-a-policy.md").read_text()
NAME = "most_visited:MostVisited"
MOST_LINES = 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With the page's code as a module on the import path."""
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    code = [line for line in found[1].splitlines() if line.strip()]
    assert len(code) <= MOST_LINES
    (tmp_path / "most_visited.py").write_text(found[1])
    (tmp_path / "no_policy.py").write_text("NotOne = dict\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("most_visited", None)


def simulate(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (folder, REPOSITORY / "src", REPOSITORY / "lab" / "src")))
    return subprocess.run(
        [sys.executable, "-m", "manylora", *args],
        env={**os.environ, "PYTHONPATH": path}, cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_the_page_s_command_compares_it(folder: Path) -> None:
    found = re.search(r"    manylora (bench simulate .*?)\n\n", PAGE, re.DOTALL)
    assert found is not None
    args = found[1].replace("\\\n", " ").split()
    ended = simulate(folder, *args, "--out", "report.json")
    assert ended.returncode == 0, ended.stderr
    results = json.loads((folder / "report.json").read_text())["results"]
    assert [name for name in results if name != "cached"] == [NAME, "lru", "fastlibra"]
    assert all(result["ttft_mean_ms"] > 0 for result in results.values())
    assert results[NAME] != results["lru"] != results["fastlibra"], "each decides otherwise"


def test_it_keeps_all_invariants_and_answers_right(folder: Path) -> None:
    """The rig checks both after every event."""
    rig = Rig(NAME, num_pages=20, num_host_pages=30, low_mark=0.3)
    for adapter in (1, 2, 3):
        rig.add(adapter, 2)
    for turn in range(30):
        rig.ask(f"r{turn}", turn * 7 % 4, prompt(turn % 5, 1 + turn % 4), 3)
        if turn % 3 == 0:
            rig.settle(rings=1)
    rig.settle()
    assert rig.check_answers() == 30


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nosuch:Policy", "No module named 'nosuch'"),
        ("most_visited:Nobody", "has no attribute 'Nobody'"),
        ("no_policy:NotOne", "is no subclass"),
        ("most-visited", "is not known"),
        ("most visited:Policy", "is not known"),
    ],
)
def test_what_is_no_policy_is_one_line(folder: Path, name: str, reason: str) -> None:
    args = "--workload", "chatbot", "--rate", "1", "--hardware", "fastlibra-npu", "--policies", name
    ended = simulate(folder, "bench", "simulate", *args)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert reason in ended.stderr


def test_a_server_refuses_it_before_it_loads_a_model(folder: Path) -> None:
    model = str(REPOSITORY / "demo" / "model")
    ended = simulate(
        folder, "serve", model, "--device", "cpu", "--port", "0", "--cache-policy", "nosuch:Policy"
    )
    assert ended.returncode == 2
    assert "No module named 'nosuch'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_page_names_every_question() -> None:
    questions = {name for name in CachePolicy.__annotations__ if name in vars(CachePolicy)}
    questions |= {name for name in vars(CachePolicy) if not name.startswith("_")}
    named = set(re.findall(r"`([a-z_]+)`", PAGE.partition("| question |")[2]))
    assert questions <= named


def test_names_are_those_of_the_settings() -> None:
    assert len({type(find_cache(name)) for name in ALL_CACHE_POLICIES}) == len(ALL_CACHE_POLICIES)
    with pytest.raises(ConfigError, match=r"must be one of manylora, .*, module:Class, or .*, got 'mru'"):
        CacheConfig("mru")
