"""Hardware and model shapes: what the named ones say, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.pricing.shapes import ALL_MODULES, SHAPES, ModelShape
from manylora_lab.sim.hardware import (
    HARDWARE,
    NPU_MEMORY_BYTES_S,
    NPU_MEMORY_CHOICES,
    fastlibra_npu,
    hardware_named,
)

from manylora.config.declaring import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_papers_card() -> None:
    npu = hardware_named("fastlibra-npu")
    assert (npu.memory_bytes, npu.flops, npu.link_bytes_s) == (64 * 2**30, 256e12, 32e9)
    assert npu.memory_bytes_s == NPU_MEMORY_BYTES_S
    assert "assumed" in npu.source
    assert NPU_MEMORY_BYTES_S in NPU_MEMORY_CHOICES
    assert fastlibra_npu(1.6e12).memory_bytes_s == 1.6e12
    assert "1.6 TB/s" in fastlibra_npu(1.6e12).source


def test_the_measured_card_is_what_the_results_say() -> None:
    ceilings = json.loads((ROOT / "docs/results/cache_h200_pinned.json").read_text())["ceilings"]
    measured = hardware_named("h200-measured")
    assert measured.sustained_memory_bytes_s == pytest.approx(ceilings["device_copy_bytes_per_s"], rel=0.01)
    assert measured.sustained_flops == pytest.approx(ceilings["gemm_flops_per_s"], rel=0.01)
    assert measured.sustained_link_bytes_s == pytest.approx(ceilings["host_to_device_bytes_per_s"], rel=0.01)


def test_nobody_is_nameless() -> None:
    assert all(hardware.name == name and hardware.source for name, hardware in HARDWARE.items())
    with pytest.raises(ConfigError, match="'h300' is not known: use a10, a10-caraserve, a100-40"):
        hardware_named("h300")


@pytest.mark.parametrize("change", [{"flops": 0}, {"link_efficiency": 1.1}, {"memory_bytes_s": -1}])
def test_impossible_hardware(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(HARDWARE["a10"], **change)


def test_shapes_have_the_models_known_sizes() -> None:
    parameters = {name: shape.weight_bytes / 2e9 for name, shape in SHAPES.items()}
    known = {
        "llama-2-7b": 6.74,
        "llama-2-13b": 13.02,
        "codellama-34b": 33.7,
        "llama-3-8b": 8.03,
        "llama-30b": 32.5,
        "llama-2-70b": 69.0,
        "llama-3-70b": 70.6,
    }
    assert parameters == pytest.approx(known, rel=0.005)
    assert SHAPES["llama-2-7b"].kv_token_bytes == 2**19
    assert SHAPES["llama-2-7b"].adapter_bytes(1) == 2**21  # q, k, v and o
    assert SHAPES["llama-3-8b"].kv_token_bytes == 2**17


def test_a_fingerprint_is_of_the_sizes() -> None:
    shape = SHAPES["llama-2-7b"]
    assert dataclasses.replace(shape, name="other").fingerprint == shape.fingerprint
    assert dataclasses.replace(shape, layers=33).fingerprint != shape.fingerprint
    assert len({each.fingerprint for each in SHAPES.values()}) == len(SHAPES)


def test_modules_are_of_the_shape() -> None:
    with pytest.raises(ConfigError, match="layers of a model"):
        ModelShape("none", 0, 8, 2, 1, 4, 16, 100)
    assert "gate_proj" not in ModelShape("plain", 1, 8, 2, 1, 4, 16, 100, is_gated=False).modules
    assert set(SHAPES["llama-2-7b"].modules) == set(ALL_MODULES)
