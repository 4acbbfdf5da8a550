"""CaraServe's kernels as batches of the engine's operator, and the lines through what they take."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from manylora_lab.bench.kernels.pool import exact_lora
from manylora_lab.bench.kernels.rig import errors
from manylora_lab.reproduce.caraserve_kernels import (
    KERNELS,
    ROWS_AN_ADAPTER,
    RankedBatch,
    adapters_of,
    batches_of,
    case_of,
    choice_of,
    fits_of,
)
from manylora_lab.reproduce.lora_rig import LoraRig


@pytest.fixture(scope="module")
def rig() -> LoraRig:
    return LoraRig("cpu", 96, 160, most_models=12, most_rank=8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_adds_what_adapters_of_their_own_ranks_add(rig: LoraRig, kernel: str) -> None:
    batch = RankedBatch("mixed", (2, 8, 4))
    case = case_of(rig, batch, kernel)
    records = case.segments.records.copy()
    per_row = 1 if kernel == "ours" else ROWS_AN_ADAPTER
    records[:, :, 2:] = torch.tensor(batch.ranks).repeat_interleave(per_row).numpy()[:, None, None]
    own = dataclasses.replace(case.segments, records=records)
    truth = exact_lora(case.x, rig.pool, 0, rig.group, own, rig.geometry)
    case.y.zero_()
    rig.sgmv(case)()
    assert case.y.norm() > 0
    assert errors([(case.y, truth)]).of_bound <= 1
    assert rig.errors(case)["error_of_bound"] <= 1


def test_what_each_kernel_reads() -> None:
    batch = RankedBatch("mixed", (2, 8))
    assert adapters_of(batch, "ours") == ([4, 4], [2, 8])
    assert adapters_of(batch, "mbgmv") == ([1] * 8, [2] * 4 + [8] * 4)
    assert adapters_of(batch, "bgmv") == ([1] * 8, [8] * 8)
    assert (batch.rank_sum, batch.rank_padded) == (40, 64)
    assert {each.num_rows for each in batches_of((8, 16), (2, 8), 3, 0)} == {8, 16}


def test_lines_are_held_against_points_that_they_do_not_know() -> None:
    rows = [
        {"kernel": "bgmv", "rank_padded": units, "rank_sum": (7 * units) % 11, "us": 50 + 0.5 * units}
        for units in range(10, 200, 7)
    ]
    found = fits_of(rows, "bgmv", "rank_padded")
    assert found is not None
    line, held_out = found
    assert line.slope_s == pytest.approx(0.5e-6, rel=1e-3)
    assert line.base_s == pytest.approx(50e-6, rel=1e-3)
    assert held_out > 0.999
    other = fits_of(rows, "bgmv", "rank_sum")
    assert other is not None
    assert other[1] < 0.5
    assert fits_of(rows[:2], "bgmv", "rank_padded") is None


def test_the_router_chooses_as_figure_5_says() -> None:
    assert (choice_of("bgmv"), choice_of("mbgmv")) == (2, 1)
