"""A package that is not installed: one line of any command says which. Our own mistakes stay visible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.cli import main
from manylora.config.declaring import ConfigError, naming_what_is_missing

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "demo" / "model")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", MODEL, "--port", "0"), ("serve", MODEL, "--port", "0", "--replicas", "2"), ("warmup", MODEL),
        ("adapters", "list", ".", "--model", MODEL), ("bench", "offline"),
        ("frontend", "--connect", "h:1", "--secret-file", "s"),
    ],
    ids=lambda words: words[0] + words[-2],
)  # fmt: skip
def test_a_command_says_what_to_install(words: tuple[str, ...]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-S", "-m", "manylora", *words]  # without any package
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("manylora: error: ")
    assert ": pip install " in line


def test_a_mistake_in_an_import_of_our_own_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "manylora.inspection", None)
    with pytest.raises(ImportError):
        main(["adapters", "check", "a", "--model", "m"])
    for name in ("manylora_lab.bench", "fcntl"):
        with pytest.raises(ImportError), naming_what_is_missing():
            raise ImportError("no", name=name)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("no", name="opentelemetry.trace"), "not installed: pip install opentelemetry-api"),
        (ModuleNotFoundError("no", name="yaml"), "yaml is not installed: pip install pyyaml"),
        (ImportError("cannot import x", name="jinja2"), r"\(cannot import x\): pip install --upgrade jinja2"),
        (ImportError("needs\npython-multipart"), "^needs python-multipart$"),
    ],
)  # fmt: skip
def test_the_line_names_what_pip_knows(error: ImportError, says: str) -> None:
    with pytest.raises(ConfigError, match=says), naming_what_is_missing():
        raise error


def test_a_config_file_needs_its_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "serve.yaml").write_text("model: m")
    assert main(["serve", "--config", str(tmp_path / "serve.yaml")]) == 2
    assert capsys.readouterr().err == "manylora: error: yaml is not installed: pip install pyyaml\n"
