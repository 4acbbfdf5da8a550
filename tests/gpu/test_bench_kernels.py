"""On a CUDA device: ``manylora bench kernels`` finds every kernel right, in captured launches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manylora_lab.bench.kernels.settings import KERNELS, TABLES

from manylora.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("shape", "dtype"), [("llama-3-8b", "bfloat16"), ("demo", "float32")])
def test_a_quick_run(shape: str, dtype: str, tmp_path: Path) -> None:
    words = ["--quick", "--device", "cuda", "--shape", shape, "--dtype", dtype, "--out", str(tmp_path)]
    code = main(["bench", "kernels", *words])
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert document["mistakes"] == []
    assert code == 0
    assert (document["kernels"], document["shape"], document["dtype"]) == ("triton", shape, dtype)
    assert {row["kernel"] for row in document["rows"]} == set(KERNELS)
    assert all(row["is_right"] and row["floor_us"] > 0 for row in document["rows"])
    # What adapters add is a difference of two times.
    assert all(row["us"] > 0 for row in document["rows"] if row["kernel"] != "lora")
    assert (tmp_path / "kernels.png").exists()


@pytest.mark.parametrize("part", TABLES)
def test_a_quick_choice_of_launch_sizes(part: str, tmp_path: Path) -> None:
    words = ["--tune", part, "--quick", "--device", "cuda", "--shape", "llama-3-8b", "--out", str(tmp_path)]
    assert main(["bench", "kernels", *words]) == 0
    report = json.loads((tmp_path / f"tune_{part}.json").read_text())
    assert report["mistakes"] == report["left_out"] == []
    rows = [row for row in report["rows"] if row["kernel"] != "layer"]
    assert rows
    assert all(row["is_right"] for row in rows)
    table = json.loads((tmp_path / f"{part}.json").read_text())
    assert table[torch.cuda.get_device_name()] == report["tuned"]
