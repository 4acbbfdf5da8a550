"""Adapter folders made from the shipped ones: widened, narrowed, broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, np.ndarray]


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def with_tensors(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    copy_of(source, target)
    save_file(change(load_file(source / WEIGHTS)), target / WEIGHTS)
    return target


def with_config(source: Path, target: Path, **changes: object) -> Path:
    copy_of(source, target)
    config = json.loads((source / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps({**config, **changes}))
    return target


def widened(source: Path, target: Path, times: int) -> Path:
    """The same adapter with ``times`` its rank."""

    def repeat(tensors: Tensors) -> Tensors:
        return {
            name: np.concatenate([tensor] * times, axis=0 if ".lora_A." in name else 1)
            for name, tensor in tensors.items()
        }

    with_tensors(source, target, repeat)
    config = json.loads((source / CONFIG).read_text())
    patterns = {module: rank * times for module, rank in (config.get("rank_pattern") or {}).items()}
    changed = {**config, "r": config["r"] * times, "rank_pattern": patterns}
    (target / CONFIG).write_text(json.dumps(changed))
    return target


def rank_of(folder: Path) -> int:
    """The largest rank of an adapter."""
    return max(
        int(tensor.shape[0]) for name, tensor in load_file(folder / WEIGHTS).items() if ".lora_A." in name
    )


def of_other_base(source: Path, target: Path) -> tuple[Path, str, list[int]]:
    """An adapter whose base has half the width; also its first misfit among tensors, and that one's shape."""

    def halve(tensors: Tensors) -> Tensors:
        return {
            name: np.ascontiguousarray(tensor[:, : tensor.shape[1] // 2] if ".lora_A." in name else tensor)
            for name, tensor in tensors.items()
        }

    with_tensors(source, target, halve)
    found = load_file(target / WEIGHTS)
    first = next(name for name in sorted(found) if name.endswith("layers.0.self_attn.q_proj.lora_A.weight"))
    return target, first, list(found[first].shape)
