"""Figures of models that cards share: what must hold of their numbers, in runs of seconds."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from manylora_lab.bench.kernels.settings import POPULARITIES
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.punica_fig11 import BACKBONE, MIXED, SINGLE
from manylora_lab.reproduce.punica_fig12 import SHARDED
from manylora_lab.reproduce.punica_fig12 import SYSTEMS as TEXT_SYSTEMS
from manylora_lab.reproduce.registry import experiment
from manylora_lab.reproduce.report import ExperimentReport
from manylora_lab.reproduce.s_lora_fig8 import CARDS, SYSTEMS


@functools.cache
def smoke(name: str) -> ExperimentReport:
    return experiment(name).run(Setup("smoke", workers=1))


def test_what_is_exchanged_and_computed_costs_throughput() -> None:
    rows = {(row["cards"], row["system"]): row for row in smoke("s-lora-fig8").rows}
    assert set(rows) == {(cards, system) for cards in CARDS for system in SYSTEMS}
    for cards in CARDS:
        served = {system: rows[cards, system]["throughput_per_s"] for system in SYSTEMS}
        assert served["s-lora"] <= served["no LoRA communication"] <= served["base only"]
        assert len({rows[cards, system]["requests"] for system in SYSTEMS}) == 1
    assert rows[4, "base only"]["throughput_per_s"] > rows[2, "base only"]["throughput_per_s"]


def test_replicated_adapters_take_more_pages() -> None:
    rows = {(row["cards"], row["system"]): row["adapter_pages"] for row in smoke("s-lora-fig8").rows}
    for cards in CARDS:
        assert rows[cards, "replicated"] > rows[cards, "s-lora"]


def test_mixed_adapters_run_at_nearly_the_backbones_speed_and_single_ones_do_not() -> None:
    rows = {(row["popularity"], row["system"]): row["tokens_per_s"] for row in smoke("punica-fig12").rows}
    assert set(rows) == {(popularity, system) for popularity in POPULARITIES for system in TEXT_SYSTEMS}
    for system in (MIXED, SHARDED):
        assert 0.7 * rows["identical", BACKBONE] < rows["identical", system] < rows["identical", BACKBONE]
    assert rows["distinct", SINGLE] < 0.5 * rows["distinct", MIXED]


@pytest.mark.parametrize("name", ["s-lora-fig8", "punica-fig12"])
def test_equal_seeds_give_equal_rows(name: str) -> None:
    again = experiment(name).run(Setup("smoke", workers=1))
    assert again.rows == smoke(name).rows


@pytest.mark.parametrize("name", ["s-lora-fig8", "punica-fig12"])
def test_pictures(name: str, tmp_path: Path) -> None:
    experiment(name).draw(smoke(name), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
