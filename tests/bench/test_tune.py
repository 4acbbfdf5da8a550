"""``manylora bench kernels --tune``: what is chosen from made-up times, and the tables that come of it.

The kernels run in Triton's interpreter, on a tiny model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.bench.kernels import layers, measuring, rig
from manylora_lab.bench.kernels.measuring import Bench
from manylora_lab.bench.kernels.rig import Errors, KernelCase, KernelRig
from manylora_lab.bench.kernels.settings import TABLES, KernelSettings
from manylora_lab.pricing.shapes import ModelShape

from manylora.cli import main

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)

from manylora_lab.bench.kernels import choosing, tune, tune_attention, tune_linear, tune_lora  # noqa: E402

from manylora.kernels.triton import decode_table, lora_plan, products  # noqa: E402
from manylora.kernels.triton.decode_table import DecodeConfig  # noqa: E402
from manylora.kernels.triton.lora import LoraKernels  # noqa: E402
from manylora.kernels.triton.lora_plan import DEFAULT  # noqa: E402

TINY = ModelShape("tiny", 2, 32, 2, 1, 16, 48, 64, itemsize=4, is_tied=True)
SHIPPED = {"linear": products.TABLE, "attention": decode_table.TABLE, "lora": lora_plan.TABLE}


def tuned(part: str, out: Path, *words: str) -> int:
    command = ["bench", "kernels", "--tune", part, "--device", "cpu", "--ops", "triton", "--dtype", "float16"]
    return main([*command, "--shape", "tiny", "--quick", "--out", str(out), *words])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rig._SHAPES, "tiny", TINY)


@pytest.fixture
def first_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, lambda number: 2.0 + number)


@pytest.fixture
def last_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, lambda number: 2.0**-number)


def made_up(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
    """Times by the place in the turn. Without adapters no time passes."""

    def medians(device: torch.device, steps: Sequence[Any], repeats: int) -> list[float]:
        is_base = ["LoraLayer" in getattr(step, "__qualname__", "") for step in steps]
        return [0.0 if base else seconds(number) for number, base in enumerate(is_base)]

    monkeypatch.setattr(measuring, "medians", medians)
    monkeypatch.setattr(layers, "medians", medians)


# ---- what is chosen ------------------------------------------------------------------------------------


def test_the_fastest_of_all_cases_together() -> None:
    assert choosing.fastest([{"a": 1.0, "b": 2.0}]) == "a"
    assert choosing.fastest([{"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 3.0}]) == "b"
    assert choosing.fastest([{"a": 1.0, "b": 2.0}, {"b": 3.0}]) == "b", "what failed once is none"
    assert choosing.fastest([{"a": 1.0}, {}]) is None
    assert choosing.fastest([]) is None


def test_the_library_stays_where_little_is_gained() -> None:
    ours, shape = products.LinearConfig(64, 128, 2, 4, 4), (16, 64, 96)
    for library, expected in ((1.0, {}), (1.1, {shape: ours})):
        choices: dict[products.Shape, products.Choice] = {}
        tune_linear._choose(choices, shape, {tune_linear.LIBRARY: library, ours: 0.99})
        assert choices == expected
    choices = {}
    tune_linear._choose(choices, shape, {tune_linear.LIBRARY: 2.0, products.OTHER_LIBRARY: 1.0, ours: 1.5})
    assert choices == {shape: None}


def test_neighbours_with_equal_sizes_are_one_row() -> None:
    few, many = DecodeConfig(32), DecodeConfig(64)
    assert tune_attention.merged([(8, few), (16, few), (32, many), (64, many)]) == [(16, few), (4096, many)]
    assert tune_attention.merged([(8, few)]) == [(4096, few)]


def test_only_what_runs_and_is_right_is_timed(tmp_path: Path) -> None:
    bench = Bench(KernelRig(KernelSettings(tmp_path, "cpu", is_quick=True)), KernelSettings(tmp_path), 1, 0.0)

    def case(name: str, of_bound: float) -> KernelCase:
        def check() -> Errors:
            if name == "too large":
                raise RuntimeError("out of resources")
            return Errors(0.0, of_bound)

        return KernelCase("linear", {"sizes": name}, 1, 1, check, lambda: None, 1)

    found = bench.candidates({name: case(name, bound) for name, bound in (
        ("right", 0.5), ("wrong", 2.0), ("too large", 0.5),
    )})  # fmt: skip
    assert list(found) == ["right"]
    assert [row["sizes"] for row in bench.rows] == ["right"]
    assert bench.left_out == ["linear, sizes too large: RuntimeError: out of resources"]
    assert len(bench.mistakes) == 1
    assert bench.mistakes[0].startswith("linear, sizes wrong: ")


# ---- the tables ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("last_is_fastest")
def test_products_by_shape_and_bucket(tmp_path: Path) -> None:
    assert tuned("linear", tmp_path) == 0
    found = products.stored_choices("cpu", tmp_path / "linear.json")
    shapes = {(32, 64), (32, 32), (32, 96), (48, 32)}
    assert set(found) == {(tokens, *shape) for tokens in (16, 32) for shape in shapes}
    for (tokens, _, _), config in found.items():
        assert config == products.LinearConfig(*tune_linear.SHAPES[tokens][2])
    report = read(tmp_path / "tune_linear.json")
    assert all(row["is_right"] for row in report["rows"] if row["kernel"] == "linear")
    assert {row["way"] for row in report["rows"] if row["kernel"] == "layer"} == {"cublas", "chosen"}


@pytest.mark.usefixtures("first_is_fastest")
def test_no_product_is_faster_than_the_library(tmp_path: Path) -> None:
    assert tuned("linear", tmp_path) == 0
    assert products.stored_choices("cpu", tmp_path / "linear.json") == {}


@pytest.mark.usefixtures("first_is_fastest")
def test_attention_by_rows(tmp_path: Path) -> None:
    assert tuned("attention", tmp_path) == 0
    table = decode_table.stored_table("cpu", 2, 16, tmp_path / "attention.json")
    assert table.choices == ((4096, DecodeConfig(64, 4, 3, 264)),)
    assert table.tiles == tune_attention.TILES[0]


@pytest.mark.usefixtures("last_is_fastest")
def test_a_whole_layer_decides_on_decoding(tmp_path: Path) -> None:
    """There the default is measured last."""
    assert tuned("attention", tmp_path) == 0
    table = decode_table.stored_table("cpu", 2, 16, tmp_path / "attention.json")
    assert table.choices == ((4096, DecodeConfig()),)
    assert table.tiles == tune_attention.TILES[1]


@pytest.mark.usefixtures("last_is_fastest")
def test_lora_by_kind_of_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = LoraKernels(dataclasses.replace(DEFAULT, long_run=2), 4)
    monkeypatch.setattr(tune_lora, "lora_kernels_on", lambda device: kernels)
    monkeypatch.setattr(tune_lora, "PROMPTS", (tune_lora.Kind("1+2", (1, 2), 4, 2, 128),))
    monkeypatch.setattr(tune_lora, "LONG", (tune_lora.Kind("3", (3,), 3, None, 0),))
    assert tuned("lora", tmp_path) == 0
    config = lora_plan.stored_config("cpu", tmp_path / "lora.json")
    assert config is not None
    assert config.short == tune_lora.TILES[16][1]
    ((most, how),) = config.beside
    assert (most, how.product_first[:3], how.sizes.chunk) == (16, ("qkv", "o", "gate_up"), 1024)
    assert config.mixed == ((128, tune_lora.TILES[16][1]),)
    assert config.writes_from == 1, "the later of the two was to write"
    assert config.long == tune_lora.LONG_TILES[1]


@pytest.mark.parametrize("part", TABLES)
def test_what_there_is_no_time_for_stays_as_it_is(part: str, tmp_path: Path) -> None:
    assert tuned(part, tmp_path, "--budget", "1e-6") == 0
    found, shipped = read(tmp_path / SHIPPED[part].name), read(SHIPPED[part])
    assert {name: entry for name, entry in found.items() if name != "cpu"} == shipped
    assert read(tmp_path / f"tune_{part}.json")["left_out"]


@pytest.mark.usefixtures("last_is_fastest")
def test_another_shape_is_added_to_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"tokens": 16, "in": 7, "out": 9}
    (tmp_path / "linear.json").write_text(json.dumps({"cpu": [other, {"tokens": 16, "in": 32, "out": 32}]}))
    assert tuned("linear", tmp_path) == 0
    found = products.stored_choices("cpu", tmp_path / "linear.json")
    assert found[16, 7, 9] is None
    assert found[16, 32, 32] is not None


@pytest.mark.parametrize("part", ["linear", "attention"])
def test_tables_are_written_as_they_are_shipped(part: str) -> None:
    assert tune.table_text(read(SHIPPED[part])) == SHIPPED[part].read_text()
