"""The profiles' benchmark, with its toy shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_lab.benchmarks import h200_profile

from manylora.pricing.profile import load_profile


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_toy(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--toy", "--folder", str(tmp_path / "new"), "--commit", "abc", "--steps-budget", "0.01"]
    args += ["--tensor-parallel-size", str(ranks)]
    assert h200_profile.main(args) == 0
    found = load_profile(tmp_path / "new" / "h200-toy.json")
    found.expect(model=h200_profile.TOY, tensor_parallel_size=ranks)
    assert found.commit == "abc"
    assert "written to" in capsys.readouterr().out


def test_a_shape_without_time_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--folder", str(tmp_path), "--shapes", "llama-2-7b", "--time-budget", "1"]
    assert h200_profile.main(args) == 1
    assert "no time left for llama-2-7b" in capsys.readouterr().out
