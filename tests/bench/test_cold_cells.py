"""The benchmark of cold-start modes by link, rank and prompt as a toy on the CPU: its record's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.benchmarks import cold_cells

MODES = ("wait", "layerwise", "auto")


def record(folder: Path, *args: str) -> dict[str, Any]:
    out = folder / "cells.json"
    cold_cells.main(["--toy", "--out", str(out), "--commit", "abc", "--cpu-lora-workers", "0", *args])
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"command", "commit", "device", "torch", "provenance"} <= set(found)
    return found


def test_every_mode_of_a_cell_and_auto_beside_them(tmp_path: Path) -> None:
    found = record(tmp_path, "--modes", *MODES)
    assert found["left_out"] == []
    by_mode = {row["mode"]: row for row in found["modes"]}
    assert tuple(by_mode) == MODES
    counted = cold_cells.TOY_ADAPTERS - cold_cells.LEFT_OUT
    for mode, row in by_mode.items():
        assert row["count"] == counted
        assert row["warm_count"] == cold_cells.WARM
        assert 0 < row["least_ms"] <= row["ms"] <= row["most_ms"]
        began = {way: count for way, count in row["began"].items() if count}
        assert sum(began.values()) == cold_cells.TOY_ADAPTERS, (
            "each adapter was cold each time, and on the host"
        )
        assert all(way.endswith("/host") for way in began)
        assert mode == "auto" or list(began) == [f"{mode}/host"]
    (cell,) = found["cells"]
    others = {mode: by_mode[mode]["ms"] for mode in MODES if mode != "auto"}
    assert cell["best"] == min(others, key=others.__getitem__)
    assert cell["auto_over_best"] == pytest.approx(by_mode["auto"]["ms"] / min(others.values()), rel=1e-3)
    assert cell["auto_over_wait"] == pytest.approx(by_mode["auto"]["ms"] / by_mode["wait"]["ms"], rel=1e-3)


@pytest.mark.long
def test_a_link_that_is_paced(tmp_path: Path) -> None:
    """At 10 MB/s a copy is most of a cold request."""
    found = record(tmp_path, "--modes", "wait", "auto", "--links", "0.01")
    row = found["modes"][0]
    assert row["link_gb_s"] == 0.01
    assert row["ms"] > 3 * row["warm_ms"]


def test_what_has_no_time_is_named_and_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record(tmp_path, "--time-budget", "1")["left_out"] == ["0 GB/s"]
    with pytest.raises(SystemExit) as caught:
        record(tmp_path, "--modes", "layerwise", "auto")
    assert caught.value.code == 2
    assert "--modes: wait must be there" in capsys.readouterr().err
