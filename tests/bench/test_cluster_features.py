"""Simulated clusters together with every other feature: each row of the table in docs/routing.md is run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from manylora.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "routing.md"
SMALL = (
    "bench simulate --workload synthetic:prompt=uniform(8,64),output=6 --rate 20 --adapters 4 --duration 1 "
    "--device-pool 3GB --replicas 2 --max-num-seqs 4"
)


def rows() -> list[tuple[str, str]]:
    """Flags of each row, and "yes" or "no"."""
    _, _, table = PAGE.read_text().partition("### Together with other features\n")
    found = re.findall(r"^\| [^|]+ \| `([^`|]+)` \| (yes|no) \|$", table, re.MULTILINE)
    assert len(found) > 20
    return found


@pytest.mark.parametrize(("flags", "is_taken"), rows(), ids=lambda value: value[:40])
def test_a_row_of_the_table(
    flags: str, is_taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    given = shlex.split(flags.replace("JOURNALS", str(tmp_path / "journals")))
    command = [*SMALL.split(), "--out", str(out), *given]
    if "--hardware" not in given:
        command += ["--hardware", "a10"]
    ended = main(command)
    said = capsys.readouterr().err
    if is_taken == "no":
        assert ended == 2
        assert said.startswith("manylora: error: ")
        assert said.count("\n") == 1
        return
    assert ended == 0, said
    for name, found in json.loads(out.read_text())["results"].items():
        assert found["done_per_s"] > 0, name
        assert len(found["replicas"]) == 2
