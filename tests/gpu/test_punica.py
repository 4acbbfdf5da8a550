"""Punica's experiments on a CUDA device, at smoke scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manylora_lab.reproduce.command import reproduce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("number", [1, 7, 8, 9, 10, 11])
def test_smoke(number: int, tmp_path: Path) -> None:
    name = f"punica-fig{number}"
    reproduce(name, tmp_path, "smoke", "cuda")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["settings"]["device"] == "cuda"
    assert all(figure["ours"] > 0 for figure in found["headline"])
    assert all(row.get("error_of_bound", 0) <= 1 for row in found["rows"])
    assert (tmp_path / f"{name}.png").exists()
