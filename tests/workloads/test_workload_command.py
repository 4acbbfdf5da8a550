"""``manylora workload`` as it is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from manylora_lab.workloads.formats import FORMATS
from manylora_lab.workloads.named import catalogue

from manylora.cli import main


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manylora", "workload", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_describe_prints_and_writes(tmp_path: Path) -> None:
    ended = run(
        "describe", "chatbot", "--rate", "2", "--adapters", "20", "--duration", "300", "--seed", "1",
        "--popularity", "uniform", "--ranks", "cycle(8,16)",
        "--json", str(tmp_path / "it.json"), "--plot", str(tmp_path / "it.png"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "600 in" in ended.stdout
    assert "10 of rank 8, 10 of rank 16" in ended.stdout
    found = json.loads((tmp_path / "it.json").read_text())
    assert found["requests"] == 600
    assert found["adapters_served"] == 20
    assert (tmp_path / "it.png").stat().st_size > 1000


def test_list_names_everything() -> None:
    ended = run("list")
    assert ended.returncode == 0
    for name in (*catalogue(), *FORMATS):
        assert f"  {name} " in ended.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chatbto"], "did you mean chatbot"),
        (["chatbot", "--rate", "fast"], "invalid float value: 'fast'"),
        (["chatbot", "--rate", "0"], "the rate must be"),
        (["chatbot", "--rate", "nan"], "the rate must be"),
        (["chatbot", "--adapters", "2000"], ""),
        (["agent", "--adapters", "2000"], "name a popularity"),
        (["chatbot", "--popularity", "gausian(1)"], "did you mean gaussian"),
        (["chatbot", "--duration", "9", "--plot", "nowhere/it.png"], "cannot write"),
        (["chatbot", "--duration", "9", "--json", "nowhere/it.json"], "cannot write"),
        (["no-such-file.csv", "--format", "azure-llm"], "no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["workload", "describe", *args])
    except SystemExit as ended:  # argparse's own errors
        code = ended.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    if not words:
        assert code == 0
        return
    assert code == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert words in line


def test_parsers_alone_load_nothing_heavy() -> None:
    code = (
        "import sys, argparse; from manylora_lab.workloads.command import add_parser; "
        "add_parser(argparse.ArgumentParser().add_subparsers()); "
        "sys.exit(any(n in sys.modules for n in ('numpy', 'matplotlib', 'manylora_lab.workloads.named')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
