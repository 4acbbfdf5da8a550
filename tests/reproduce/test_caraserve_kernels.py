"""CaraServe's kernels as batches of the engine's operator, and the lines through what they take."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from manylora_lab.bench.kernels.pool import exact_lora
from manylora_lab.bench.kernels.rig import errors
from manylora_lab.bench.provenance import ROOT
from manylora_lab.reproduce.caraserve_fits import device_lines, fit_of, papers_lines
from manylora_lab.reproduce.caraserve_kernels import (
    FIG9,
    KERNELS,
    PAPER_R2,
    RANKS,
    ROWS_AN_ADAPTER,
    RankedBatch,
    adapters_of,
    batches_of,
    case_of,
    choice_of,
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
    records[:, :, 2] = torch.tensor(batch.ranks).repeat_interleave(per_row).numpy()[:, None]
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
    found = fit_of(rows, "bgmv", ("rank_padded",))
    assert found is not None
    assert found.slopes_ns == pytest.approx([500.0], rel=1e-3)
    assert found.base_us == pytest.approx(50.0, rel=1e-3)
    assert found.r2 > 0.999
    other = fit_of(rows, "bgmv", ("rank_sum",))
    assert other is not None
    assert other.r2 < 0.5
    assert fit_of(rows[:2], "bgmv", ("rank_padded",)) is None
    assert fit_of([{**row, "rank_max": 8} for row in rows], "bgmv", ("rank_padded", "rank_max")) is None


def test_the_largest_rank_stands_beside_the_papers_measures() -> None:
    batches = batches_of((8, 16, 32, 64), RANKS, 4, 0)
    rows = [
        {
            "kernel": "mbgmv", "rank_sum": batch.rank_sum, "rank_padded": batch.rank_padded,
            "rank_max": max(batch.ranks), "us": 2 + 0.004 * batch.rank_sum + 0.1 * max(batch.ranks),
        }
        for batch in batches
    ]  # fmt: skip
    both = fit_of(rows, "mbgmv", ("rank_sum", "rank_max"))
    assert both is not None
    assert (both.base_us, *both.slopes_ns) == pytest.approx((2, 4, 100), rel=1e-3)
    assert both.r2 > 0.999
    line = fit_of(rows, "mbgmv", ("rank_sum",))
    assert line is not None
    assert line.r2 < 0.9
    told = {each.metric: each for each in FIG9.headline[0](rows)}
    assert told["mbgmv over the sum of ranks: R2 on points held out"].paper == PAPER_R2
    assert told["mbgmv over the sum of ranks: R2 on points held out"].ours == line.r2
    assert told["mbgmv over the sum of ranks, the largest rank beside: R2 on points held out"].ours == both.r2
    assert (
        told["mbgmv over the sum of ranks, the largest rank beside: ns a unit of that"].ours
        == both.slopes_ns[1]
    )


def test_the_lines_that_ship_are_those_of_the_record() -> None:
    record = json.loads((ROOT / "docs/results/caraserve-fig9-h200.json").read_text())
    assert device_lines() == papers_lines(record["rows"])


def test_the_router_chooses_as_figure_5_says() -> None:
    assert (choice_of("bgmv"), choice_of("mbgmv")) == (2, 1)
