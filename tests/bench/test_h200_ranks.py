"""The benchmark of two GPUs as a toy: two ranks on the CPU. Its record's form, and what it does with failures."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.dummies import DEMO, write_model
from manylora_lab.benchmarks import exchange_runs, h200_ranks, ranked_cells
from manylora_lab.benchmarks.engine_rig import ON_CPU, POSITIONS
from manylora_lab.benchmarks.h200_ranks import KINDS, ORDER, adapter_share, cells_of
from manylora_lab.benchmarks.ranked_cells import RankedCell

from manylora.flags import build_settings
from manylora.inspection import check_adapter
from manylora.models.config import read_model_config
from manylora.warmup import write_random_adapters


def record(folder: Path, *args: str) -> dict[str, Any]:
    out = folder / "ranks.json"
    h200_ranks.main(["--toy", "--steps", "12", "--out", str(out), "--commit", "abc", *args])
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"command", "commit", "device", "torch", "provenance"} <= set(found)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_exchanges_and_an_engine_of_several_ranks(ranks: int, tmp_path: Path) -> None:
    found = record(tmp_path, "--shapes", "llama-3-8b", "--kinds", "sharded", "--ranks", str(ranks))
    assert found["left_out"] == []
    assert "failed" not in found
    assert [(row["operation"], row["bytes"]) for row in found["exchanges"]] == [
        (name, size) for size in exchange_runs.TOY_SIZES for name in ("all_reduce", "all_gather", "add_up")
    ]
    assert all(row["eager_us"] > 0 and row["eager_bus_gb_per_s"] > 0 for row in found["exchanges"])
    (start,) = found["starts"]
    assert len(start["ranks_hold"]) == ranks
    assert [(row["mix"], row["adapter_rank"]) for row in found["steps"]] == [
        ("base", 0), ("identical", 16), ("distinct", 16), ("distinct", 64),
    ]  # fmt: skip
    for row in found["steps"]:
        assert row["ranks_alike"]
        assert row["exchanged"]["base"] == 1 + 2 * DEMO.layers
        assert row["exchanged"].get("lora", 0) == (4 * DEMO.layers if row["adapter_rank"] else 0)
        assert row["floor_ms"] == pytest.approx(row["floor_read_ms"] + row["floor_exchange_ms"], abs=1e-3)
        assert min(row["pair_ms"], row["floor_read_ms"], row["floor_exchange_ms"], row["over_floor"]) > 0
    assert [row["mix"] for row in found["offline"]] == list(ranked_cells.MIXES)
    for row in found["offline"]:
        assert row["errors"] == []
        assert row["tokens"] > 50
        assert row["exchanged"]["base"] == 1 + 2 * DEMO.layers
    assert "adapters sharded" in (tmp_path / "ranks.json.log").read_text()


@pytest.mark.long
def test_every_kind_of_engine(tmp_path: Path) -> None:
    found = record(tmp_path, "--shapes", "llama-3-8b", "llama-2-70b")
    assert found["left_out"] == []
    assert "failed" not in found
    cells = [(row["shape"], row["ranks"], row["sharding"], row["graphs"]) for row in found["starts"]]
    assert cells == [
        ("llama-3-8b", 1, "", "on"), ("llama-3-8b", 2, "sharded", "on"), ("llama-2-70b", 2, "sharded", "on"),
        ("llama-3-8b", 2, "replicated", "on"), ("llama-2-70b", 2, "replicated", "on"),
        ("llama-3-8b", 2, "sharded", "off"), ("llama-3-8b", 1, "", "off"), ("llama-3-8b", 2, "replicated", "off"),
    ]  # fmt: skip
    assert all("lora" not in row["exchanged"] for row in found["steps"] if row["sharding"] == "replicated")
    assert all("exchanged" not in row for row in found["steps"] if row["ranks"] == 1)


def test_an_engine_that_fails_is_tried_without_captures_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine starts in a twentieth of a second: each is ended, and is in the record as what it is."""
    monkeypatch.setattr(h200_ranks, "CELL_S", 0.05)
    before = threading.active_count()
    found = record(tmp_path, "--parts", "steps", "--shapes", "llama-3-8b", "--kinds", "sharded", "replicated")
    assert [row["what"] for row in found["failed"]] == [
        "llama-3-8b x2 sharded", "llama-3-8b x2 sharded eager", "llama-3-8b x2 replicated eager",
    ]  # fmt: skip
    assert all("ended after" in row["error"] for row in found["failed"])
    assert "steps" not in found
    assert threading.active_count() == before


def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    found = record(tmp_path, "--time-budget", "0", "--shapes", "llama-2-70b", "llama-3-8b")
    assert found["left_out"][:4] == [
        "exchanges", "llama-2-70b x2 sharded", "llama-3-8b x1", "llama-3-8b x2 sharded",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--parts", "steps,copies"), "copies is none of exchanges"),
        (("--ranks", "1"), "--ranks: 2 or more"),
    ],
)
def test_what_it_refuses(
    given: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        record(tmp_path, *given)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_the_order_is_by_importance() -> None:
    names = [cell.name for cell in cells_of(ORDER, list(KINDS), 2)]
    assert names[:7] == [
        "llama-3-8b x1", "llama-3-8b x2 sharded", "llama-2-13b x1", "llama-2-13b x2 sharded",
        "codellama-34b x1", "codellama-34b x2 sharded", "llama-2-70b x2 sharded",
    ]  # fmt: skip
    assert len(names) == len(set(names)) == 14


@pytest.mark.parametrize("sharding", ["sharded", "replicated"])
def test_a_ranks_bytes_of_an_adapter_are_the_engines(sharding: str, tmp_path: Path) -> None:
    """Within the slack of cells (5 %), on the demo's shape."""
    model = write_model(tmp_path / "model", DEMO, POSITIONS)
    (path,) = write_random_adapters(tmp_path, read_model_config(model), "float32", (16,), 1)
    cell = RankedCell("llama-3-8b", 2, sharding, "off", (16,))
    settings = build_settings({**ON_CPU, **cell.settings(), "model": str(model)})[0]
    pages = json.loads(check_adapter(settings, str(path), as_json=True))["pages_per_rank"][0]
    page_bytes = DEMO.page_bytes(settings.cache.page_tokens) / 2
    assert 1 <= pages * page_bytes / adapter_share(DEMO, 16, cell) < 1.05
