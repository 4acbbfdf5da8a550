"""``manylora warmup`` on the shipped model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manylora.cli import main

DEMO = Path(__file__).parents[2] / "demo"


def warmup(*args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from manylora.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, "warmup", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_kind_of_request_runs_once() -> None:
    done = warmup(
        str(DEMO / "model"), "--device", "cpu", "--device-pool", "64MiB", "--max-adapter-rank", "16"
    )
    assert done.returncode == 0, done.stderr
    # The base and ranks 8 and 16, prompts of 1, 100, 700 and of what fits, alone and together.
    assert "24 requests" in done.stdout


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "/nowhere/at/all", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/nowhere/at/all" in line


@pytest.mark.parametrize("option", ["--export", "--import"])
def test_caches_are_not_carried_any_more(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for args in ((option, "kernels.tgz"), (str(DEMO / "model"), option, "kernels.tgz")):
        assert main(["warmup", *args]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"manylora: error: {option} was removed: keep TRITON_CACHE_DIR")
    assert main(["warmup"]) == 2
    assert capsys.readouterr().err == "manylora: error: warmup needs a MODEL\n"
