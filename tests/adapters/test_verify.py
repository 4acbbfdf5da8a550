"""Reading all weights for nobody: each is looked at once, in little memory."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.adapters import pack
from manylora.adapters.files import CONFIG_NAME, WEIGHTS_NAME, FilesChanged
from manylora.adapters.pack import verify_weights
from manylora.protocol.executor import AdapterError
from tests.adapters.tiny import HIDDEN, edit_tensors, geometry, inspect, make


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_good_weights_pass(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    make(tmp_path, r=5)
    edit_tensors(tmp_path, lambda tensors: {name: t.to(stored) for name, t in tensors.items()})
    verify_weights(inspect(tmp_path), geometry(), dtype)


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_any_value_is_found_wherever_it_lies(
    value: float, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_CHUNK_ELEMENTS", chunk)
    make(tmp_path, r=3, target_modules=["down_proj"])
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"

    def invalidate(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[name][-1, -1] = value
        return tensors

    edit_tensors(tmp_path, invalidate)
    with pytest.raises(AdapterError, match=f"{name} holds NaN or infinity"):
        verify_weights(inspect(tmp_path), geometry(), torch.float32)


def test_a_value_that_the_pool_cannot_hold(tmp_path: Path) -> None:
    make(tmp_path, r=2)
    edit_tensors(tmp_path, lambda tensors: {name: t * 1e6 for name, t in tensors.items()})
    with pytest.raises(AdapterError, match=r"too large for torch\.float16"):
        verify_weights(inspect(tmp_path), geometry(), torch.float16)
    verify_weights(inspect(tmp_path), geometry(), torch.bfloat16)


def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    rank = 2**19  # a file without content, which takes no room on the disk
    shapes = {"A": [rank, HIDDEN], "B": [HIDDEN, rank]}
    size = rank * HIDDEN * 2
    entries = {
        f"model.layers.0.self_attn.q_proj.lora_{side}.weight": {
            "dtype": "BF16", "shape": shapes[side], "data_offsets": [place * size, (place + 1) * size],
        }
        for place, side in enumerate("AB")
    }  # fmt: skip
    header = json.dumps(entries).encode()
    with open(tmp_path / WEIGHTS_NAME, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * size)
    config = {"peft_type": "LORA", "r": rank, "target_modules": ["q_proj"]}
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config))
    spec = inspect(tmp_path)
    tracemalloc.start()
    try:
        verify_weights(spec, geometry(), torch.float32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20 < size


def test_files_that_have_changed(tmp_path: Path) -> None:
    make(tmp_path, r=2)
    spec = inspect(tmp_path)
    before = os.stat(tmp_path / CONFIG_NAME)
    os.utime(tmp_path / CONFIG_NAME, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(FilesChanged, match=f"^{CONFIG_NAME} has changed") as caught:
        verify_weights(spec, geometry(), torch.float32)
    assert caught.value.status == 409
    (tmp_path / WEIGHTS_NAME).unlink()
    with pytest.raises(FilesChanged, match=f"holds no {WEIGHTS_NAME}") as caught:
        verify_weights(spec, geometry(), torch.float32)
    assert str(tmp_path.parent) not in str(caught.value)


def test_an_inspection_that_was_not_of_these_files(tmp_path: Path) -> None:
    make(tmp_path, r=2, target_modules=["q_proj", "v_proj"])
    spec = inspect(tmp_path)
    rows = list(spec.ranks)
    for ranks in ([(3, 2, 2), *rows[1:]], [(0, 0, 0), *rows[1:]], [rows[0], (2, 2, 2), *rows[2:]]):
        with pytest.raises(FilesChanged):
            verify_weights(dataclasses.replace(spec, ranks=tuple(ranks)), geometry(), torch.float32)
